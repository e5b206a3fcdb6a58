from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest

from penstock.bench.load import ClosedLoop, IntRange, PoissonArrivals, Workload, find_target, run_load
from penstock.bench.summary import summarize
from penstock.core.errors import UsageError
from tests.loop_time import pass_time

from .fake_server import Behaviour, FakeServer

WORKLOAD = Workload(
    arrivals=ClosedLoop(3),
    num_requests=10,
    input_len=IntRange(5, 9),
    output_len=IntRange(2, 6),
    shared_prefix_len=4,
)


async def test_every_prompt_is_sent_once_and_counted() -> None:
    async with FakeServer(num_cached_tokens=4).running() as server:
        target = await find_target("ours", server.url, None, "secret")
        answered: list[int] = []
        result = await run_load(target, WORKLOAD, on_done=answered.append)
    summary = summarize(target, WORKLOAD, result)

    prompts = WORKLOAD.prompts()
    assert sorted(body["prompt"] for body in server.bodies) == sorted(list(p.token_ids) for p in prompts)
    assert all(body["ignore_eos"] and body["stream"] and body["temperature"] == 0 for body in server.bodies)
    assert {body["model"] for body in server.bodies} == {"fake-model"}
    assert set(server.authorizations) == {"Bearer secret"}
    assert sum(answered) == summary.num_completed == 10
    assert summary.num_errors == 0
    assert summary.num_input_tokens == sum(len(prompt.token_ids) for prompt in prompts)
    assert summary.num_output_tokens == sum(prompt.max_tokens for prompt in prompts)
    assert summary.num_cached_tokens == 40
    # One time to first token per request, and a gap between every two tokens of it: the closing event is no token.
    assert sum(len(outcome.gaps_s) for outcome in result.outcomes) == summary.num_output_tokens - 10
    assert summary.ttft_ms is not None
    assert summary.e2e_ms is not None
    assert 0 < summary.ttft_ms.p50 <= summary.e2e_ms.max


async def test_a_closed_loop_keeps_its_number_of_streams() -> None:
    async with FakeServer().running() as server:
        target = await find_target(None, server.url, None, None)
        await run_load(target, replace(WORKLOAD, num_requests=30))
    assert server.most_at_once == 3


async def test_poisson_arrivals_do_not_wait_for_answers() -> None:
    workload = replace(WORKLOAD, arrivals=PoissonArrivals(1e5), num_requests=20)
    async with FakeServer(behaviour="silent").running() as server:
        target = await find_target(None, server.url, None, None)
        running = asyncio.create_task(run_load(target, workload, timeout_s=600.0))
        while len(server.bodies) < 20:
            await asyncio.sleep(0.001)
        pass_time(600.0)
        result = await running
    assert server.most_at_once == 20
    assert len(result.outcomes) == 20


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("refuse", "status 503: .*too busy"),
        ("cut", "closed early"),
        ("error-event", "the engine stopped"),
        ("no-done", r"without \[DONE\]"),
        ("not-http", "begins with"),
        ("silent", "no complete answer within"),
    ],
)
async def test_a_failed_answer_is_an_error_and_no_figure(behaviour: Behaviour, message: str) -> None:
    async with FakeServer(behaviour=behaviour).running() as server:
        target = await find_target(None, server.url, None, None)
        timeout_s = 0.2 if behaviour == "silent" else 60.0
        result = await run_load(target, replace(WORKLOAD, num_requests=2), timeout_s=timeout_s)
    summary = summarize(target, WORKLOAD, result)
    assert (summary.num_completed, summary.num_errors) == (0, 2)
    assert summary.num_output_tokens == 0
    assert summary.ttft_ms is summary.itl_ms is summary.e2e_ms is None
    (error,) = summary.errors
    assert re.search(message, error)


async def test_tokens_are_events_where_the_server_reports_no_usage() -> None:
    async with FakeServer(behaviour="no-usage").running() as server:
        target = await find_target(None, server.url, None, None)
        result = await run_load(target, WORKLOAD)
    assert sum(outcome.num_output_tokens for outcome in result.outcomes) == sum(
        prompt.max_tokens for prompt in WORKLOAD.prompts()
    )


async def test_no_server_is_a_sentence() -> None:
    async with FakeServer().running() as server:
        address = server.url
    with pytest.raises(UsageError, match="No server answers at"):
        await find_target(None, address, None, None)
