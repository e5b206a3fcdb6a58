"""The last requests: their timelines, their replicas, and that prompts stay out unless they are asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from penstock.core.gateway_config import GatewayConfig
from penstock.core.identity import OPEN_PRINCIPAL
from penstock.core.plan import Prefill
from penstock.core.request import Request, SamplingParams, Tier
from penstock.dispatch import Send
from penstock.gateway.accounts import Accounts, Claim, Outcome
from penstock.gateway.gateway import Gateway
from penstock.gateway.history.requests import MAX_ENDED, RecentRequests
from penstock.gateway.prompts import GenerationRequest, SamplingOptions, TextPrompt, Usage
from penstock.gateway.siblings import Siblings
from tests.gateway.fake_engine import FakeEngine, script_text

NOW = 1_800_000_000.0
DONE = Outcome(
    usage=Usage(100, 20, 64),
    status="completed",
    duration_s=1.0,
    first_token_s=0.5,
    queue_s=0.2,
    prefill=Prefill(0.25, ((0.0, 64), (0.1, 36)), "blocks"),
)


def claim(name: str = "r") -> Claim:
    return Claim(
        request_id=name,
        principal=OPEN_PRINCIPAL,
        model="m",
        endpoint="chat",
        tier=Tier.DEFAULT,
        input_tokens=100,
        max_output_tokens=50,
    )


def sent(name: str, replica_id: str) -> Send:
    request = Request(id=name, prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=5))
    return Send(replica_id, request, None, None, "prefix", 64)


async def test_the_timeline_of_a_request() -> None:
    recent = RecentRequests(wall_time=lambda: NOW)
    settle = recent.begin(claim())
    recent.note_sent(sent("r-0", "replica-1"))
    (running,) = await recent.latest(10)
    assert (running.status, running.duration_s) == ("running", None)
    settle(DONE)
    (view,) = await recent.latest(10)
    assert (view.status, view.prompt_tokens, view.cached_tokens, view.completion_tokens) == (
        "completed",
        100,
        64,
        20,
    )
    assert view.before_engine_s == pytest.approx(0.05)
    assert (view.queue_s, view.prefill_s, view.waited_for) == (0.2, 0.25, "blocks")
    assert view.chunks == ((0.0, 64), (0.1, 36))
    assert [(route.replica_id, route.reason, route.matched_tokens) for route in view.routes] == [
        ("replica-1", "prefix", 64)
    ]
    assert view.prompt is None


async def test_the_newest_come_first_and_the_oldest_are_forgotten() -> None:
    times = iter(range(100_000))
    recent = RecentRequests(wall_time=lambda: float(next(times)))
    for number in range(MAX_ENDED + 20):
        recent.begin(claim(str(number)))(DONE)
    views = await recent.latest(10_000)
    assert len(views) == MAX_ENDED
    assert (views[0].id, views[-1].id) == (str(MAX_ENDED + 19), "20")
    assert [view.id for view in await recent.latest(2, status="completed", model="m")] == ["519", "518"]
    assert await recent.latest(10, status="failed") == []
    assert await recent.latest(10, model="other") == []


async def test_requests_of_all_processes_are_shown(tmp_path: Path) -> None:
    sockets = [str(tmp_path / name) for name in ("0", "1")]
    siblings = [Siblings(sockets, number) for number in (0, 1)]
    ours, theirs = (RecentRequests(each) for each in siblings)
    ours.begin(claim("a"))(DONE)
    theirs.begin(claim("b"))(DONE)
    async with siblings[0].serving(), siblings[1].serving():
        assert {view.id for view in await ours.latest(10)} == {"a", "b"}


def test_a_request_that_is_not_known_has_no_route() -> None:
    RecentRequests().note_sent(sent("unknown-0", "replica-1"))


@pytest.mark.parametrize("shows_prompts", [False, True])
async def test_prompts_are_kept_only_where_the_operator_asked(shows_prompts: bool) -> None:
    recent = RecentRequests(keeps_prompts=shows_prompts)
    gateway = Gateway(FakeEngine(script_text("fine")), GatewayConfig(), accounts=Accounts(observers=[recent]))
    if shows_prompts:
        gateway.on_request = recent.note_prompt
    answer = await gateway.ask(
        GenerationRequest(prompts=(TextPrompt("my secret"),), sampling=SamplingOptions(), request_id="r")
    )
    async with asyncio.timeout(60):
        await answer.collect()
    (view,) = await recent.latest(10)
    assert view.prompt == ("my secret" if shows_prompts else None)
    assert ("my secret" in msgspec.json.encode(view).decode()) is shows_prompts
