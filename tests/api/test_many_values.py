"""Bodies with more values than can be decoded on the event loop, and texts that are too long to be tokenized."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from penstock.api.anthropic.requests import MAX_EDITS
from penstock.api.extensions import EXTENSION_FIELDS
from penstock.api.http import parsing
from penstock.api.http.parsing import BodyDecoder, check_num_values
from penstock.api.openai import embeddings, requests
from penstock.api.openai.requests import ChatCompletionRequest
from penstock.core.errors import InvalidRequest
from penstock.gateway.checks import MAX_NAME_CHARS, MAX_TOOLS
from penstock.gateway.models.served_model import MAX_DETOKENIZED
from penstock.gateway.text.template import ChatTemplate
from penstock.gateway.text.tokenizer import TextTokenizer
from tests.api.conftest import direct_client
from tests.api.test_embeddings import embedding_engine
from tests.gateway.fake_engine import FakeEngine, script_text

TEXTS = [""] * (parsing.MAX_TEXTS + 1)
OBJECTS: list[dict[str, Any]] = [{}] * (parsing.MAX_CONTAINERS + 1)
NUMBERS = [1] * (parsing.MAX_VALUES + 2)
TURNS = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXTS}),
        ("/v1/completions", {"prompt": NUMBERS}),
        ("/v1/chat/completions", {"messages": TURNS, "stop": TEXTS}),
        ("/v1/chat/completions", {"messages": TURNS, "unknown": OBJECTS}),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 1, "tools": OBJECTS}),
        ("/v1/responses", {"input": OBJECTS}),
        ("/v1/conversations", {"items": OBJECTS}),
        ("/v1/embeddings", {"input": NUMBERS}),
        ("/detokenize", {"tokens": NUMBERS}),
    ],
)
async def test_bodies_of_too_many_values_are_refused(path: str, body: dict[str, Any]) -> None:
    async with direct_client(FakeEngine()) as client:
        answer = await client.post(path, json={"model": "bytes", **body})
    assert answer.status_code == 400
    assert "The request body has too many values" in answer.text


NAME = "x" * (MAX_NAME_CHARS + 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "user": NAME}),
        ("/v1/chat/completions", {"messages": TURNS, "user": NAME}),
        ("/v1/chat/completions", {"messages": TURNS, "prompt_cache_key": NAME}),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 1, "metadata": {"user_id": NAME}}),
        ("/v1/responses", {"input": "a", "safety_identifier": NAME}),
        ("/v1/embeddings", {"input": "a", "user": NAME}),
    ],
)
async def test_names_of_a_client_s_own_are_bounded(path: str, body: dict[str, Any]) -> None:
    """The last requests are remembered with them."""
    engine = embedding_engine() if "embed" in path else FakeEngine(script_text("fine"))
    model = engine.ready.model.name if engine.ready else ""
    async with direct_client(engine) as client:
        answer = await client.post(path, json={"model": model, **body})
    assert answer.status_code == 400
    assert f"may have at most {MAX_NAME_CHARS} characters" in answer.text


async def test_texts_may_hold_any_number_of_commas_and_quotes() -> None:
    content = '{["a\\",' * parsing.MAX_TEXTS
    engine = FakeEngine(script_text("fine"))
    async with direct_client(engine) as client:
        answer = await client.post(
            "/v1/chat/completions", json={"messages": TURNS, "metadata": {"a": content}}
        )
    assert answer.status_code == 200


async def test_other_requests_have_turns_while_a_large_body_is_counted() -> None:
    num_turns = 0

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    body = b'{"a": "%b"}' % (b"," * (parsing.MAX_VALUES + 1))
    await parsing.check_num_values_in_turns(body)
    other.cancel()
    assert num_turns >= len(body) // parsing.SLICE_BYTES


async def test_other_requests_have_a_turn_between_the_passes_over_a_large_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[str] = []
    decoder = BodyDecoder(ChatCompletionRequest, EXTENSION_FIELDS)
    monkeypatch.setattr(decoder, "_decode", lambda _: steps.append("decoded"))
    monkeypatch.setattr(decoder, "_check_fields", lambda _: steps.append("checked"))
    monkeypatch.setattr(parsing, "UNCOUNTED_BYTES", 100)

    async def take_turn() -> None:
        while "decoded" not in steps:
            await asyncio.sleep(0)
        steps.append("another request")

    other = asyncio.create_task(take_turn())
    await decoder.decode_for(Request({"type": "http"}), b" " * 101)
    await other
    assert steps == ["decoded", "another request", "checked"]


async def test_one_large_body_is_decoded_or_read_in_each_iteration_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    iteration = 0
    worked_in: list[int] = []
    loop = asyncio.get_running_loop()
    decode, check = BodyDecoder._decode, BodyDecoder._check_fields
    read = ChatCompletionRequest.to_generation

    def count() -> None:
        nonlocal iteration
        iteration += 1
        loop.call_soon(count)

    def noting(work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            worked_in.append(iteration)
            return work(*arguments)

        return noted

    monkeypatch.setattr(BodyDecoder, "_decode", noting(decode))
    monkeypatch.setattr(BodyDecoder, "_check_fields", noting(check))
    monkeypatch.setattr(ChatCompletionRequest, "to_generation", noting(read))
    monkeypatch.setattr(parsing, "UNCOUNTED_BYTES", 100)
    body = {"messages": TURNS, "metadata": {"a": "a" * 100}}
    async with direct_client(FakeEngine(script_text("fine"))) as client:
        loop.call_soon(count)
        answers = await asyncio.gather(*[client.post("/v1/chat/completions", json=body) for _ in range(5)])
    assert {answer.status_code for answer in answers} == {200}
    assert len(worked_in) == len(set(worked_in)) == 15


def test_counting_ends_where_there_are_too_many_values() -> None:
    few = sum(1 for _ in _steps(b"[" + b"1," * parsing.MAX_VALUES + b"1]" * 2))
    many = sum(1 for _ in _steps(b"[" + b"1," * (8 * parsing.MAX_VALUES)))
    assert many <= 2 * few  # a look at all characters, and one outside of texts


def _steps(body: bytes) -> Iterator[None]:
    with contextlib.suppress(InvalidRequest):
        yield from parsing._counting(body, 1)


@given(st.recursive(st.text('"\\,[{a') | st.integers(0, 9), st.lists, max_leaves=40), st.integers(1, 50))
def test_values_are_counted_outside_of_texts(value: Any, slice_bytes: int) -> None:
    body = json.dumps(value).encode()
    num_texts, num_containers, num_values = _counts(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing, "UNCOUNTED_BYTES", -1)
        patch.setattr(parsing, "SLICE_BYTES", slice_bytes)
        patch.setattr(parsing, "MAX_TEXTS", num_texts)
        patch.setattr(parsing, "MAX_CONTAINERS", num_containers)
        patch.setattr(parsing, "MAX_VALUES", num_values)
        check_num_values(body)
        for name, count in (("MAX_TEXTS", num_texts), ("MAX_CONTAINERS", num_containers)):
            if count:
                patch.setattr(parsing, name, count - 1)
                with pytest.raises(InvalidRequest):
                    check_num_values(body)
                patch.setattr(parsing, name, count)


def _counts(value: Any) -> tuple[int, int, int]:
    """Texts, containers and commas."""
    if not isinstance(value, list):
        return int(isinstance(value, str)), 0, 0
    inner = [_counts(each) for each in value]
    texts, containers, commas = (sum(column) for column in zip(*inner, strict=True)) if inner else (0, 0, 0)
    return texts, containers + 1, commas + max(0, len(value) - 1)


LONG = "a" * ((1 << 20) + 1)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": LONG}], "truncate_prompt_tokens": 9},
            "messages",
        ),
    ],
)
async def test_texts_that_are_too_long_to_tokenize_are_refused(
    path: str, body: dict[str, Any], param: str
) -> None:
    async with direct_client(FakeEngine()) as client:
        answer = await client.post(path, json={"model": "bytes", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "at most 1048576 are tokenized at a time" in answer.text


async def test_many_tokens_are_told_with_their_texts() -> None:
    async with direct_client(FakeEngine()) as client:
        body = {"prompt": "ab" * 5000, "return_token_strs": True}
        answer = (await client.post("/tokenize", json=body)).json()
    assert (answer["count"], answer["token_strs"]) == (10_000, ["a", "b"] * 5000)


async def test_counting_tokens_refuses_a_long_chat_before_it_is_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(ChatTemplate, "render")
    body = {"model": "bytes", "messages": [{"role": "user", "content": "a" * 100_000}]}
    async with direct_client(FakeEngine()) as client:
        answer = await client.post("/v1/messages/count_tokens", json=body)
    assert answer.status_code == 400
    assert "prompt is too long" in answer.text


async def test_a_long_prompt_is_cut_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(script_text("fine"))
    async with direct_client(engine) as client:
        lengths = []
        encode = TextTokenizer.encode

        async def measured(self: TextTokenizer, text: str, **options: Any) -> tuple[int, ...]:
            lengths.append(len(text))
            return await encode(self, text, **options)

        monkeypatch.setattr(TextTokenizer, "encode", measured)
        body = {"prompt": "a" * 3_000_000 + "bc", "truncate_prompt_tokens": 3}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert bytes(engine.added[0].prompt_token_ids) == b"abc"
    assert max(lengths) < 10_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "x" * 1_000_000, "content": "a"}]}),
        ("/v1/completions", {"model": "x" * 1_000_000, "prompt": "a"}),
    ],
)
async def test_errors_quote_only_the_beginning_of_what_was_sent(path: str, body: dict[str, Any]) -> None:
    async with direct_client(FakeEngine()) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert len(answer.text) < 5000


@pytest.mark.parametrize("prompt", [["a"] * 100_000, [[1]] * 50_000])
async def test_too_many_prompts_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, prompt: list[Any]
) -> None:
    for kind in ("TextPrompt", "TokenPrompt"):
        monkeypatch.setattr(requests, kind, None)
    async with direct_client(FakeEngine()) as client:
        answer = await client.post("/v1/completions", json={"model": "bytes", "prompt": prompt})
    assert answer.status_code == 400
    assert f"{len(prompt)} prompts with n=1" in answer.text


@pytest.mark.parametrize("given", [["a"] * 100_000, [[1]] * 50_000])
async def test_too_many_inputs_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, given: list[Any]
) -> None:
    monkeypatch.setattr(embeddings, "tuple", None, raising=False)
    with pytest.raises(InvalidRequest, match=f"There are {len(given)} inputs"):
        embeddings.TextInputFields(input=given).inputs()


_HI = [{"role": "user", "content": "hi"}]
_FUNCTION = {"type": "function", "name": "f"}
_ALLOWED = {"type": "allowed_tools", "tools": [_FUNCTION] * (MAX_TOOLS + 1)}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": _HI, "tools": [{"type": "x"}] * (MAX_TOOLS + 1)}),
        (
            "/v1/chat/completions",
            {
                "messages": _HI,
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": _ALLOWED},
            },
        ),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "x"}] * (MAX_TOOLS + 1)}),
        ("/v1/responses", {"input": "hi", "tools": [_FUNCTION], "tool_choice": _ALLOWED}),
        (
            "/v1/responses",
            {"input": "hi", "tools": [{"type": "namespace", "name": "n", "tools": [_FUNCTION] * MAX_TOOLS}]},
        ),
        ("/v1/messages", {"messages": _HI, "tools": [{"type": "x"}] * (MAX_TOOLS + 1)}),
        (
            "/v1/messages",
            {"messages": _HI, "context_management": {"edits": [{"type": "x"}] * (MAX_EDITS + 1)}},
        ),
    ],
)
async def test_long_lists_of_what_is_skipped_or_chosen_are_refused(path: str, body: dict[str, Any]) -> None:
    """Each entry costs time on the event loop, and those that are skipped are told in the answer."""
    async with direct_client(FakeEngine(script_text("fine"))) as client:
        asked = {"max_tokens": 2} if path == "/v1/messages" else {}
        answer = await client.post(path, json={"model": "bytes"} | asked | body)
    assert answer.status_code == 400
    assert "at most" in answer.text


async def test_many_messages_of_ollama_are_translated_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    in_threads: list[object] = []

    async def noted(work: Callable[..., Any], *args: Any) -> Any:
        in_threads.append(work)
        return work(*args)

    monkeypatch.setattr(parsing, "in_thread", noted)
    async with direct_client(FakeEngine(script_text("fine"))) as client:
        for count in (2, parsing.DIRECT_PARTS + 1):
            body = {"model": "bytes", "messages": _HI * count, "stream": False}
            assert (await client.post("/api/chat", json=body)).status_code in (200, 400)
            assert len(in_threads) == int(count > 2)


async def test_a_large_body_is_joined_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    in_threads: list[object] = []

    async def noted(work: Callable[..., Any], *args: Any) -> Any:
        in_threads.append(work)
        return work(*args)

    monkeypatch.setattr(parsing, "in_thread", noted)
    half = b"x" * (parsing.DIRECT_JOIN_BYTES // 2)
    assert await parsing.joined([half, half], 2 * len(half)) == half * 2
    assert not in_threads
    assert await parsing.joined([half, half, b"y"], 2 * len(half) + 1) == half * 2 + b"y"
    assert in_threads


async def test_detokenizing_is_bounded() -> None:
    async with direct_client(FakeEngine()) as client:
        answer = await client.post(
            "/detokenize", json={"model": "bytes", "tokens": [1] * (MAX_DETOKENIZED + 1)}
        )
    assert answer.status_code == 400
    assert f"at most {MAX_DETOKENIZED} are made into text at a time" in answer.text


async def test_a_large_value_of_an_unknown_field_is_not_decoded() -> None:
    seen: dict[str, Any] = {}
    decoder = BodyDecoder(ChatCompletionRequest, (), lambda name, value: seen.update({name: value}))
    large = json.dumps(["x" * parsing.MAX_NEUTRAL_BYTES])
    decoder.decode(b'{"messages": [], "small": [], "large": %b}' % large.encode())
    assert seen == {"small": [], "large": msgspec.Raw(large.encode())}
    async with direct_client(FakeEngine()) as client:
        body = {"model": "bytes", "messages": TURNS, "grammar": "x" * parsing.MAX_NEUTRAL_BYTES}
        answer = await client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "grammar")
