"""Log-probabilities of prompts over HTTP, in OpenAI's shape (`echo`) and in vLLM's (`prompt_logprobs`)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import openai
import pytest

from penstock.api.openai.prompt_echo import text_offsets
from penstock.core.errors import PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request
from penstock.gateway.checks import MAX_PROMPT_LOGPROBS
from tests.gateway.fake_engine import BOS_ID, FakeEngine, engine_ready, model_card, prompt_scores, script_text

from .conftest import Served

Serve = Callable[..., Served]


def no_numbers(count: int) -> list[Any]:
    """The SDK's types know no null, which OpenAI sends for the first token."""
    return [None] * count


def test_the_shape_of_an_echoed_prompt(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("!?")))
    choice = (
        served.sdk()
        .completions.create(model="bytes", prompt="abcd", echo=True, logprobs=2, max_tokens=2)
        .choices[0]
    )
    assert choice.text == "abcd!?"
    shown = choice.logprobs
    assert shown is not None
    assert shown.tokens == ["a", "b", "c", "d", "!", "?"]
    assert shown.token_logprobs == [None, -0.25, -0.5, -0.75, -0.25, -0.25]
    assert shown.text_offset == [0, 1, 2, 3, 4, 5]
    assert shown.top_logprobs is not None
    assert shown.top_logprobs[:2] == [None, {"c": 0.0, "b": -0.25}]
    assert len(shown.top_logprobs) == 6


def test_a_prompt_alone_is_scored_and_nothing_is_sampled(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("never")))
    answer = served.sdk().completions.create(
        model="bytes", prompt=["ab", "x"], echo=True, logprobs=1, max_tokens=0
    )
    assert [choice.text for choice in answer.choices] == ["ab", "x"]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.25]
    assert answer.choices[1].logprobs is not None
    assert answer.choices[1].logprobs.token_logprobs == no_numbers(1), "a single token has nothing before it"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)
    assert [request.sampling.max_tokens for request in served.engine.added] == [0, 0]


def test_a_prompt_may_fill_the_whole_context_when_nothing_follows(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("x")))
    prompt = [97] * 256
    choice = (
        served.sdk()
        .completions.create(model="bytes", prompt=prompt, echo=True, logprobs=0, max_tokens=0)
        .choices[0]
    )
    assert choice.logprobs is not None
    assert len(choice.logprobs.token_logprobs or []) == 256
    assert choice.logprobs.top_logprobs is None
    with pytest.raises(openai.BadRequestError, match="context"):
        served.sdk().completions.create(model="bytes", prompt=prompt, echo=True, logprobs=0, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="context"):
        served.sdk().completions.create(model="bytes", prompt=[*prompt, 97], echo=True, max_tokens=0)


def test_batches_of_token_ids_with_several_answers_each(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("!")))
    answer = served.sdk().completions.create(
        model="bytes", prompt=[[97, 98], [99, 100, 101]], n=2, echo=True, logprobs=1
    )
    assert [choice.text for choice in answer.choices] == ["ab!", "ab!", "cde!", "cde!"]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == list(choice.text)
        assert (choice.logprobs.token_logprobs or [0])[0] is None
    asked = [request.sampling.prompt_logprobs for request in served.engine.added]
    assert asked == [1, None, 1, None], "a prompt is scored once, however many answers it has"


def test_siblings_wait_for_the_scores_of_their_prompt(serve: Serve) -> None:
    """The second answer is whole before the first scores come, as when two engines serve them."""
    leader: list[Request] = []

    def script(request: Request) -> Sequence[TokenEvent | PenstockError]:
        if request.sampling.prompt_logprobs is not None:
            leader.append(request)
            return []
        late = list(script_text("yes")(leader[0]))
        asyncio.get_running_loop().call_later(0.05, engine._play, leader[0].id, late)
        return script_text("yes")(request)

    engine = FakeEngine(script)
    stream = (
        serve(engine)
        .sdk()
        .completions.create(model="bytes", prompt="abcde", n=2, echo=True, logprobs=0, stream=True)
    )
    choices = [chunk.choices[0] for chunk in stream]
    for index in (0, 1):
        own = [choice for choice in choices if choice.index == index]
        assert "".join(choice.text for choice in own) == "abcdeyes"
        shown = [choice.logprobs for choice in own if choice.logprobs is not None]
        assert "".join(token for each in shown for token in each.tokens or []) == "abcdeyes"
        assert [at for each in shown for at in each.text_offset or []] == list(range(8))


def test_vllm_s_shape_on_completions_and_chat(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("!")))
    body: dict[str, Any] = {"model": "bytes", "prompt": "ab", "prompt_logprobs": 1, "max_tokens": 1}
    completion = httpx.post(f"{served.url}/v1/completions", json=body).json()
    assert completion["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": -0.25, "rank": 2, "decoded_token": "b"},
            "99": {"logprob": 0.0, "rank": 1, "decoded_token": "c"},
        },
    ]
    assert completion["choices"][0]["logprobs"] is None
    assert completion["choices"][0]["text"] == "!"
    chat = httpx.post(
        f"{served.url}/v1/chat/completions",
        json={
            "model": "bytes",
            "messages": [{"role": "user", "content": "hi"}],
            "prompt_logprobs": 0,
            "max_tokens": 0,
            "n": 2,
        },
    ).json()
    assert len(chat["choices"]) == 2
    scored = chat["prompt_logprobs"]
    assert len(scored) == chat["usage"]["prompt_tokens"]
    assert scored[0] is None
    assert [len(row) for row in scored[1:]] == [1] * (len(scored) - 1)
    plain = httpx.post(f"{served.url}/v1/completions", json={"model": "bytes", "prompt": "ab"}).json()
    assert "prompt_logprobs" not in plain["choices"][0]


