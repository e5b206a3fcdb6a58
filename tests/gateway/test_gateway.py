"""The story of a request, told against a fake engine."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from penstock.core.clock import VirtualClock
from penstock.core.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PenstockError,
    ShuttingDown,
)
from penstock.core.gateway_config import GatewayConfig
from penstock.core.identity import Principal
from penstock.core.plan import TokenEvent, TokenLogprobs
from penstock.core.request import FinishReason, Request, Tier
from penstock.core.shares import Shares
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.generation import Generation
from penstock.gateway.answers.stream import AnswerStream, ReaderGone
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    SamplingOptions,
    TextPrompt,
    TokenPrompt,
    Usage,
)
from tests.gateway.fake_engine import EOS_ID, FakeEngine, engine_ready, model_card, script_text


def gateway_for(engine: FakeEngine, **config: Any) -> Gateway:
    return Gateway(engine, GatewayConfig(**config), VirtualClock())


def request_for(*prompts: Prompt, n: int = 1, model: str | None = None, **options: Any) -> GenerationRequest:
    prompts = prompts or (TextPrompt("hi"),)
    return GenerationRequest(prompts=prompts, n=n, model=model, sampling=SamplingOptions(**options))


async def read_all(generation: Generation) -> list[Delta]:
    return [delta async for deltas in generation for delta in deltas]


def text_of(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


class TestSubmit:
    async def test_streams_text_and_ends_with_a_reason(self) -> None:
        engine = FakeEngine(script_text("Grüße 😀"))
        deltas = await read_all(await gateway_for(engine).submit(request_for()))
        assert text_of(deltas) == "Grüße 😀"
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.STOP]
        assert deltas[-1].finish_reason is FinishReason.STOP

    async def test_collect_gives_the_same_in_one_piece(self) -> None:
        engine = FakeEngine(script_text("Grüße 😀"))
        (delta,) = await (await gateway_for(engine).submit(request_for())).collect()
        assert delta == Delta(0, "Grüße 😀", (), FinishReason.STOP)

    async def test_sampling_reaches_the_engine(self) -> None:
        engine = FakeEngine()
        options = {"temperature": 0.5, "top_k": 3, "logit_bias": {5: 1.0}, "stop": ("x",), "ignore_eos": True}
        await gateway_for(engine).submit(request_for(max_tokens=9, min_tokens=2, **options))
        (request,) = engine.added
        assert request.prompt_token_ids == tuple(b"hi")
        assert (request.sampling.max_tokens, request.sampling.min_tokens) == (9, 2)
        for name, value in options.items():
            assert getattr(request.sampling, name) == value

    async def test_tier_and_timeout_reach_the_engine(self) -> None:
        engine = FakeEngine()
        request = GenerationRequest(prompts=(TextPrompt("a"),), sampling=SamplingOptions(), tier=Tier.BATCH)
        await gateway_for(engine, request_timeout_s=7.5).submit(request)
        assert engine.added[0].tier is Tier.BATCH
        assert engine.streams[engine.added[0].id].timeout_s == 7.5

    async def test_several_prompts_and_answers(self) -> None:
        engine = FakeEngine(lambda request: script_text(f"{request.prompt_token_ids}")(request))
        prompts = (TextPrompt("a"), TokenPrompt((1, 2)))
        generation = await gateway_for(engine).submit(request_for(*prompts, n=2, seed=40))
        deltas = await generation.collect()
        assert [delta.text for delta in deltas] == ["(97,)", "(97,)", "(1, 2)", "(1, 2)"]
        assert [request.sampling.seed for request in engine.added] == [40, 41, 40, 41]
        assert len({request.id for request in engine.added}) == 4

    async def test_last_seed_wraps(self) -> None:
        engine = FakeEngine()
        await gateway_for(engine).submit(request_for(n=2, seed=2**63 - 1))
        assert [request.sampling.seed for request in engine.added] == [2**63 - 1, -(2**63)]

    async def test_chat_goes_through_the_template(self) -> None:
        engine = FakeEngine(ready=engine_ready(model_card(add_bos_token=True)))
        gateway = gateway_for(engine)
        await gateway.submit(request_for(ChatPrompt(messages=(ChatMessage("user", "hi"),))))
        user, assistant = 258, 259
        assert engine.added[0].prompt_token_ids == (user, *b"hi", EOS_ID, assistant)

    async def test_usage_counts_a_prompt_once_and_cached_tokens(self) -> None:
        engine = FakeEngine(script_text("abc", num_cached_tokens=1))
        generation = await gateway_for(engine).submit(request_for(n=3))
        await generation.collect()
        assert generation.usage == Usage(prompt_tokens=2, completion_tokens=12, cached_tokens=1)

    async def test_absent_max_tokens(self) -> None:
        engine = FakeEngine()
        await gateway_for(engine, default_max_tokens=5).submit(request_for())
        await gateway_for(engine).submit(request_for(TextPrompt("x" * 250), min_tokens=100))
        assert [request.sampling.max_tokens for request in engine.added] == [5, 6]
        assert engine.added[1].sampling.min_tokens == 6

    async def test_max_tokens_is_lowered_and_the_answer_says_so(self) -> None:
        engine = FakeEngine(script_text("ok"))
        gateway = gateway_for(engine)
        generation = await gateway.submit(
            request_for(TextPrompt("x" * 250), TextPrompt("hi"), max_tokens=32_000)
        )
        assert [request.sampling.max_tokens for request in engine.added] == [6, 128]
        (warning,) = generation.warnings
        assert (warning.code, warning.param) == ("max_tokens_lowered", "max_tokens")
        assert "at most 6 tokens, not the 32000" in warning.message
        assert generation.account.claim.max_output_tokens == 6 + 128, "no more is reserved than can be used"
        assert (await gateway.submit(request_for(max_tokens=128))).warnings == ()

    @pytest.mark.parametrize(("max_tokens", "error"), [(300, ContextLengthExceeded), (129, InvalidRequest)])
    async def test_max_tokens_can_be_refused(self, max_tokens: int, error: type[PenstockError]) -> None:
        engine = FakeEngine()
        with pytest.raises(error):
            await gateway_for(engine, refuse_long_outputs=True).submit(request_for(max_tokens=max_tokens))
        assert engine.added == []

    async def test_a_chat_that_drops_turns_leaves_room_for_half_a_context(self) -> None:
        engine = FakeEngine()
        turns = tuple(ChatMessage("user", f"{number:02}" + "x" * 20) for number in range(20))
        request = msgspec.structs.replace(
            request_for(ChatPrompt(messages=turns), max_tokens=32_000), drops_oldest_turns=True
        )
        await gateway_for(engine).submit(request)
        assert 90 < len(engine.added[0].prompt_token_ids) <= 128

    @pytest.mark.parametrize(
        ("request_", "error"),
        [
            (request_for(model="other"), ModelNotFound),
            (request_for(TokenPrompt((1, 9999))), InvalidRequest),
            (request_for(TokenPrompt((-1,))), InvalidRequest),
            (request_for(TokenPrompt(())), InvalidRequest),
            (request_for(TextPrompt("x" * 256)), ContextLengthExceeded),
            (request_for(temperature=float("nan")), InvalidRequest),
        ],
    )
    async def test_bad_requests_never_reach_the_engine(
        self, request_: GenerationRequest, error: type[PenstockError]
    ) -> None:
        engine = FakeEngine()
        gateway = gateway_for(engine)
        with pytest.raises(error):
            await gateway.submit(request_)
        assert engine.added == []
        assert gateway.num_live == 0

    @pytest.mark.parametrize(("num_engines", "prompts", "n"), [(1, 9, 1), (1, 1, 9), (2, 9, 2)])
    async def test_more_answers_than_all_engines_hold_are_refused_before_their_prompts_are_read(
        self, num_engines: int, prompts: int, n: int
    ) -> None:
        engine = FakeEngine(
            script_text("fine"), ready=msgspec.structs.replace(engine_ready(), max_requests=8)
        )
        engine.num_engines = num_engines
        unreadable = TokenPrompt((10**9,))  # refused, too, once it is read
        with pytest.raises(InvalidRequest, match=f"at most {8 * num_engines} at a time") as refused:
            await gateway_for(engine).submit(request_for(*[unreadable] * prompts, n=n))
        assert refused.value.param == ("prompt" if prompts > 1 else "n")
        assert "--max-queue-requests" in (refused.value.hint or "")
        fitting = request_for(*[TextPrompt("hi")] * 8 * num_engines)
        assert len(await (await gateway_for(engine).submit(fitting)).collect()) == 8 * num_engines

    @pytest.mark.parametrize(("num_engines", "prompts", "n"), [(1, 1, 6), (1, 2, 3), (2, 1, 11)])
    async def test_more_prompt_tokens_than_all_queues_take_are_refused_whatever_runs(
        self, num_engines: int, prompts: int, n: int
    ) -> None:
        ready = msgspec.structs.replace(engine_ready(), max_queue_tokens=50)
        engine = FakeEngine(script_text("fine"), ready=ready)
        engine.num_engines = num_engines
        gateway = gateway_for(engine)
        prompt = TokenPrompt(tuple(range(1, 11)))
        with pytest.raises(InvalidRequest, match=f"at most {50 * num_engines} waiting") as refused:
            await gateway.submit(request_for(*[prompt] * prompts, n=n))
        assert "--max-queue-tokens" in (refused.value.hint or "")
        assert engine.added == []
        assert gateway.num_live == 0
        await (await gateway.submit(request_for(prompt, n=5 * num_engines))).collect()
        long = TokenPrompt(tuple(range(1, 61)))
        await (await gateway.submit(request_for(long))).collect()  # an empty queue takes any one prompt

    async def test_no_engine(self) -> None:
        engine = FakeEngine()
        engine.ready = None  # type: ignore[assignment]
        gateway = gateway_for(engine)
        assert gateway.is_healthy, "an engine that has not come up yet is still starting"
        with pytest.raises(EngineUnavailable):
            await gateway.submit(request_for())
        engine.ready = engine_ready()
        await gateway.submit(request_for())
        assert gateway.is_ready
        engine.ready = None  # type: ignore[assignment]
        assert not gateway.is_healthy

    async def test_an_engine_lost_before_the_first_request_is_an_illness(self) -> None:
        engine = FakeEngine()
        gateway = gateway_for(engine)
        engine.ready = None  # type: ignore[assignment]
        assert not gateway.is_healthy

    async def test_a_new_engine_brings_a_new_model(self) -> None:
        engine = FakeEngine()
        gateway = gateway_for(engine)
        assert gateway.model("bytes") is gateway.model()
        engine.ready = engine_ready(model_card(name="other"))
        assert gateway.model("other").card.name == "other"


class TestStops:
    async def test_stop_string_across_tokens_ends_the_engines_work(self) -> None:
        engine = FakeEngine(script_text("one STOP two"))
        generation = await gateway_for(engine).submit(request_for(stop=("STOP",)))
        deltas = await read_all(generation)
        assert text_of(deltas) == "one "
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert generation.usage.completion_tokens == len("one STOP")
        assert engine.aborted == [engine.added[0].id]

    async def test_held_back_text_comes_out_at_the_end(self) -> None:
        engine = FakeEngine(script_text("one STO"))
        assert (
            text_of(await read_all(await gateway_for(engine).submit(request_for(stop=("STOP",)))))
            == "one STO"
        )

    async def test_stop_inside_an_event_of_several_tokens(self) -> None:
        engine = FakeEngine()
        generation = await gateway_for(engine).submit(request_for(stop=("b",)))
        engine.emit(engine.added[0].id, *b"abc")
        deltas = await read_all(generation)
        assert text_of(deltas) == "a"
        assert generation.usage.completion_tokens == 2

    async def test_stop_string_in_the_last_event_needs_no_abort(self) -> None:
        engine = FakeEngine()
        generation = await gateway_for(engine).submit(request_for(stop=("b",)))
        engine.emit(engine.added[0].id, *b"abc", finish_reason=FinishReason.LENGTH)
        deltas = await read_all(generation)
        assert (text_of(deltas), deltas[-1].finish_reason) == ("a", FinishReason.STOP)
        assert engine.aborted == []

    async def test_stop_token_is_counted_but_not_shown(self) -> None:
        engine = FakeEngine()
        generation = await gateway_for(engine).submit(request_for(stop_token_ids=(ord("!"),)))
        engine.emit(engine.added[0].id, *b"hi!", finish_reason=FinishReason.STOP)
        assert text_of(await read_all(generation)) == "hi"
        assert generation.usage.completion_tokens == 3

    async def test_last_token_at_the_length_limit_is_shown(self) -> None:
        engine = FakeEngine()
        generation = await gateway_for(engine).submit(request_for(stop_token_ids=(ord("!"),)))
        engine.emit(engine.added[0].id, *b"hi!", finish_reason=FinishReason.LENGTH)
        assert text_of(await read_all(generation)) == "hi!"


class TestLogprobs:
    async def test_details_travel_with_their_text(self) -> None:
        engine = FakeEngine(script_text("né"))
        deltas = await read_all(await gateway_for(engine).submit(request_for(logprobs=2)))
        details = [detail for delta in deltas for detail in delta.details]
        assert [detail.data for detail in details] == [b"n", b"\xc3", b"\xa9"], "the end token is not shown"
        assert [detail.text_offset for detail in details] == [0, 1, 1]
        assert [top.data for top in details[0].alternatives] == [b"n", b"o"]

    async def test_nothing_of_a_stop_string_shows(self) -> None:
        engine = FakeEngine(script_text("abcd"))
        deltas = await read_all(await gateway_for(engine).submit(request_for(logprobs=0, stop=("bc",))))
        assert b"".join(detail.data for delta in deltas for detail in delta.details) == b"a"


class TestReaders:
    async def test_a_slow_reader_gets_merged_deltas(self) -> None:
        engine = FakeEngine()
        generation = await gateway_for(engine).submit(request_for())
        for letter in b"abcd":
            engine.emit(engine.added[0].id, letter)
        assert await anext(generation) == [Delta(0, "abcd")]
        engine.emit(engine.added[0].id, ord("e"), finish_reason=FinishReason.LENGTH)
        assert await anext(generation) == [Delta(0, "e", (), FinishReason.LENGTH)]
        with pytest.raises(StopAsyncIteration):
            await anext(generation)

    async def test_the_first_event_is_news_even_without_text(self) -> None:
        engine = FakeEngine()
        generation = await gateway_for(engine).submit(request_for())
        engine.emit(engine.added[0].id, 0xC3)
        assert await anext(generation) == [Delta(0, "")]
        waiting = asyncio.ensure_future(anext(generation))
        engine.emit(engine.added[0].id, EOS_ID)
        await asyncio.sleep(0)
        assert not waiting.done(), "later ones are not"
        engine.emit(engine.added[0].id, 0xA9)
        assert await waiting == [Delta(0, "é")]

    async def test_a_reader_too_far_behind_loses_the_request(self) -> None:
        engine = FakeEngine()
        gateway = gateway_for(engine, max_stream_buffer_bytes=1024)
        generation = await gateway.submit(request_for(n=2))
        first, second = (request.id for request in engine.added)
        engine.emit(first, *"é".encode() * 512)
        assert engine.aborted == []
        engine.emit(first, ord("x"))
        assert set(engine.aborted) == {first, second}
        assert gateway.num_live == 0
        with pytest.raises(Overloaded, match="1024 bytes behind"):
            await anext(generation)

    async def test_the_limit_is_for_all_answers_of_a_request(self) -> None:
        engine = FakeEngine()
        generation = await gateway_for(engine, max_stream_buffer_bytes=1024).submit(request_for(n=4))
        for request in engine.added[:3]:
            engine.emit(request.id, *b"x" * 300)
        await anext(generation)
        for request in engine.added[:3]:
            engine.emit(request.id, *b"x" * 300)
        assert engine.aborted == []
        engine.emit(engine.added[3].id, *b"x" * 300)
        assert len(engine.aborted) == 4

    async def test_readers_of_a_workspace_leave_buffers_to_others(self) -> None:
        engine = FakeEngine(ready=engine_ready(model_card(max_model_len=1 << 20), 1 << 19))
        gateway = gateway_for(engine, max_stream_buffer_bytes=100_000)
        gateway.buffers = Shares(400_000)

        async def ask(workspace: str) -> AnswerStream:
            principal = Principal(workspace_id=workspace, key_id="key")
            request = msgspec.structs.replace(request_for(max_tokens=1 << 18), principal=principal)
            return await gateway.submit(request)

        def write(place: int) -> None:
            for _ in range(8):
                if engine.added[place].id in engine.streams:
                    engine.emit(engine.added[place].id, *b"x" * 10_000)

        slow = [await ask("slow") for _ in range(4)]
        for place in range(3):
            write(place)
        assert engine.aborted == []
        write(3)
        assert engine.aborted == [engine.added[3].id], "it has three quarters of the room"
        with pytest.raises(Overloaded, match="of this workspace's answers"):
            await anext(slow[3])
        other = await ask("other")
        write(4)
        assert len((await anext(other))[0].text) == 80_000
        assert len((await anext(slow[0]))[0].text) == 80_000
        write(0)
        engine.emit(engine.added[1].id, ord("y"), finish_reason=FinishReason.LENGTH)
        assert len(engine.aborted) == 1
        for each in slow:
            each.cancel()
        assert gateway.buffers.used == 0

    async def test_logprobs_count_against_the_limit(self) -> None:
        engine = FakeEngine()
        await gateway_for(engine, max_stream_buffer_bytes=1024).submit(request_for(logprobs=20))
        stream = engine.streams[engine.added[0].id]
        logprobs = TokenLogprobs(-1.0, tuple(range(20)), (-1.0,) * 20)
        stream.on_event(TokenEvent(stream.request.id, (97,), (logprobs,)))
        assert engine.aborted == [engine.added[0].id]

    async def test_collecting_has_no_limit_and_is_woken_once(self) -> None:
        engine = FakeEngine()
        generation = await gateway_for(engine, max_stream_buffer_bytes=1024).submit(request_for())
        collecting = asyncio.ensure_future(generation.collect())
        await asyncio.sleep(0)
        engine.emit(engine.added[0].id, *b"x" * 5000)
        await asyncio.sleep(0)
        assert not collecting.done()
        engine.emit(engine.added[0].id, ord("y"), finish_reason=FinishReason.LENGTH)
        assert len((await collecting)[0].text) == 5001

    async def test_cancel_aborts_every_unfinished_answer_at_once(self) -> None:
        engine = FakeEngine()
        gateway = gateway_for(engine)
        generation = await gateway.submit(request_for(n=3))
        ids = [request.id for request in engine.added]
        engine.emit(ids[0], ord("x"), finish_reason=FinishReason.LENGTH)
        generation.cancel()
        assert engine.aborted == ids[1:]
        assert gateway.num_live == 0
        assert await anext(generation) == [Delta(0, "x", (), FinishReason.LENGTH)]
        with pytest.raises(ReaderGone):
            await anext(generation)

    async def test_cancel_wakes_a_waiting_reader(self) -> None:
        engine = FakeEngine()
        generation = await gateway_for(engine).submit(request_for())
        collecting = asyncio.ensure_future(generation.collect())
        await asyncio.sleep(0)
        generation.cancel()
        with pytest.raises(ReaderGone):
            await collecting

    async def test_cancel_after_the_end_does_nothing(self) -> None:
        engine = FakeEngine(script_text("a"))
        generation = await gateway_for(engine).submit(request_for())
        deltas = await read_all(generation)
        generation.cancel()
        assert engine.aborted == []
        assert text_of(deltas) == "a"


class TestEarlyEnds:
    async def test_refused_by_the_engine(self) -> None:
        engine = FakeEngine(lambda request: [Overloaded("queue full", retry_after_s=3)])
        gateway = gateway_for(engine)
        generation = await gateway.submit(request_for(n=2))
        with pytest.raises(Overloaded) as error:
            await anext(generation)
        assert error.value.retry_after_s == 3
        assert engine.streams == {}
        assert gateway.num_live == 0

    @pytest.mark.parametrize(
        ("reason", "error"),
        [
            (FinishReason.DEADLINE, DeadlineExceeded),
            (FinishReason.ABORT, EngineUnavailable),
            (FinishReason.ERROR, Overloaded),
        ],
    )
    async def test_ends_without_a_token(self, reason: FinishReason, error: type[PenstockError]) -> None:
        engine = FakeEngine(lambda request: [TokenEvent(request.id, finish_reason=reason)])
        with pytest.raises(error):
            await (await gateway_for(engine).submit(request_for())).collect()

    async def test_an_error_of_a_computation_is_the_servers_fault(self) -> None:
        def script(request: Request) -> list[TokenEvent]:
            return [TokenEvent(request.id, finish_reason=FinishReason.ERROR, queue_s=0.5, error="NaN logits")]

        with pytest.raises(PenstockError, match="NaN logits") as error:
            await (await gateway_for(FakeEngine(script)).submit(request_for())).collect()
        assert error.value.status == 500

    @pytest.mark.parametrize("tokens", [b"", b"par"])
    async def test_an_answer_that_its_own_grammar_ends_is_the_callers_fault(self, tokens: bytes) -> None:
        reason = "This answer cannot follow its grammar any further."

        def script(request: Request) -> list[TokenEvent]:
            ended = TokenEvent(request.id, finish_reason=FinishReason.INVALID, queue_s=0.5, error=reason)
            return [TokenEvent(request.id, (token,), queue_s=0.5) for token in tokens] + [ended]

        gateway = gateway_for(FakeEngine(script))
        with pytest.raises(InvalidRequest, match="cannot follow its grammar") as error:
            await (await gateway.submit(request_for())).collect()
        assert error.value.status == 400
        page = gateway.render_own_metrics().decode()
        assert 'finished_reason="invalid",model_name="bytes"} 1.0' in page
        assert 'finished_reason="error",model_name="bytes"} 0.0' in page

    async def test_a_deadline_leaves_what_there_is(self) -> None:
        def script(request: Request) -> list[TokenEvent]:
            ended = TokenEvent(request.id, finish_reason=FinishReason.DEADLINE)
            return [TokenEvent(request.id, tuple(b"par")), ended]

        (delta,) = await (await gateway_for(FakeEngine(script)).submit(request_for())).collect()
        assert (delta.text, delta.finish_reason) == ("par", FinishReason.DEADLINE)

    async def test_text_before_an_error_is_delivered(self) -> None:
        engine = FakeEngine()
        generation = await gateway_for(engine).submit(request_for())
        stream = engine.streams[engine.added[0].id]
        engine.emit(stream.request.id, ord("a"))
        stream.on_error(EngineUnavailable("gone"))
        assert await anext(generation) == [Delta(0, "a")], "without a finish_reason"
        with pytest.raises(EngineUnavailable):
            await anext(generation)


class TestDrain:
    async def test_nothing_live(self) -> None:
        gateway = gateway_for(FakeEngine())
        assert await gateway.drain(60.0)
        assert not gateway.is_ready
        assert not gateway.is_healthy

    async def test_live_requests_finish_and_new_ones_are_refused(self) -> None:
        engine = FakeEngine()
        gateway = gateway_for(engine)
        generation = await gateway.submit(request_for())
        draining = asyncio.ensure_future(gateway.drain(60.0))
        await asyncio.sleep(0)
        with pytest.raises(ShuttingDown) as error:
            await gateway.submit(request_for())
        assert error.value.retry_after_s
        assert not draining.done()
        engine.emit(engine.added[0].id, ord("a"), finish_reason=FinishReason.LENGTH)
        assert await draining
        assert text_of(await read_all(generation)) == "a"

    async def test_what_outlasts_the_timeout_ends_with_an_error(self) -> None:
        engine = FakeEngine()
        gateway = gateway_for(engine)
        generation = await gateway.submit(request_for())
        assert not await gateway.drain(0.0)
        assert engine.aborted == [engine.added[0].id]
        with pytest.raises(ShuttingDown):
            await anext(generation)

    async def test_a_drain_cut_short_ends_live_requests_too(self) -> None:
        engine = FakeEngine()
        gateway = gateway_for(engine)
        generation = await gateway.submit(request_for())
        draining = asyncio.ensure_future(gateway.drain(60.0))
        await asyncio.sleep(0)
        draining.cancel()
        with pytest.raises(ShuttingDown):
            await anext(generation)
