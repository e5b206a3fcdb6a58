"""Chunks of real servers' shapes, as deltas and usage."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.cluster.external.wire import StreamChunk
from penstock.core.request import FinishReason
from penstock.gateway.answers.choice import Delta, TokenAlternative
from penstock.gateway.external.answer import ExternalChoice


def chunk(delta: dict[str, Any] | None = None, **fields: Any) -> StreamChunk:
    choice = {"index": 0, "delta": delta or {}, **fields}
    return msgspec.convert({"id": "x", "object": "chat.completion.chunk", "choices": [choice]}, StreamChunk)


def told(**fields: Any) -> StreamChunk:
    return msgspec.convert({"choices": [], **fields}, StreamChunk)


def fed(*chunks: StreamChunk) -> ExternalChoice:
    choice = ExternalChoice(0, num_prompt_tokens=11)
    for each in chunks:
        choice.push([each])
    return choice


def test_text_and_its_end() -> None:
    choice = fed(
        chunk({"role": "assistant", "content": ""}), chunk({"content": "Hel"}), chunk({"content": "lo"})
    )
    assert choice.take()[0] == Delta(0, "Hello")
    assert not choice.push([chunk({"role": "assistant", "content": None})])
    choice.push([chunk(finish_reason="stop", stop_reason="\n")])
    assert choice.ending is FinishReason.STOP
    choice.finish_reason = choice.ending
    assert choice.take()[0] == Delta(0, "", finish_reason=FinishReason.STOP, stop_sequence="\n")


def test_reasons_for_an_end() -> None:
    reasons = {"length": FinishReason.LENGTH, "content_filter": FinishReason.CONTENT_FILTER}
    reasons |= {
        "tool_calls": FinishReason.STOP,
        "function_call": FinishReason.STOP,
        "eos_token": FinishReason.STOP,
    }
    for name, reason in reasons.items():
        assert fed(chunk(finish_reason=name)).ending is reason


def test_reasoning_by_either_name() -> None:
    choice = fed(chunk({"reasoning_content": "Hm"}), chunk({"reasoning": "m."}), chunk({"content": "Yes"}))
    assert choice.take()[0] == Delta(0, "Yes", reasoning="Hmm.")
    assert choice.usage.reasoning_tokens == 2


def test_tool_calls_grow_and_have_ids() -> None:
    choice = fed(
        chunk({"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": ""}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}),
    )
    (first,) = choice.take()[0].tool_calls
    assert (first.id, first.name, first.arguments) == ("c1", "f", '{"a"')
    choice.push([chunk({"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]})])
    choice.push([chunk({"tool_calls": [{"index": 1, "function": {"name": "g", "arguments": "{}"}}]})])
    rest, second = choice.take()[0].tool_calls
    assert (rest.id, rest.name, rest.arguments) == (None, None, ": 1}")
    assert second.name == "g"
    assert second.id


def test_log_probabilities_of_a_chat() -> None:
    token = {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [{"token": "e", "logprob": -1.0}],
    }
    choice = fed(
        chunk({"content": "é"}, logprobs={"content": [token]}),
        chunk({"content": "x"}, logprobs={"content": [{"token": "x", "logprob": -0.1}]}),
    )
    first, second = choice.take()[0].details
    assert (first.data, first.logprob, first.text_offset) == ("é".encode(), -0.5, 0)
    assert first.alternatives == (TokenAlternative(b"e", -1.0),)
    assert (second.data, second.text_offset, second.alternatives) == (b"x", 1, ())


def test_log_probabilities_of_a_completion() -> None:
    logprobs = {"tokens": ["a", "b"], "token_logprobs": [None, -1.0], "top_logprobs": [None, {"c": -2.0}]}
    choice = fed(msgspec.convert({"choices": [{"text": "ab", "logprobs": logprobs}]}, StreamChunk))
    delta = choice.take()[0]
    assert delta.text == "ab"
    (detail,) = delta.details
    assert (detail.data, detail.text_offset, detail.alternatives) == (
        b"b",
        1,
        (TokenAlternative(b"c", -2.0),),
    )


def test_usage_is_estimated_until_it_is_told() -> None:
    choice = fed(chunk({"content": "a"}), chunk({"content": "b"}))
    assert (choice.num_prompt_tokens, choice.num_tokens, choice.usage.cached_tokens) == (11, 2, 0)
    details = {
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    choice.push([told(usage={"prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 23, **details})])
    assert (choice.num_prompt_tokens, choice.num_tokens, choice.usage.cached_tokens) == (20, 3, 16)
    assert choice.usage.reasoning_tokens == 1


def test_llama_cpp_tells_cached_tokens_in_its_own_way() -> None:
    choice = fed(
        told(usage={"prompt_tokens": 20, "completion_tokens": 3}, timings={"cache_n": 12, "prompt_n": 8})
    )
    assert choice.usage.cached_tokens == 12


def test_calls_of_tools_count_as_bytes_that_wait() -> None:
    choice = fed(
        *(
            chunk({"tool_calls": [{"index": number, "id": "i" * 100, "function": {"name": "n" * 100}}]})
            for number in range(10)
        )
    )
    assert choice.buffered_bytes >= 2000
    choice.take()
    assert choice.buffered_bytes == 0
