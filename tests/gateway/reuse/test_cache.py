"""The response cache: exact, opt-in, bounded, and walled off by workspace."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.clock import VirtualClock
from penstock.core.errors import Overloaded
from penstock.core.gateway_config import GatewayConfig
from penstock.core.identity import Principal
from penstock.core.request import FinishReason
from penstock.gateway.accounts import Accounts, Claim, Outcome
from penstock.gateway.answers.choice import Delta, TokenDetail, ToolCallDelta, merged
from penstock.gateway.answers.stream import ReaderGone
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import (
    AnswerText,
    BeamOptions,
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    SamplingOptions,
    TextPrompt,
    Tool,
)
from penstock.gateway.reuse.replay import AnswerCache, IdempotencySettings, ResponseCacheSettings
from penstock.gateway.reuse.reuse import request_fingerprint
from tests.gateway.fake_engine import FakeEngine, script_text


class Rows:
    """A ledger that remembers."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.settled: list[tuple[Claim, Outcome]] = []

    def begin(self, claim: Claim) -> None:
        self.begun.append(claim.request_id)

    def settle(self, claim: Claim, outcome: Outcome) -> None:
        self.settled.append((claim, outcome))


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def rows() -> Rows:
    return Rows()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(script_text("Grüße 😀"))


@pytest.fixture
def gateway(engine: FakeEngine, rows: Rows, clock: VirtualClock) -> Gateway:
    return Gateway(engine, GatewayConfig(), clock, accounts=Accounts(ledger=rows))


def request_for(prompt: Prompt | None = None, *, workspace: str = "w", **changes: Any) -> GenerationRequest:
    fields: dict[str, Any] = {
        "prompts": (prompt or TextPrompt("hi"),),
        "sampling": SamplingOptions(),
        "principal": Principal(workspace_id=workspace),
        "cache_response_s": 60.0,
    }
    return GenerationRequest(**(fields | changes))


async def batches(gateway: Gateway, asked: GenerationRequest) -> list[list[Delta]]:
    return [deltas async for deltas in await gateway.submit(asked)]


class TestHits:
    async def test_a_stream_is_replayed_in_the_recorded_pieces(
        self, gateway: Gateway, engine: FakeEngine
    ) -> None:
        first = await gateway.submit(request_for())
        assert first.cache_status == "miss"
        recorded = [deltas async for deltas in first]
        second = await gateway.submit(request_for())
        assert second.cache_status == "hit"
        assert [deltas async for deltas in second] == recorded
        assert len(recorded) > 3
        assert len(engine.added) == 1
        assert (second.usage, second.model, second.num_choices) == (
            first.usage,
            first.model,
            first.num_choices,
        )
        assert second.id != first.id

    async def test_whole_and_streamed_answers_stand_in_for_each_other(
        self, gateway: Gateway, engine: FakeEngine
    ) -> None:
        whole = await (await gateway.submit(request_for())).collect()
        assert merged(await batches(gateway, request_for())) == whole
        streamed = await batches(gateway, request_for(TextPrompt("other")))
        assert await (await gateway.submit(request_for(TextPrompt("other")))).collect() == merged(streamed)
        assert len(engine.added) == 2

    async def test_a_hit_is_in_the_ledger_and_uses_nothing(self, gateway: Gateway, rows: Rows) -> None:
        for name in ("a", "b"):
            await (await gateway.submit(request_for(request_id=name, user="u"))).collect()
        (_, original), (claim, replayed) = rows.settled
        assert rows.begun == ["a", "b"]
        assert not original.is_cached
        assert (claim.request_id, claim.user, claim.input_tokens, claim.max_output_tokens) == ("b", "u", 0, 0)
        assert replayed.is_cached
        assert replayed.status == "completed"
        assert (replayed.usage.prompt_tokens, replayed.usage.completion_tokens) == (0, 0)

    async def test_a_hit_is_settled_before_its_end_is_seen_or_when_its_reader_leaves(
        self, gateway: Gateway, rows: Rows
    ) -> None:
        await batches(gateway, request_for())
        replay = await gateway.submit(request_for())
        await anext(replay)
        assert len(rows.settled) == 1
        replay.cancel()
        replay.cancel()
        assert [outcome.status for _, outcome in rows.settled] == ["completed", "cancelled"]
        with pytest.raises(ReaderGone):
            await anext(replay)

    async def test_a_key_may_opt_in_for_all_its_requests(self, gateway: Gateway, engine: FakeEngine) -> None:
        keen = request_for(
            cache_response_s=None, principal=Principal(workspace_id="w", caches_responses=True)
        )
        for _ in range(2):
            await batches(gateway, keen)
        assert len(engine.added) == 1
        await batches(gateway, msgspec.structs.replace(keen, cache_response_s=0.0))
        assert len(engine.added) == 2, "the header may say no"


