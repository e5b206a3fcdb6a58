"""Whatever is sent, the answer is an error of OpenAI's shape with the right status, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.conftest import direct_client
from tests.gateway.fake_engine import FakeEngine, engine_ready, model_card, script_text

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "bytes", "messages": [{"role": "user", "content": "hi"}]} | fields


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "bytes", "prompt": "hi"} | fields


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {}}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def call(name: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": "{}"}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


async def post(path: str, body: Any, **server: Any) -> tuple[int, dict[str, Any]]:
    """Status and error of a request; proves that the engine saw nothing and that the next request works."""
    engine = FakeEngine(script_text("fine"))
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with direct_client(engine, **server) as client:
        answer = await client.post(path, content=content)
        assert engine.added == []
        assert (await client.post(COMPLETION, json=text())).status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return answer.status_code, error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[1, 2]",
        b'"text"',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a"} trailing',
        b'{"prompt": "a", "n": ' + b"9" * 10_000 + b"}",
    ],
)
async def test_malformed_json(body: bytes) -> None:
    status, error = await post(COMPLETION, body)
    assert status == 400
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETION, text(prompt=5), "prompt"),
        (COMPLETION, text(prompt=[1.5]), "prompt"),
        (COMPLETION, text(prompt=None), "prompt"),
        (COMPLETION, text(prompt=[]), "prompt"),
        (COMPLETION, text(prompt=[[]]), "prompt"),
        (COMPLETION, text(prompt=""), "prompt"),
        (COMPLETION, text(prompt=["a", 5]), "prompt"),
        (COMPLETION, text(prompt=[5, -1]), "prompt"),
        (COMPLETION, text(prompt=[5, 99999]), "prompt"),
        (COMPLETION, text(prompt=[2**70]), "prompt"),
        (COMPLETION, {"model": "bytes"}, None),
        (COMPLETION, text(model=5), "model"),
        (COMPLETION, text(max_tokens="5"), "max_tokens"),
        (COMPLETION, text(max_tokens=0), "max_tokens"),
        (COMPLETION, text(max_tokens=-3), "max_tokens"),
        (COMPLETION, text(temperature="hot"), "temperature"),
        (COMPLETION, text(temperature="NaN"), "temperature"),
        (COMPLETION, text(temperature=-1), "temperature"),
        (COMPLETION, text(top_p=-0.1), "top_p"),
        (COMPLETION, text(top_p=1.01), "top_p"),
        (COMPLETION, text(top_k=-2), "top_k"),
        (COMPLETION, text(min_p=2), "min_p"),
        (COMPLETION, text(n=0), "n"),
        (COMPLETION, text(n=129), "n"),
        (COMPLETION, text(n=10**400), "n"),
        (COMPLETION, text(max_tokens=10**400), "max_tokens"),
        (COMPLETION, text(temperature=10**300), "temperature"),
        (COMPLETION, text(seed=2**64), "seed"),
        (COMPLETION, text(seed="abc"), "seed"),
        (COMPLETION, text(stop=["a"] * 17), "stop"),
        (COMPLETION, text(stop=[""]), "stop"),
        (COMPLETION, text(stop=[5]), "stop"),
        (COMPLETION, text(logprobs=21), "logprobs"),
        (COMPLETION, text(logprobs=True), "logprobs"),
        (COMPLETION, text(logit_bias={"99999": 1}), "logit_bias"),
        (COMPLETION, text(logit_bias={"-1": 1}), "logit_bias"),
        (COMPLETION, text(logit_bias={"x": 1}), "logit_bias"),
        (COMPLETION, text(logit_bias={"1": 101}), "logit_bias"),
        (COMPLETION, text(stop_token_ids=[99999]), "stop_token_ids"),
        (COMPLETION, text(ignore_eos="yes"), "ignore_eos"),
        (COMPLETION, text(repetition_penalty=0), "repetition_penalty"),
        (COMPLETION, text(presence_penalty=3), "presence_penalty"),
        (COMPLETION, text(frequency_penalty=-3), "frequency_penalty"),
        (COMPLETION, text(stream="yes"), "stream"),
        (COMPLETION, text(stream_options={"include_usage": True}), "stream_options"),
        (COMPLETION, text(service_tier="gold"), "service_tier"),
        (COMPLETION, text(echo=True, logprobs=21), "logprobs"),
        (COMPLETION, text(prompt_logprobs=21), "prompt_logprobs"),
        (COMPLETION, text(prompt_logprobs=-1, echo=True, logprobs=1), "prompt_logprobs"),
        (COMPLETION, text(prompt_logprobs=1, stream=True), "prompt_logprobs"),
        (COMPLETION, text(max_tokens=-1), "max_tokens"),
        (COMPLETION, text(suffix="x"), "suffix"),
        (COMPLETION, text(best_of=4, stream=True), "best_of"),
        (COMPLETION, text(best_of=1, n=2), "best_of"),
        (COMPLETION, text(best_of=10**6), "n"),
        (COMPLETION, text(best_of=2, echo=True), "best_of"),
        (COMPLETION, text(use_beam_search=True, best_of=1, n=2), "best_of"),
        (COMPLETION, text(use_beam_search=True, n=65), "n"),
        (COMPLETION, text(use_beam_search=True, n=2, stream=True), "stream"),
        (COMPLETION, text(use_beam_search=True, n=2, echo=True), "echo"),
        (COMPLETION, text(use_beam_search=True, n=2, prompt_logprobs=1), "prompt_logprobs"),
        (COMPLETION, text(use_beam_search=True, n=2, max_tokens=0), "max_tokens"),
        (COMPLETION, text(use_beam_search=True, n=2, guided_regex="a"), "response_format"),
        (COMPLETION, text(use_beam_search=True, n=2, length_penalty=11), "length_penalty"),
        (COMPLETION, text(use_beam_search=True, early_stopping="soon"), "early_stopping"),
        (COMPLETION, text(use_beam_search=1), "use_beam_search"),
        (CHAT, chat(best_of=2), "best_of"),
        (CHAT, chat(use_beam_search=True, n=2, presence_penalty=1), "presence_penalty"),
        (COMPLETION, text(echo=True, truncate_prompt_tokens=1), "echo"),
        (COMPLETION, text(prompt=[1, 2], suffix="x"), "suffix"),
        (COMPLETION, text(bad_words=["a", ""]), "bad_words"),
        (COMPLETION, text(bad_words=["a"] * 1000), "bad_words"),
        (COMPLETION, text(bad_words=["a" * 5000]), "bad_words"),
        (COMPLETION, text(bad_words="a"), "bad_words"),
        (COMPLETION, text(allowed_token_ids=[]), "allowed_token_ids"),
        (COMPLETION, text(allowed_token_ids=[5, 10**9]), "allowed_token_ids"),
        (COMPLETION, text(allowed_token_ids=[-1]), "allowed_token_ids"),
        (COMPLETION, text(allowed_token_ids=[1], guided_regex="a"), "allowed_token_ids"),
        (COMPLETION, text(typical_p=2), "typical_p"),
        (COMPLETION, text(xtc_probability=-1), "xtc_probability"),
        (COMPLETION, text(xtc_threshold="x"), "xtc_threshold"),
        (COMPLETION, text(top_n_sigma=-2), "top_n_sigma"),
        (COMPLETION, text(dry_multiplier=-1), "dry_multiplier"),
        (COMPLETION, text(dry_base=0.5), "dry_base"),
        (COMPLETION, text(dry_allowed_length=0), "dry_allowed_length"),
        (COMPLETION, text(dry_penalty_last_n=-2), "dry_penalty_last_n"),
        (COMPLETION, text(repeat_last_n=10**12), "repeat_last_n"),
        (COMPLETION, text(dry_multiplier=1, dry_sequence_breakers=[""]), "dry_sequence_breakers"),
        (COMPLETION, text(dry_multiplier=1, dry_sequence_breakers=["x"] * 65), "dry_sequence_breakers"),
        (COMPLETION, text(dry_sequence_breakers="x"), "dry_sequence_breakers"),
        (COMPLETION, text(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (COMPLETION, text(truncate_prompt_tokens=-2), "truncate_prompt_tokens"),
        (COMPLETION, text(truncate_prompt_tokens=10**30), "truncate_prompt_tokens"),
        (COMPLETION, text(priority="high"), "priority"),
        (COMPLETION, text(skip_special_tokens="no"), "skip_special_tokens"),
        (COMPLETION, text(cache_salt=""), "cache_salt"),
        (COMPLETION, text(cache_salt="x" * 1000), "cache_salt"),
        (CHAT, chat(chat_template="{{ messages }}"), "chat_template"),
        (CHAT, chat(documents=["x"]), "documents"),
        (CHAT, chat(continue_final_message=True), "continue_final_message"),
        (CHAT, chat(thinking_token_budget=-5), "thinking_token_budget"),
        (CHAT, chat(thinking={"type": "sometimes"}), "thinking"),
        (CHAT, chat(reasoning={"exclude": True}), "reasoning"),
        (CHAT, chat(enable_thinking=True, reasoning_effort="none"), "reasoning_effort"),
        (CHAT, chat(messages="hi"), "messages"),
        (CHAT, chat(messages=[]), "messages"),
        (CHAT, chat(messages=[{"role": "user"}]), "messages[0].content"),
        (CHAT, chat(messages=[{"role": "pirate", "content": "arr"}]), "messages[0].role"),
        (CHAT, chat(messages=[{"content": "hi"}]), "messages"),
        (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content"),
        (CHAT, chat(max_completion_tokens=0), "max_completion_tokens"),
        (CHAT, chat(top_logprobs=2), "top_logprobs"),
        (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
        (CHAT, chat(response_format={"type": "yaml"}), "response_format.type"),
        (CHAT, chat(response_format={"type": "json_object"}, guided_regex="a"), "response_format"),
        (CHAT, chat(guided_choice=[]), "guided.choice"),
        (CHAT, chat(regex="a"), "regex"),
        (CHAT, chat(ebnf='root ::= "a"'), "ebnf"),
        (CHAT, chat(json_schema="{}"), "json_schema"),
        (CHAT, chat(messages=[{"role": "function", "content": "x"}]), "messages[0].name"),
        (CHAT, chat(messages=[{"role": "user", "function_call": {"name": "f"}}]), "messages[0].tool_calls"),
        (CHAT, chat(structured_outputs={"regex": "a", "choice": ["b"]}), "structured_outputs"),
        (CHAT, chat(tools=[{"type": "function"}]), "tools"),
        (CHAT, chat(tools=[{"type": "custom", "function": {"name": "x"}}]), "tools"),
        (CHAT, chat(tools=[{"type": "custom", "custom": {"name": "x", "format": {"type": "y"}}}]), "tools"),
        (CHAT, chat(tools=[{"type": "web_search"}], tool_choice="required"), "tool_choice"),
        (CHAT, chat(tools=[tool("a b")]), "tools"),
        (CHAT, chat(tools=[tool(""), tool("b")]), "tools"),
        (CHAT, chat(tools=[tool("a"), tool("a")]), "tools"),
        (CHAT, chat(tools=[tool("a", deep(70))]), "tools"),
        (CHAT, chat(tools=[tool(f"t{number}") for number in range(1025)]), "tools"),
        (CHAT, chat(tools=[tool("a")], tool_choice="some"), "tool_choice"),
        (CHAT, chat(tool_choice="required"), "tool_choice"),
        (CHAT, chat(tool_choice="any"), "tool_choice"),
        (CHAT, chat(tools=[tool("a")], tool_choice=named("b")), "tool_choice"),
        (CHAT, chat(tools=[tool("a")], tool_choice={"type": "custom"}), "tool_choice"),
        (CHAT, chat(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id"),
        (CHAT, chat(messages=[{"role": "user", "tool_calls": [call("a")]}]), "messages[0].tool_calls"),
        (CHAT, chat(reasoning_effort="huge"), "reasoning_effort"),
        (CHAT, chat(modalities=["audio"]), "modalities"),
        (CHAT, chat(web_search_options={}), "web_search_options"),
        (CHAT, chat(function_call="auto"), "functions"),
        (CHAT, chat(functions=[{}]), "functions"),
        (CHAT, chat(functions=[{"name": "f"}], tools=[tool("a")]), "functions"),
        (CHAT, chat(functions=[{"name": "f"}], function_call={"name": "g"}), "tool_choice"),
        (
            CHAT,
            chat(messages=[{"role": "assistant", "tool_calls": [{"id": "1"}]}]),
            "messages[0].tool_calls[0].function",
        ),
        (CHAT, chat(stream=True, temperature=-1), "temperature"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
async def test_wrong_values_name_their_field(path: str, body: dict[str, Any], param: str | None) -> None:
    status, error = await post(path, body)
    assert (status, error["param"]) == (400, param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("top_kk", "top_k"),
        ("min_tokns", "min_tokens"),
        ("ignore_eso", "ignore_eos"),
        ("Top-K", "top_k"),
        ("repetition_penality", "repetition_penalty"),
        ("stop_token_id", "stop_token_ids"),
    ],
)
async def test_misspelt_extension_is_refused_with_the_right_name(misspelt: str, meant: str) -> None:
    status, error = await post(CHAT, chat(**{misspelt: 1}))
    assert (status, error["param"]) == (400, misspelt)
    assert repr(meant) in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("length_penalty", 2),
        ("early_stopping", True),
        ("num_beams", 4),
        ("mirostat", 2),
        ("mirostat", True),
        ("tfs_z", 0.8),
        ("repetition_penalty_range", 64),
        ("top_a", 1),
        ("mm_processor_kwargs", {"a": 1}),
        ("logits_processors", ["x"]),
        ("max_new_tokens", 5),
        ("no_repeat_ngram_size", 3),
        ("regex", "a+"),
    ],
)
async def test_fields_of_other_servers_are_refused_by_name(path: str, field: str, value: Any) -> None:
    body = {CHAT: chat(), COMPLETION: text(), "/v1/responses": {"input": "hi"}}.get(path, chat(max_tokens=5))
    async with direct_client(engine := FakeEngine(script_text("fine"))) as client:
        answer = await client.post(path, json=body | {field: value})
    assert (answer.status_code, engine.added) == (400, [])
    assert field in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field", "value", "hint"),
    [
        ("/v1/responses", "max_tokens", 5, "max_output_tokens"),
        ("/v1/responses", "response_format", {"type": "json_object"}, "text.format"),
        ("/v1/responses", "messages", [{"role": "user", "content": "x"}], "/v1/chat/completions"),
        ("/v1/responses", "n", 2, "/v1/chat/completions"),
        ("/v1/responses", "prompt_logprobs", 2, "/v1/completions"),
        ("/v1/responses", "use_beam_search", True, "/v1/chat/completions"),
        ("/v1/messages", "use_beam_search", True, "/v1/chat/completions"),
        ("/v1/messages", "prompt_logprobs", 2, "/v1/completions"),
        ("/v1/messages", "stop", ["x"], "stop_sequences"),
        ("/v1/messages", "max_completion_tokens", 5, "max_tokens"),
        ("/v1/messages", "response_format", {"type": "json_object"}, "output_config.format"),
        (CHAT, "system", "Be brief.", "message"),
        (CHAT, "stop_sequences", ["x"], "stop"),
        (CHAT, "options", {"num_predict": 4}, "field of its own"),
        (CHAT, "random_seed", 4, "seed"),
        (COMPLETION, "max_completion_tokens", 5, "max_tokens"),
        (COMPLETION, "messages", [{"role": "user", "content": "x"}], "/v1/chat/completions"),
    ],
)
async def test_fields_of_other_apis_are_refused_with_the_right_name(
    path: str, field: str, value: Any, hint: str
) -> None:
    body = {CHAT: chat(), COMPLETION: text(), "/v1/responses": {"input": "hi"}}.get(path, chat(max_tokens=5))
    async with direct_client(engine := FakeEngine(script_text("fine"))) as client:
        answer = await client.post(path, json=body | {field: value})
        message = answer.json()["error"]["message"]
        assert (answer.status_code, engine.added) == (400, [])
        assert f"The field {field} " in message
        assert hint in message
        harmless = {"n": 1, "stop": [], "system": "", "stop_sequences": [], "options": {}}
        answer = await client.post(path, json=body | {field: harmless.get(field)})
        assert answer.status_code == 200


@pytest.mark.parametrize("number", [b"1e999", b"1" * 20_000])
async def test_numbers_out_of_range_in_unknown_fields_are_refused(number: bytes) -> None:
    status, error = await post(CHAT, json.dumps(chat()).encode()[:-1] + b', "unknown": ' + number + b"}")
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert "out of range" in error["message"]


async def test_too_many_unknown_fields_are_refused() -> None:
    """Each is compared with the known names. Only the first of many were, so that a misspelt one could hide."""
    body = chat(**{f"field_{position}": 1 for position in range(300)}, top_kk=3)
    async with direct_client(FakeEngine()) as client:
        answer = await client.post(CHAT, json=body)
    assert answer.status_code == 400
    assert "more than 256 unknown fields" in answer.json()["error"]["message"]


TURN = {"role": "user", "content": "a"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}
INPUT_PARTS = {"role": "user", "content": [{"type": "input_text", "text": "a"}] * 20_000}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(messages=[TURN] * 20_001)),
        (CHAT, chat(messages=[PARTS])),
        (CHAT, chat(messages=[{"role": "assistant", "tool_calls": [call("f")] * 20_000}])),
        ("/v1/messages", chat(messages=[TURN] * 20_001, max_tokens=5)),
        ("/v1/messages", chat(messages=[PARTS], max_tokens=5)),
        ("/v1/messages/count_tokens", chat(messages=[PARTS])),
        ("/v1/responses", {"model": "bytes", "input": [TURN] * 20_001}),
        ("/v1/responses", {"model": "bytes", "input": [INPUT_PARTS]}),
        ("/api/chat", {"model": "bytes", "messages": [TURN] * 20_001}),
    ],
    ids=[
        "chat",
        "chat-parts",
        "chat-calls",
        "messages",
        "messages-parts",
        "count",
        "responses",
        "responses-parts",
        "ollama",
    ],
)
async def test_too_many_messages_and_parts_are_refused(path: str, body: dict[str, Any]) -> None:
    async with direct_client(FakeEngine()) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert "more than 20000 messages, parts and tool calls" in answer.text


async def test_other_unknown_fields_are_ignored() -> None:
    ignored = {
        "metadata": {"a": "1"},
        "store": True,
        "whatever": [1],
        # Fields of other servers with the values that change nothing.
        "use_beam_search": False,
        "length_penalty": 1.0,
        "mirostat": 0,
        "top_a": 0,
        "echo": False,
        "lora_path": None,
        "parallel_tool_calls": False,
        "x" * 500: 1,
    }
    async with direct_client(FakeEngine(script_text("fine"))) as client:
        assert (await client.post(CHAT, json=chat(**ignored))).status_code == 200


async def test_null_is_the_same_as_absent() -> None:
    fields = (
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "stream",
        "max_tokens",
        "logit_bias",
        "top_k",
        "tools",
    )
    async with direct_client(FakeEngine(script_text("fine"))) as client:
        assert (await client.post(CHAT, json=chat(**dict.fromkeys(fields)))).status_code == 200


async def test_unknown_model() -> None:
    status, error = await post(CHAT, chat(model="gpt-9"))
    assert (status, error["code"]) == (404, "model_not_found")
    assert "'bytes'" in error["message"], "says what is served"


async def test_prompt_longer_than_the_context() -> None:
    status, error = await post(COMPLETION, text(prompt="x" * 300))
    assert (status, error["code"]) == (400, "context_length_exceeded")
    status, error = await post(CHAT, chat(messages=[{"role": "user", "content": "x" * 300}]))
    assert (status, error["param"]) == (400, "messages")


async def test_body_too_large() -> None:
    status, error = await post(COMPLETION, text(prompt="x" * 5000), max_body_bytes=1024)
    assert (status, error["code"]) == (413, "request_too_large")


async def test_body_too_large_in_pieces_without_a_length() -> None:
    async def pieces() -> Any:
        for _ in range(100):
            yield b"x" * 100

    async with direct_client(FakeEngine(), max_body_bytes=1024) as client:
        assert (await client.post(COMPLETION, content=pieces())).status_code == 413


async def test_unknown_path_and_wrong_method() -> None:
    async with direct_client(FakeEngine()) as client:
        missing = await client.get("/v1/nothing")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        wrong = await client.get(COMPLETION)
        assert wrong.status_code == 405
        assert "GET" in wrong.json()["error"]["message"]
        assert wrong.headers["allow"] == "POST"


async def test_chat_with_a_model_that_has_no_template() -> None:
    engine = FakeEngine(ready=engine_ready(model_card(chat_template=None)))
    async with direct_client(engine) as client:
        answer = await client.post(CHAT, json=chat())
    assert answer.status_code == 400
    assert "/v1/completions" in answer.json()["error"]["message"]


async def test_a_bug_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: object) -> list[Any]:
        raise RuntimeError("secret detail")

    async with direct_client(FakeEngine(broken)) as client:
        answer = await client.post(CHAT, json=chat())
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["type"] == "api_error"
    assert "secret detail" in caplog.text
    assert answer.headers["x-request-id"] in caplog.text


LONG = "\0" * 2000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(messages=[{"role": LONG, "content": "x"}])),
        (CHAT, chat(messages=[{"role": "user", "content": [{"type": LONG}]}])),
        (CHAT, chat(model=LONG)),
        (CHAT, chat(tools=[tool("f")], tool_choice=named(LONG))),
        (CHAT, chat(tools=[tool(LONG), tool(LONG)])),
        (CHAT, chat(response_format={"type": LONG})),
        ("/v1/responses", {"model": "bytes", "input": [{"type": LONG}]}),
        ("/v1/responses", {"model": "bytes", "input": [{"role": LONG, "content": "x"}]}),
        ("/v1/responses", {"model": "bytes", "input": "x", "previous_response_id": LONG}),
        ("/v1/responses", {"model": "bytes", "input": "x", "text": {"format": {"type": LONG}}}),
    ],
)
async def test_errors_quote_little_of_a_long_text(path: str, body: dict[str, Any]) -> None:
    """To escape all of a text of megabytes would keep other requests waiting."""
    status, error = await post(path, body)
    assert status in (400, 404)
    assert len(error["message"]) < 1200
