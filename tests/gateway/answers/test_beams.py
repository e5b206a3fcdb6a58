"""Beam search without a model: what the engine is asked, what is counted, and how a search ends early.
`tests/engine/test_beams.py` compares beams with transformers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.core.errors import DeadlineExceeded, InvalidRequest, PenstockError
from penstock.core.gateway_config import GatewayConfig
from penstock.core.plan import TokenEvent, TokenLogprobs
from penstock.core.request import FinishReason, Request
from penstock.gateway.answers.stream import AnswerStream, ReaderGone
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import BeamOptions, GenerationRequest, SamplingOptions, TextPrompt
from penstock.gateway.text.detokenizer import StopMatcher, StopWatch, WindowDetokenizer
from tests.gateway.fake_engine import EOS_ID, FakeEngine, byte_tokenizer

A, B = ord("a"), ord("b")


def found(request: Request, *likely: tuple[int, float], **changes: Any) -> TokenEvent:
    """The only event of a step: these tokens, and then improbable ones."""
    assert request.sampling.logprobs is not None
    rest = ((token_id, -50.0 - token_id) for token_id in range(200, 256))
    shown = [*likely, *rest][: request.sampling.logprobs]
    top = TokenLogprobs(likely[0][1], *zip(*shown, strict=True))
    fields: dict[str, Any] = {
        "finish_reason": FinishReason.LENGTH,
        "num_cached_tokens": 3,
        "queue_s": 0.0,
    } | changes
    return TokenEvent(request.id, (likely[0][0],), (top,), **fields)


def ab_script(request: Request) -> list[TokenEvent]:
    return [found(request, (A, -1.0), (B, -3.0 if request.output_token_ids else -2.0))]


def asked(
    width: int = 2, n: int = 1, prompts: tuple[str, ...] = ("hi",), **options: Any
) -> GenerationRequest:
    return GenerationRequest(
        prompts=tuple(map(TextPrompt, prompts)),
        sampling=SamplingOptions(**{"max_tokens": 3} | options),
        n=n,
        beams=BeamOptions(width=width),
        is_read_whole=True,
    )


async def started(engine: FakeEngine, request: GenerationRequest) -> AnswerStream:
    return await Gateway(engine, GatewayConfig()).submit(request)


async def test_a_step_asks_for_one_token_after_each_beam() -> None:
    engine = FakeEngine(ab_script)
    answer = await started(engine, asked(n=2, logprobs=1))
    deltas = await answer.collect()
    assert [delta.text for delta in deltas] == ["aaa", "baa"]
    assert [[detail.logprob for detail in delta.details] for delta in deltas] == [
        [-1.0] * 3,
        [-2.0, -1.0, -1.0],
    ]
    assert all(len(detail.alternatives) == 1 for delta in deltas for detail in delta.details)
    sampling = [request.sampling for request in engine.added]
    assert [each.max_tokens for each in sampling] == [1, 2, 2, 3, 3]
    assert {(each.temperature, each.ignore_eos) for each in sampling} == {(0.0, True)}
    begun = [bytes(request.output_token_ids) for request in engine.added]
    assert begun == [b"", b"a", b"b", b"aa", b"ba"]
    assert len({request.id for request in engine.added}) == 5
    assert len({request.affinity_key for request in engine.added}) == 1
    # Two beams of three tokens, and the prompt once.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 6)
    assert answer.usage.cached_tokens == 3


async def test_every_prompt_has_a_search_of_its_own() -> None:
    answer = await started(FakeEngine(ab_script), asked(width=3, n=2, prompts=("hi", "ho"), max_tokens=2))
    assert [delta.text for delta in await answer.collect()] == ["aa", "ba", "aa", "ba"]
    assert answer.usage.completion_tokens == 2 * 3 * 2


async def test_cancelling_aborts_every_beam() -> None:
    engine = FakeEngine()
    answer = await started(engine, asked())
    (first,) = engine.added
    engine.streams.pop(first.id).on_event(found(first, (A, -1.0), (B, -2.0)))
    answer.cancel()
    assert sorted(engine.aborted) == [request.id for request in engine.added[1:]]
    assert len(engine.aborted) == 2
    assert not engine.streams
    assert answer.usage.completion_tokens == 2
    with pytest.raises(ReaderGone):
        await answer.collect()


async def test_a_deadline_leaves_the_beams_so_far() -> None:
    engine = FakeEngine()
    answer = await started(engine, asked(n=2))
    (first,) = engine.added
    engine.streams.pop(first.id).on_event(found(first, (EOS_ID, -1.0), (A, -2.0), (B, -3.0)))
    late = engine.added[1]
    engine.streams.pop(late.id).on_event(TokenEvent(late.id, finish_reason=FinishReason.DEADLINE))
    deltas = await answer.collect()
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [
        ("", FinishReason.STOP),
        ("a", FinishReason.DEADLINE),
    ]
    assert engine.aborted == [engine.added[2].id]


async def test_a_deadline_before_the_first_token_and_an_engine_that_fails() -> None:
    def late(request: Request) -> list[TokenEvent]:
        return [TokenEvent(request.id, finish_reason=FinishReason.DEADLINE)]

    def broken(request: Request) -> list[TokenEvent | PenstockError]:
        return [PenstockError("broken")] if request.output_token_ids else list(ab_script(request))

    with pytest.raises(DeadlineExceeded):
        await (await started(FakeEngine(late), asked())).collect()
    engine = FakeEngine(broken)
    with pytest.raises(PenstockError, match="broken"):
        await (await started(engine, asked())).collect()
    assert engine.aborted == [engine.added[2].id]


async def test_an_engine_without_log_probabilities_keeps_nobody_waiting() -> None:
    def echo(request: Request) -> list[TokenEvent]:
        return [TokenEvent(request.id, (A,), finish_reason=FinishReason.LENGTH)]

    with pytest.raises(InvalidRequest, match="no log-probabilities"):
        async with asyncio.timeout(60):
            await (await started(FakeEngine(echo), asked())).collect()


async def test_the_widest_search_is_reserved() -> None:
    claimed = []

    class Watching(Gateway):
        async def _reserve(self, work: Any) -> Any:
            claimed.append(work.claim().max_output_tokens)
            return await super()._reserve(work)

    gateway = Watching(FakeEngine(ab_script), GatewayConfig())
    await (await gateway.submit(asked(width=4, n=2))).collect()
    await (await gateway.submit(asked(width=3, prompts=("hi", "ho")))).collect()
    assert claimed == [4 * 3, 2 * 3 * 3]


@pytest.mark.parametrize(
    ("width", "options", "param"),
    [
        (0, {}, "n"),
        (65, {}, "n"),
        (2, {"temperature": 0.5}, "temperature"),
        (2, {"top_p": 0.9}, "top_p"),
        (2, {"logit_bias": {5: 1.0}}, "logit_bias"),
        (2, {"bad_words": ("x",)}, "bad_words"),
        (2, {"max_tokens": 5000}, "max_tokens"),
    ],
)
async def test_what_beam_search_refuses(width: int, options: dict[str, Any], param: str) -> None:
    engine = FakeEngine(ab_script)
    with pytest.raises(InvalidRequest) as caught:
        await started(engine, asked(width, **options))
    assert (caught.value.param, engine.added) == (param, [])


def test_watches_of_sequences_with_the_same_beginning_are_apart() -> None:
    detokenizer = WindowDetokenizer(byte_tokenizer(), frozenset({EOS_ID}), ())
    start = StopWatch(detokenizer, StopMatcher(["ab"]), 0).after(A)
    assert start.after(B).is_stopped
    assert not start.after(A).is_stopped
    assert start.after(B).is_stopped
    assert not start.is_stopped
    assert not start.after(EOS_ID).is_stopped
    assert start.after(EOS_ID).after(B).is_stopped