def test_both_shapes_at_once(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("!")))
    body = {"model": "bytes", "prompt": "abc", "echo": True, "logprobs": 1, "prompt_logprobs": 2}
    choice = httpx.post(f"{served.url}/v1/completions", json=body).json()["choices"][0]
    assert choice["logprobs"]["top_logprobs"][1] == {"c": 0.0, "b": -0.25}
    assert list(choice["prompt_logprobs"][1]) == ["98", "99"]
    assert [request.sampling.prompt_logprobs for request in served.engine.added] == [2]


def test_a_beginning_that_the_tokenizer_adds_has_no_place_in_the_text(serve: Serve) -> None:
    ready = engine_ready(model_card(add_bos_token=True))
    served = serve(FakeEngine(script_text("!"), ready))
    choice = (
        served.sdk()
        .completions.create(model="bytes", prompt="né", echo=True, logprobs=0, max_tokens=1)
        .choices[0]
    )
    assert served.engine.added[0].prompt_token_ids[0] == BOS_ID
    assert choice.text == "né!"
    assert choice.logprobs is not None
    assert choice.logprobs.text_offset == [0, 0, 1, 1, 2]
    assert (choice.logprobs.tokens or [])[0] == "<|begin|>"


def test_offsets_of_tokenizers_that_put_a_space_in_front() -> None:
    tokens = [b"<s>", b" Hello", b" ", b"w", b"\xc3", b"\xb6", b"rld"]
    assert list(text_offsets(iter(tokens), "Hello wörld")) == [0, 0, 5, 6, 7, 7, 8]
    assert list(text_offsets(iter(tokens[1:]), " Hello wörld")) == [0, 6, 7, 8, 8, 9]


def test_too_many_numbers_are_refused_before_an_engine_works(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("!"), engine_ready(model_card(max_model_len=1 << 20))))
    with pytest.raises(openai.BadRequestError, match=str(MAX_PROMPT_LOGPROBS)) as refused:
        served.sdk().completions.create(
            model="bytes", prompt=[[97] * 40_000] * 10, echo=True, logprobs=2, max_tokens=0
        )
    assert refused.value.param == "prompt_logprobs"
    assert served.engine.added == []


def test_no_tokens_without_a_prompt_to_show_are_refused_for_chats(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("!")))
    with pytest.raises(openai.BadRequestError, match="at least 1"):
        served.sdk().chat.completions.create(
            model="bytes", messages=[{"role": "user", "content": "hi"}], max_tokens=0
        )


def test_a_second_engine_that_begins_again_doubles_nothing(serve: Serve) -> None:
    """After a failover the new engine scores the prompt from its beginning, in other pieces."""

    def script(request: Request) -> list[TokenEvent]:
        lost = prompt_scores(request, piece=3)[:2]
        again = prompt_scores(request, piece=4)
        return [*lost, *again, TokenEvent(request.id, (33,), finish_reason=FinishReason.LENGTH)]

    served = serve(FakeEngine(script))
    choice = (
        served.sdk()
        .completions.create(model="bytes", prompt="abcdefghij", echo=True, logprobs=0, max_tokens=1)
        .choices[0]
    )
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [None, *(-position / 4 for position in range(1, 10))]


def test_an_engine_that_does_not_score_leaves_null(serve: Serve) -> None:
    def script(request: Request) -> list[TokenEvent]:
        return [TokenEvent(request.id, (33,), finish_reason=FinishReason.LENGTH)]

    served = serve(FakeEngine(script))
    choice = (
        served.sdk()
        .completions.create(model="bytes", prompt="ab", echo=True, logprobs=0, max_tokens=1, n=2)
        .choices[1]
    )
    assert choice.text == "ab!"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == no_numbers(2)


def test_a_client_that_leaves_while_its_prompt_is_scored_frees_the_engine(serve: Serve) -> None:
    engine = FakeEngine()
    served = serve(engine)
    served.ask_and_leave("/v1/completions", {"model": "bytes", "prompt": "ab", "echo": True, "logprobs": 1})
    served.wait_until(lambda: len(engine.aborted) == 1)


def test_the_cache_of_responses_keeps_scores(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("!")))
    body = {"model": "bytes", "prompt": "abc", "prompt_logprobs": 1}
    headers = {"idempotency-key": f"key-{random.random()}"}
    first = httpx.post(f"{served.url}/v1/completions", json=body, headers=headers).json()
    again = httpx.post(f"{served.url}/v1/completions", json=body, headers=headers).json()
    assert again["choices"] == first["choices"]
    assert first["choices"][0]["prompt_logprobs"][1]
    assert len(served.engine.added) == 1
