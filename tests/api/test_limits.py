"""Limits, tiers and timeouts as clients meet them, with both real SDKs."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import anthropic
import httpx
import openai
import pytest

from penstock.api.http.errors import duration
from penstock.core.clock import VirtualClock
from penstock.core.errors import EngineUnavailable, Overloaded, PenstockError
from penstock.core.gateway_config import GatewayConfig
from penstock.core.messages import EngineStats
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request, Tier
from penstock.gateway.accounts import Accounts, Claim
from penstock.gateway.answers import stream
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import Usage
from penstock.gateway.ratelimits.local import LocalLimiter
from penstock.gateway.ratelimits.settings import LimitSettings, ScopeLimits, Subject
from penstock.gateway.ratelimits.spend import Spend
from penstock.gateway.settings.settings import TierSettings
from tests.api.conftest import Serve, Served, direct_client
from tests.gateway.fake_engine import FakeEngine, script_text, until
from tests.loop_time import pass_time

USER: Any = {"role": "user", "content": "hi"}
CHAT = {"model": "bytes", "messages": [USER]}
STRICT = ScopeLimits(requests_per_minute=3, input_tokens_per_minute=600, output_tokens_per_minute=1200)


def limited(**scopes: Any) -> LocalLimiter:
    """Time stands still, so that every header can be foretold."""
    return LocalLimiter(LimitSettings(**scopes), VirtualClock())


def anthropic_sdk(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


def client_of(engine: FakeEngine, limiter: LocalLimiter) -> httpx.AsyncClient:
    return direct_client(engine, Gateway(engine, GatewayConfig(), accounts=Accounts(limiter)))


def test_openai_headers_on_whole_and_streamed_answers_and_on_a_429(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("four")), accounts=Accounts(limited(key=STRICT)))
    chat = served.sdk().chat.completions.with_raw_response
    whole = chat.create(model="bytes", messages=[USER], max_tokens=40)
    prompt_tokens = whole.parse().usage.prompt_tokens  # type: ignore[union-attr]
    assert whole.headers["x-ratelimit-limit-requests"] == "3"
    assert whole.headers["x-ratelimit-remaining-requests"] == "2"
    assert whole.headers["x-ratelimit-reset-requests"] == "20s"
    # The tighter of the two token limits, by the share that is left.
    assert whole.headers["x-ratelimit-limit-tokens"] == "1200"
    assert whole.headers["x-ratelimit-remaining-tokens"] == str(1200 - 40)
    assert whole.headers["x-ratelimit-reset-tokens"] == "2s"
    assert 600 - prompt_tokens > 0

    streamed = chat.create(model="bytes", messages=[USER], max_tokens=40, stream=True)
    assert streamed.headers["x-ratelimit-remaining-requests"] == "1"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed.parse()) == "four"

    chat.create(model="bytes", messages=[USER], max_tokens=40)
    with pytest.raises(openai.RateLimitError) as refused:
        served.sdk().chat.completions.create(model="bytes", messages=[USER])
    headers = refused.value.response.headers
    assert refused.value.code == "rate_limit_exceeded"
    assert headers["retry-after"] == "20"
    assert headers["retry-after-ms"] == "20000"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-reset-requests"] == "1m0s"
    assert "x-should-retry" not in headers


def test_anthropic_headers_on_whole_and_streamed_answers_and_on_a_429(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("four")), accounts=Accounts(limited(workspace=STRICT)))
    ask: Any = {"model": "bytes", "max_tokens": 40, "messages": [USER]}
    before = datetime.now(UTC)
    whole = anthropic_sdk(served).messages.with_raw_response.create(**ask)
    for kind, limit in (("requests", 3), ("tokens", 1200), ("input-tokens", 600), ("output-tokens", 1200)):
        name = f"anthropic-ratelimit-{kind}"
        assert whole.headers[f"{name}-limit"] == str(limit)
        assert int(whole.headers[f"{name}-remaining"]) < limit
        assert (
            before <= datetime.fromisoformat(whole.headers[f"{name}-reset"]) < before + timedelta(minutes=5)
        )
    assert not [name for name in whole.headers if name.startswith("x-ratelimit")]

    streamed = anthropic_sdk(served).messages.with_raw_response.create(**ask, stream=True)
    assert streamed.headers["anthropic-ratelimit-requests-remaining"] == "1"
    assert [event.type for event in streamed.parse()][-1] == "message_stop"

    anthropic_sdk(served).messages.create(**ask)
    with pytest.raises(anthropic.RateLimitError) as refused:
        anthropic_sdk(served).messages.create(**ask)
    assert refused.value.response.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert refused.value.response.headers["retry-after"] == "20"


def test_the_sdk_waits_as_told_and_then_succeeds(serve: Serve) -> None:
    limiter = LocalLimiter(LimitSettings(key=ScopeLimits(requests_per_minute=1200)))
    served = serve(FakeEngine(script_text("ok")), accounts=Accounts(limiter))
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=5)
    client.chat.completions.create(model="bytes", messages=[USER])
    (meter,) = limiter._meters._meters.values()
    assert meter.requests is not None
    meter.requests.take(1204, limiter.now())
    answer = client.chat.completions.create(model="bytes", messages=[USER])
    assert answer.choices[0].message.content == "ok"
    assert sum(limiter.metrics.refusals.values()) >= 1


async def test_a_caller_without_limits_gets_no_headers() -> None:
    async with client_of(FakeEngine(script_text("ok")), limited()) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200
    assert not [name for name in answer.headers if "ratelimit" in name]


async def test_an_error_after_admission_carries_the_headers_too() -> None:
    def refuse(request: Request) -> list[TokenEvent | PenstockError]:
        return [Overloaded("The queue is full.", retry_after_s=7.2)]

    for is_stream in (False, True):
        async with client_of(FakeEngine(refuse), limited(key=STRICT)) as client:
            answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": is_stream})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "8"
        assert answer.headers["retry-after-ms"] == "7200"
        assert answer.headers["x-ratelimit-remaining-requests"] == "2"
        # What it reserved came back; the request itself counts.
        async with client_of(FakeEngine(refuse), limited(key=STRICT)) as client:
            answer = await client.post("/v1/messages", json=CHAT | {"max_tokens": 5, "stream": is_stream})
        assert answer.status_code == 529
        assert answer.headers["anthropic-ratelimit-requests-remaining"] == "2"


async def test_an_error_that_ends_many_requests_shows_each_caller_its_own_limits() -> None:
    engine = FakeEngine()
    async with client_of(engine, limited(key=STRICT)) as client:
        asking = [asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)) for _ in range(3)]
        while len(engine.streams) < 3:
            await asyncio.sleep(0)
        gone = EngineUnavailable("The engine is gone.")
        for doomed in list(engine.streams.values()):
            doomed.on_error(gone)
        answers = await asyncio.gather(*asking)
    assert {answer.status_code for answer in answers} == {503}
    assert {answer.headers["x-ratelimit-remaining-requests"] for answer in answers} == {"0", "1", "2"}


async def test_a_request_larger_than_its_limit_is_not_worth_retrying() -> None:
    async with client_of(FakeEngine(), limited(key=ScopeLimits(input_tokens_per_minute=5))) as client:
        answer = await client.post("/v1/completions", json={"model": "bytes", "prompt": "more than five"})
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "request_exceeds_limit"
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers


class SpentBudget:
    def __init__(self, spent_dollars: float = 5.0) -> None:
        self.spent_microdollars = spent_dollars * 1_000_000

    async def spent(self, subject: Subject) -> Spend:
        return Spend(self.spent_microdollars, self.spent_microdollars)

    def cost_microdollars(self, claim: Claim, usage: Usage) -> float:
        return 1.0


def test_a_spent_budget_is_a_quota_that_no_sdk_retries(serve: Serve) -> None:
    settings = LimitSettings(workspace=ScopeLimits(dollars_per_day=5))
    served = serve(
        FakeEngine(script_text("ok")), accounts=Accounts(LocalLimiter(settings, spending=SpentBudget()))
    )
    patient = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=3)
    with pytest.raises(openai.RateLimitError, match=r"daily budget of \$5\.00") as refused:
        patient.chat.completions.create(model="bytes", messages=[USER])
    assert refused.value.code == "insufficient_quota"
    assert refused.value.response.headers["x-should-retry"] == "false"


async def test_a_budget_that_is_spent_meanwhile_cuts_no_answer() -> None:
    """Running answers end whole, streamed or not, and every later request is refused."""
    engine, spending = FakeEngine(), SpentBudget(0.0)
    settings = LimitSettings(workspace=ScopeLimits(dollars_per_day=5))
    async with client_of(engine, LocalLimiter(settings, spending=spending)) as client:
        asking = [
            asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"stream": is_stream}))
            for is_stream in (True, False)
        ]
        await until(lambda: len(engine.streams) == 2)
        for request_id in engine.streams:
            engine.emit(request_id, *b"half")
        spending.spent_microdollars = 5_000_000.0
        refused = await client.post("/v1/chat/completions", json=CHAT)
        for request_id in list(engine.streams):
            engine.emit(request_id, *b" whole", finish_reason=FinishReason.STOP)
        streamed, whole = await asyncio.gather(*asking)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert whole.json()["choices"][0]["message"]["content"] == "half whole"


async def test_a_client_that_hangs_up_gives_back_its_place_and_unused_output(serve: Serve) -> None:
    engine = FakeEngine()
    limiter = limited(key=ScopeLimits(concurrent_requests=1, output_tokens_per_minute=400))
    served = serve(engine, accounts=Accounts(limiter))
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        for is_stream in (True, False):
            asking = asyncio.create_task(
                client.post("/v1/chat/completions", json=CHAT | {"stream": is_stream})
            )
            await asyncio.to_thread(served.wait_until, lambda: bool(engine.streams))
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 429
            asking.cancel()
            await asyncio.to_thread(served.wait_until, lambda: not engine.streams)
        engine.script = script_text("ok")
        await asyncio.to_thread(served.wait_until, lambda: served.gateway.num_live == 0)
        answer = await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1})
    assert answer.status_code == 200
    assert answer.headers["x-ratelimit-remaining-tokens"] == "399"


async def test_a_streamed_answer_is_charged_like_a_whole_one() -> None:
    for is_stream in (False, True):
        limiter = limited(key=ScopeLimits(input_tokens_per_minute=600, output_tokens_per_minute=1200))
        async with client_of(FakeEngine(script_text("four", num_cached_tokens=2)), limiter) as client:
            first = await client.post("/v1/completions", json=ask_for("12345678", stream=is_stream))
            second = await client.post("/v1/completions", json=ask_for("", stream=is_stream))
        assert first.status_code == second.status_code == 200
        (meter,) = limiter._meters._meters.values()
        assert meter.input_tokens is not None
        assert meter.output_tokens is not None
        assert meter.input_tokens.level == 600 - (8 - 2) - 0
        assert meter.output_tokens.level == 1200 - 2 * 5
        assert meter.num_running == 0


async def test_cached_input_is_free_for_others_as_soon_as_an_answer_begins() -> None:
    engine = FakeEngine()
    limiter = limited(key=ScopeLimits(input_tokens_per_minute=100))
    gateway = Gateway(engine, GatewayConfig(), accounts=Accounts(limiter))
    async with direct_client(engine, gateway) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=ask_for("x" * 80)))
        while not engine.streams:
            await asyncio.sleep(0)
        (request_id,) = engine.streams
        engine.streams[request_id].on_event(TokenEvent(request_id, (65,), num_cached_tokens=64))
        (meter,) = limiter._meters._meters.values()
        assert meter.input_tokens is not None
        assert meter.input_tokens.level == 100 - 80 + 64
        engine.emit(request_id, 66, finish_reason=FinishReason.STOP)
        assert (await asking).status_code == 200
    assert meter.input_tokens.level == 100 - 80 + 64


def ask_for(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": "bytes", "prompt": prompt or [1, 2], "max_tokens": 50} | fields


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.02, "20ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (3612.25, "1h0m12.25s"),
    ],
)
def test_durations_read_like_openais(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("asked", "best", "used", "tier"),
    [
        (None, Tier.PRIORITY, "default", Tier.DEFAULT),
        ("auto", Tier.PRIORITY, "default", Tier.DEFAULT),
        ("default", Tier.PRIORITY, "default", Tier.DEFAULT),
        ("flex", Tier.PRIORITY, "flex", Tier.BATCH),
        ("priority", Tier.PRIORITY, "priority", Tier.PRIORITY),
        ("priority", Tier.DEFAULT, "default", Tier.DEFAULT),
        ("priority", Tier.BATCH, "flex", Tier.BATCH),
    ],
)
def test_the_answer_names_the_tier_that_was_really_used(
    serve: Serve, asked: Any, best: Tier, used: str, tier: Tier
) -> None:
    served = serve(FakeEngine(script_text("ok")))
    served.gateway.tiers = TierSettings(best=best)
    body: Any = {"model": "bytes", "messages": [USER]} | ({"service_tier": asked} if asked else {})
    assert served.sdk().chat.completions.create(**body).service_tier == used
    chunks = list(served.sdk().chat.completions.create(**body, stream=True))
    assert chunks[0].service_tier == used
    assert {request.tier for request in served.engine.added} == {tier}


async def test_the_timeout_header_reaches_the_engine_and_the_shorter_one_wins() -> None:
    engine = FakeEngine(script_text("ok"))
    timeouts: list[float | None] = []
    add = engine.add

    def spy(request: Request, *, timeout_s: float | None, **callbacks: Any) -> None:
        timeouts.append(timeout_s)
        add(request, timeout_s=timeout_s, **callbacks)

    engine.add = spy  # type: ignore[method-assign, assignment]
    gateway = Gateway(engine, GatewayConfig(request_timeout_s=60), VirtualClock())
    async with direct_client(engine, gateway) as client:
        for headers in ({"x-request-timeout-ms": "2500"}, {"x-request-timeout-ms": "90000"}, {}):
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert answer.status_code == 200
    assert timeouts == [2.5, 60.0, 60.0]


@pytest.mark.parametrize("value", ["0", "-1", "soon", "1.5", "9" * 20, "²"])
async def test_a_timeout_that_is_none_is_a_400(value: str) -> None:
    async with direct_client(FakeEngine()) as client:
        headers = {"x-request-timeout-ms": value.encode()}
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert answer.status_code == 400
    assert "x-request-timeout-ms" in answer.json()["error"]["message"]


async def test_an_engine_that_hangs_past_the_deadline_is_a_504(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "ENGINE_GRACE_S", 0.0)
    monkeypatch.setattr(
        "penstock.api.http.answers.FIRST_BYTES_S", 3600.0
    )  # until then, a stream has no status
    engine = FakeEngine()
    async with direct_client(engine) as client:
        for is_stream in (False, True):
            asking = asyncio.create_task(
                client.post(
                    "/v1/chat/completions",
                    json=CHAT | {"stream": is_stream},
                    headers={"x-request-timeout-ms": "600000"},
                )
            )
            await until(lambda: bool(engine.streams))
            await asyncio.sleep(0)  # now it waits for the engine
            pass_time(600.0)
            answer = await asking
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert not engine.streams
    assert len(engine.aborted) == 2


async def test_leaving_the_queue_unserved_is_a_503_with_the_time_the_queue_needs() -> None:
    def give_up(request: Request) -> list[TokenEvent]:
        return [TokenEvent(request.id, finish_reason=FinishReason.ERROR, error="Given up in the queue.")]

    engine = FakeEngine(give_up)
    engine.stats = EngineStats(num_waiting=4, num_waiting_tokens=2_500, step_tokens=100, step_s=1.0)
    async with direct_client(engine) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "25"