class TestMisses:
    @pytest.mark.parametrize(
        "changes",
        [
            {"workspace": "other"},
            {"prompt": TextPrompt("hi ")},
            {"prompt": ChatPrompt(messages=(ChatMessage("user", "hi"),))},
            {"sampling": SamplingOptions(temperature=0.5)},
            {"n": 2},
            {"default_max_tokens": 3},
            {"cache_response_s": None},
        ],
    )
    async def test_whatever_differs(
        self, gateway: Gateway, engine: FakeEngine, changes: dict[str, Any]
    ) -> None:
        await batches(gateway, request_for())
        before = len(engine.added)
        answer = await gateway.submit(request_for(**changes))
        assert answer.cache_status == (None if "cache_response_s" in changes else "miss")
        await answer.collect()
        assert len(engine.added) > before

    async def test_after_the_writers_ttl_or_the_readers(
        self, gateway: Gateway, engine: FakeEngine, clock: VirtualClock
    ) -> None:
        await batches(gateway, request_for(cache_response_s=60.0))
        clock.advance(30.0)
        await batches(
            gateway, request_for(cache_response_s=29.0)
        )  # too old for this one, whose answer takes its place
        assert len(engine.added) == 2
        clock.advance(28.0)
        await batches(gateway, request_for(cache_response_s=3600.0))
        assert len(engine.added) == 2
        clock.advance(1.0)
        await batches(gateway, request_for(cache_response_s=3600.0))
        assert len(engine.added) == 3

    async def test_answers_that_were_cut_or_failed_are_not_kept(
        self, gateway: Gateway, engine: FakeEngine
    ) -> None:
        left = await gateway.submit(request_for())
        await anext(left)
        left.cancel()
        engine.script = lambda request: [Overloaded("no")]
        with pytest.raises(Overloaded):
            await batches(gateway, request_for())
        engine.script = None
        late = await gateway.submit(request_for())
        engine.emit(engine.added[-1].id, 65)
        engine.emit(engine.added[-1].id, finish_reason=FinishReason.DEADLINE)
        assert [delta.finish_reason async for deltas in late for delta in deltas][-1] is FinishReason.DEADLINE
        engine.script = script_text("x")
        assert (await gateway.submit(request_for())).cache_status == "miss"

    async def test_what_is_too_large_or_turned_off(self, gateway: Gateway, engine: FakeEngine) -> None:
        gateway.reuse.apply(ResponseCacheSettings(max_entry_bytes=8), IdempotencySettings())
        for _ in range(2):
            await batches(gateway, request_for())
        assert len(engine.added) == 2
        gateway.reuse.apply(ResponseCacheSettings(enabled=False), IdempotencySettings())
        assert (await gateway.submit(request_for())).cache_status is None

    async def test_a_new_model_under_the_same_name(self, gateway: Gateway, engine: FakeEngine) -> None:
        await batches(gateway, request_for())
        assert engine.ready is not None
        engine.ready = msgspec.structs.replace(
            engine.ready, model=msgspec.structs.replace(engine.ready.model, weight_bytes=1)
        )
        assert (await gateway.submit(request_for())).cache_status == "miss"


def test_the_order_of_a_schemas_keys_matters_because_a_model_sees_it() -> None:
    def asked(parameters: dict[str, Any]) -> bytes:
        tool = Tool("f", parameters=parameters)
        return request_fingerprint(request_for(ChatPrompt(messages=(), tools=(tool,))), b"")

    assert asked({"a": 1, "b": 2}) != asked({"b": 2, "a": 1})
    huge = [asked({"maximum": number}) for number in (1 << 64, 1 << 65, -(1 << 64))]
    assert len(set(huge)) == 3, "any integer of JSON may be in a schema"


def test_what_is_shown_and_read_of_a_request_matters() -> None:
    plain = request_for(TextPrompt("hi"))
    others = [
        msgspec.structs.replace(plain, **change)
        for change in (
            {"text": AnswerText(includes_stop=True)},
            {"truncates_to": 1},
            {"beams": BeamOptions(width=1)},
            {"beams": BeamOptions(width=1, length_penalty=2.0)},
        )
    ]
    assert len({request_fingerprint(each, b"") for each in (plain, *others)}) == 5


def test_merging_deltas() -> None:
    detail = TokenDetail(b"x", -1.0, 0, ())
    pieces = [
        [Delta(0, "a", (detail,), reasoning="r"), Delta(1, "z")],
        [Delta(0, "b", tool_calls=(ToolCallDelta(0, "{", id="c1", name="f"),))],
        [
            Delta(
                0, "", (detail,), tool_calls=(ToolCallDelta(0, "}"), ToolCallDelta(1, "1", id="c2", name="g"))
            )
        ],
        [
            Delta(1, "", finish_reason=FinishReason.LENGTH),
            Delta(0, "c", (), FinishReason.STOP, stop_sequence="s"),
        ],
    ]
    assert merged(pieces) == [
        Delta(
            0,
            "abc",
            (detail, detail),
            FinishReason.STOP,
            "r",
            (ToolCallDelta(0, "{}", id="c1", name="f"), ToolCallDelta(1, "1", id="c2", name="g")),
            "s",
        ),
        Delta(1, "z", (), FinishReason.LENGTH),
    ]


operations = st.lists(
    st.tuples(st.sampled_from(["put", "get", "advance", "shrink"]), st.integers(0, 5), st.integers(1, 900)),
    max_size=60,
)


@given(operations)
def test_the_cache_stays_within_its_bytes_and_never_lies(history: list[tuple[str, int, int]]) -> None:
    cache, now, truth = AnswerCache(2_000), 0.0, {}
    for action, name, number in history:
        key = bytes([name])
        if action == "put":
            cache.keep("w", key, bytes(number), now, ttl_s=10.0)
            truth[key] = (number, now)
        elif action == "advance":
            now += number / 100
        elif action == "shrink":
            cache.shrink_to(number * 2)
        else:
            found = cache.find("w", key, now, max_age_s=8.0)
            assert cache.find("other", key, now, max_age_s=8.0) is None
            if found is not None:
                size, stored_at = truth[key]
                assert len(found) == size
                assert now - stored_at <= 8.0
        assert 0 <= cache.used <= cache.capacity
    cache.shrink_to(0)
    assert cache.used == 0


async def test_requests_without_either_go_straight_to_the_engine(
    gateway: Gateway, engine: FakeEngine
) -> None:
    plain = request_for(cache_response_s=None)
    await asyncio.gather(*(batches(gateway, plain) for _ in range(3)))
    assert len(engine.added) == 3
    assert gateway.reuse.num_misses == 0
