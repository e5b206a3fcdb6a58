"""The real `anthropic` SDK is the judge of our shapes."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest

from penstock.core.errors import EngineUnavailable, Overloaded, PenstockError
from penstock.core.gateway_config import ServerConfig
from penstock.core.plan import CacheUse, TokenEvent
from penstock.core.request import FinishReason, Request, Tier
from tests.api.conftest import Serve, Served
from tests.api.scripted import THINKING_TEMPLATE, TOOL_TEMPLATE, prompt_of, scripted
from tests.gateway.fake_engine import FakeEngine, script_text

TEXT = "Grüße, Welt 😀!"
USER: Any = {"role": "user", "content": "hi"}
WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME: Any = {"name": "get_time", "input_schema": {"type": "object"}}
TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)


def sdk(served: Served, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(**({"base_url": served.url, "api_key": "none", "max_retries": 0} | options))


def ask(served: Served, **fields: Any) -> anthropic.types.Message:
    answer = sdk(served).messages.create(
        **({"model": "bytes", "max_tokens": 100, "messages": [USER]} | fields)
    )
    assert isinstance(answer, anthropic.types.Message)
    return answer


def raw_events(served: Served, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """The stream as it is on the wire: names and data."""
    body = {"model": "bytes", "max_tokens": 100, "messages": [USER], "stream": True} | fields
    answer = httpx.post(f"{served.url}/v1/messages", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert events[-1][0] == events[-1][1]["type"]
    return events


def shape(events: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Names of events, with deltas of one kind drawn together."""
    names: list[str] = []
    for name, data in events:
        text = data["delta"]["type"] if name == "content_block_delta" else name
        if not names or names[-1] != text:
            names.append(text)
    return names


def test_message(serve: Serve) -> None:
    served = serve(FakeEngine(script_text(TEXT)))
    answer = ask(served, max_tokens=64)
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == TEXT
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "bytes")
    assert answer.id.startswith("msg_")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (5, len(TEXT.encode()) + 1)
    assert answer.usage.cache_read_input_tokens == answer.usage.cache_creation_input_tokens == 0
    assert answer.usage.service_tier == "standard"
    assert answer._request_id
    assert answer.id == f"msg_{answer._request_id}"


def test_stream(serve: Serve) -> None:
    served = serve(FakeEngine(script_text(TEXT)))
    with sdk(served).messages.stream(model="bytes", max_tokens=64, messages=[USER]) as stream:
        assert "".join(stream.text_stream) == TEXT
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == len(TEXT.encode()) + 1
    assert final.content[0].type == "text"
    assert final.content[0].text == TEXT


def test_stream_events(serve: Serve) -> None:
    events = raw_events(serve(FakeEngine(script_text("abc"))))
    assert shape(events) == [
        "message_start",
        "ping",
        "content_block_start",
        "text_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["input_tokens"]) == ([], None, 5)
    delta = events[-2][1]
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 4
    assert delta["usage"]["input_tokens"] == 5


def test_an_empty_answer_has_no_blocks(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("")))
    assert ask(served).content == []
    assert shape(raw_events(served)) == ["message_start", "ping", "message_delta", "message_stop"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "reason", "matched"),
    [
        ({"stop_sequences": ["x", "lo w"]}, "hel", "stop_sequence", "lo w"),
        ({"max_tokens": 4}, "hell", "max_tokens", None),
        ({"stop_sequences": ["never"]}, "hello world", "end_turn", None),
    ],
)
def test_stop_reasons(
    serve: Serve, streams: bool, fields: dict[str, Any], text: str, reason: str, matched: str | None
) -> None:
    served = serve(FakeEngine(script_text("hello world")))
    if streams:
        options: Any = {"model": "bytes", "max_tokens": 50, "messages": [USER]} | fields
        with sdk(served).messages.stream(**options) as stream:
            answer: anthropic.types.Message = stream.get_final_message()  # type: ignore[assignment]
    else:
        answer = ask(served, **fields)
    assert answer.content[0].type == "text"
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == (text, reason, matched)


def test_sampling_options_reach_the_engine(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("x")))
    ask(served, extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7}, metadata={"user_id": "u1"})
    ask(served, extra_body={"top_k": 0}, service_tier="auto")
    ask(served, service_tier="standard_only")
    first, second, third = served.engine.added
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (0.5, 0.9, 7)
    assert (first.sampling.max_tokens, second.sampling.top_k) == (100, None)
    assert (first.tier, second.tier, third.tier) == (Tier.DEFAULT, Tier.PRIORITY, Tier.DEFAULT)


def test_a_conversation_is_rendered_turn_by_turn(serve: Serve) -> None:
    served = serve(scripted("ok"))
    ask(
        served,
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
        messages=[
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
            {"role": "user", "content": "d"},
        ],
    )
    ask(served, system="Be brief.")
    full, short = map(prompt_of, served.engine.added)
    assert full == (
        "<|system|>Be\nbrief.<|end|><|user|>a\nb<|end|><|assistant|>c<|end|><|user|>d<|end|><|assistant|>"
    )
    assert short == "<|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>"


def test_prefill(serve: Serve) -> None:
    served = serve(scripted("B)"))
    answer = ask(served, messages=[USER, {"role": "assistant", "content": "The answer is ("}])
    assert prompt_of(served.engine.added[0]) == "<|user|>hi<|end|><|assistant|>The answer is ("
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "B)"
    with pytest.raises(anthropic.BadRequestError, match="white space"):
        ask(served, messages=[USER, {"role": "assistant", "content": "The answer is "}])


def test_tool_use(serve: Serve) -> None:
    served = serve(scripted(TWO_CALLS, template=TOOL_TEMPLATE))
    answer = ask(served, tools=[WEATHER, TIME], max_tokens=500)
    assert answer.stop_reason == "tool_use"
    text, first, second = answer.content
    assert text.type == "text"
    assert text.text == "Let me see."
    assert first.type == "tool_use"
    assert second.type == "tool_use"
    assert (first.name, first.input) == ("weather", {"city": "Paris"})
    assert (second.name, second.input) == ("get_time", {})
    assert first.id.startswith("toolu_")
    assert first.id != second.id
    assert '"name": "weather"' in prompt_of(served.engine.added[0])


def test_streamed_tool_use(serve: Serve) -> None:
    served = serve(scripted(TWO_CALLS, template=TOOL_TEMPLATE))
    with sdk(served).messages.stream(
        model="bytes", max_tokens=500, messages=[USER], tools=[WEATHER, TIME]
    ) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert final.content[1].type == "tool_use"
    assert final.content[1].input == {"city": "Paris"}
    events = raw_events(served, tools=[WEATHER, TIME], max_tokens=500)
    assert [data["index"] for name, data in events if name == "content_block_start"] == [0, 1, 2]
    block = ["content_block_start", "input_json_delta", "content_block_stop"]
    assert shape(events)[2:] == [
        *("content_block_start", "text_delta", "content_block_stop"),
        *(*block, *block),
        *("message_delta", "message_stop"),
    ]


def test_tool_results_go_back(serve: Serve) -> None:
    served = serve(scripted("Sunny.", template=TOOL_TEMPLATE))
    calls = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "secret"},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "id": "t2", "name": "get_time", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "18 °C"}]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "no clock", "is_error": True},
        {"type": "text", "text": "Well?"},
    ]
    messages = [USER, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    ask(served, tools=[WEATHER, TIME], messages=messages)
    prompt = prompt_of(served.engine.added[0])
    assert '<|assistant|>Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}' in prompt
    assert "<|tool|>18 °C<|end|><|tool|>Error: no clock<|end|><|user|>Well?<|end|>" in prompt
    assert "secret" not in prompt


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "auto", "disable_parallel_tool_use": True}, ["weather"]),
        ({"type": "none"}, []),
    ],
)
def test_tool_choice(serve: Serve, choice: Any, names: list[str]) -> None:
    served = serve(scripted(TWO_CALLS, template=TOOL_TEMPLATE))
    answer = ask(served, tools=[WEATHER, TIME], tool_choice=choice, max_tokens=500)
    assert [block.name for block in answer.content if block.type == "tool_use"] == names


def test_forced_tools_hold_the_answer_to_a_grammar(serve: Serve) -> None:
    served = serve(scripted(TWO_CALLS, template=TOOL_TEMPLATE))
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_time"}):
        ask(served, tools=[WEATHER, TIME], tool_choice=choice)
    grammars = [request.sampling.grammar for request in served.engine.added]
    assert all(grammar is not None for grammar in grammars)
    assert grammars[0] != grammars[1]


def test_structured_output(serve: Serve) -> None:
    served = serve(scripted("{}"))
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    ask(served, output_config={"format": {"type": "json_schema", "schema": schema}})
    grammar = served.engine.added[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"


def test_thinking(serve: Serve) -> None:
    served = serve(scripted("It is two.\n</think>\n\n2", template=THINKING_TEMPLATE))
    enabled: Any = {"type": "enabled", "budget_tokens": 1024}
    answer = ask(served, thinking=enabled, max_tokens=2000)
    thought, text = answer.content
    assert thought.type == "thinking"
    assert thought.thinking.strip() == "It is two."
    assert thought.signature
    assert text.type == "text"
    assert text.text == "2"
    with sdk(served).messages.stream(
        model="bytes", max_tokens=2000, messages=[USER], thinking=enabled
    ) as stream:
        streamed = stream.get_final_message()
    assert [block.type for block in streamed.content] == ["thinking", "text"]
    assert streamed.content[0].type == "thinking"
    assert streamed.content[0].signature == thought.signature
    events = raw_events(served, thinking=enabled, max_tokens=2000)
    assert shape(events)[2:6] == [
        "content_block_start",
        "thinking_delta",
        "signature_delta",
        "content_block_stop",
    ]
    # What came back is taken again, and without a word about it the model does not think.
    ask(served, messages=[USER, {"role": "assistant", "content": answer.content}, USER])
    assert not prompt_of(served.engine.added[-1]).endswith("<think>\n")


def test_a_model_that_does_not_think_answers_as_always(serve: Serve) -> None:
    served = serve(scripted("x"))
    answer = ask(served, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
    assert [block.type for block in answer.content] == ["text"]
    assert served.engine.added[-1].sampling.grammar is None


def test_cache_control(serve: Serve) -> None:
    def script(request: Request) -> list[TokenEvent]:
        """Reads 30 tokens, and keeps the rest up to the one breakpoint."""
        (kept,) = request.cache_breakpoints
        use = CacheUse(30, (kept.num_tokens - 30,))
        return [TokenEvent(request.id, (104,), (), FinishReason.STOP, 30, 0.0, cache_use=use)]

    engine = scripted("")
    engine.script = script
    served = serve(engine)
    system: Any = [{"type": "text", "text": "x" * 50, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    usage = ask(served, system=system).usage
    assert usage.cache_read_input_tokens == 30
    assert usage.cache_creation is not None
    assert usage.cache_creation.ephemeral_1h_input_tokens == usage.cache_creation_input_tokens == 21
    assert engine.added[0].cache_breakpoints[0].ttl_s == 3600
    total = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert total == len(engine.added[0].prompt_token_ids)
    last = raw_events(served, system=system)[-2][1]["usage"]
    assert (last["input_tokens"], last["cache_read_input_tokens"]) == (usage.input_tokens, 30)
    with pytest.raises(anthropic.BadRequestError, match="cache_control"):
        ask(served, system=system * 5)


def test_the_tool_runner_is_told_that_threads_are_not_kept(serve: Serve) -> None:
    """It asks for a thread first, and sends whole conversations once it knows that there is none."""

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: Where.
        """
        return f"sunny in {city}"

    def answer(request: Request) -> str:
        if "sunny in Paris" in prompt_of(request):
            return "Take no umbrella."
        return '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'

    served = serve(scripted(answer, template=TOOL_TEMPLATE))
    runner = sdk(served).beta.messages.tool_runner(
        model="bytes", max_tokens=100, messages=[USER], tools=[weather]
    )
    called, last = list(runner)
    assert (called.stop_reason, last.stop_reason) == ("tool_use", "end_turn")
    assert last.content[0].type == "text"
    assert last.content[0].text == "Take no umbrella."


def test_count_tokens(serve: Serve) -> None:
    served = serve(scripted("x", template=TOOL_TEMPLATE))
    messages = sdk(served).messages
    count = messages.count_tokens(model="bytes", messages=[USER]).input_tokens
    assert count == ask(served).usage.input_tokens
    assert messages.count_tokens(model="bytes", messages=[USER], system="Be brief.").input_tokens > count
    with_tools = messages.count_tokens(model="bytes", messages=[USER], tools=[WEATHER]).input_tokens
    assert with_tools == ask(served, tools=[WEATHER]).usage.input_tokens
    with pytest.raises(anthropic.NotFoundError):
        messages.count_tokens(model="unknown", messages=[USER])


def test_models(serve: Serve) -> None:
    client = sdk(serve(FakeEngine()))
    (model,) = client.models.list()
    assert (model.id, model.type, model.max_input_tokens, model.max_tokens) == ("bytes", "model", 256, 128)
    assert client.models.retrieve("bytes") == model
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("unknown")


PDF: dict[str, Any] = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": ""},
}


def image() -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


def tool_use(tool_id: str = "t") -> dict[str, Any]:
    call = {"type": "tool_use", "id": tool_id, "name": "f", "input": {}}
    return {"role": "assistant", "content": [call]}


def tool_result(content: Any = "x") -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": content}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "first message"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "role"),
        ({"messages": [{"role": "user", "content": ""}]}, "must not be empty"),
        ({"messages": [{"role": "user", "content": []}]}, "must not be empty"),
        ({"messages": [{"role": "user", "content": [{"type": "novel"}]}]}, "novel"),
        ({"messages": [{"role": "user", "content": [image()]}]}, "takes text only"),
        ({"messages": [{"role": "user", "content": [PDF]}]}, "takes no document blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "source"),
        ({"messages": [USER, tool_use(), tool_result([PDF])]}, "takes no document blocks"),
        ({"messages": [USER, tool_use(), tool_result([image()])]}, "takes text only"),
        ({"messages": [USER, tool_use()]}, "nothing answers"),
        ({"messages": [USER, tool_use(), USER]}, "is missing"),
        ({"messages": [USER, tool_use("other"), tool_result()]}, "answers no tool_use"),
        ({"messages": [tool_result()]}, "answers no tool_use"),
        ({"messages": [{"role": "user", "content": tool_use()["content"]}]}, "tool_use"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"temprature": 0.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "tools.0.name"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools.0.input_schema"),
        ({"tools": [TIME, TIME]}, "differ"),
        (
            {
                "tools": [{"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "together with tools",
        ),
        ({"tool_choice": {"type": "any"}}, "together with tools"),
        ({"tools": [TIME], "tool_choice": {"type": "tool", "name": "f"}}, "no tool 'f'"),
        ({"tools": [TIME], "tool_choice": {"type": "some"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "1024"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "less than max_tokens"),
        ({"cache_control": {"type": "forever"}}, "cache_control"),
        ({"system": [image()]}, "system"),
        ({"model": None}, "model"),
    ],
)
def test_refusals(serve: Serve, fields: dict[str, Any], words: str) -> None:
    served = serve(FakeEngine(script_text("x")))
    body = {"model": "bytes", "max_tokens": 100, "messages": [USER]} | fields
    answer = httpx.post(f"{served.url}/v1/messages", json=body)
    assert answer.status_code == 400, answer.text
    problem = answer.json()
    assert problem.keys() == {"type", "error", "request_id"}
    assert (problem["type"], problem["error"]["type"]) == ("error", "invalid_request_error")
    assert problem["request_id"] == answer.headers["request-id"]
    assert words in problem["error"]["message"]
    assert served.engine.added == []


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "kind"),
    [
        ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
        ("POST", "/v1/messages", b"[" * 4000, 400, "invalid_request_error"),
        ("POST", "/v1/messages", b'{"model": "\xff"}', 400, "invalid_request_error"),
        ("POST", "/v1/messages", b"x" * 5000, 413, "request_too_large"),
        ("GET", "/v1/messages", b"", 405, "invalid_request_error"),
        ("POST", "/v1/messages/nothing/here", b"{}", 404, "not_found_error"),
        ("GET", "/v1/messages/count_tokens", b"", 405, "invalid_request_error"),
    ],
)
def test_errors_have_their_own_shape(
    serve: Serve, method: str, path: str, content: bytes, status: int, kind: str
) -> None:
    served = serve(FakeEngine(), server=ServerConfig(max_body_bytes=4096))
    answer = httpx.request(method, served.url + path, content=content)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert answer.json()["request_id"] == answer.headers["request-id"]


def test_versions(serve: Serve) -> None:
    url = f"{serve(FakeEngine(script_text('x'))).url}/v1/messages"
    body = {"model": "bytes", "max_tokens": 10, "messages": [USER]}
    for version, status in (("2023-06-01", 200), ("2026-10-21", 200), ("2023-01-01", 400), ("new", 400)):
        assert httpx.post(url, json=body, headers={"anthropic-version": version}).status_code == status
    assert httpx.post(url, json=body, headers={"anthropic-beta": "anything-2030"}).status_code == 200


def test_keys(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("x")), server=ServerConfig(api_key="secret"))
    with pytest.raises(anthropic.AuthenticationError) as caught:
        ask(served)
    body: Any = caught.value.body
    assert body["error"]["type"] == "authentication_error"
    options: Any = {"model": "bytes", "max_tokens": 5, "messages": [USER]}
    assert sdk(served, api_key="secret").messages.create(**options).content
    by_header = httpx.post(f"{served.url}/v1/messages", json=options, headers={"x-api-key": "secret"})
    assert by_header.status_code == 200


@pytest.mark.parametrize(
    ("error", "kind", "status", "name"),
    [
        (Overloaded("Full."), anthropic.APIStatusError, 529, "overloaded_error"),
        (EngineUnavailable("Gone."), anthropic.InternalServerError, 503, "api_error"),
        (PenstockError("Broken."), anthropic.InternalServerError, 500, "api_error"),
    ],
)
def test_errors_before_the_answer(
    serve: Serve, error: PenstockError, kind: type[anthropic.APIStatusError], status: int, name: str
) -> None:
    served = serve(FakeEngine(lambda request: [error]))
    for streams in (False, True):
        with pytest.raises(kind) as caught:
            ask(served, stream=streams)
        body: Any = caught.value.body
        assert (caught.value.status_code, body["error"]["type"]) == (status, name)


def test_an_error_in_the_middle_of_a_stream(serve: Serve) -> None:
    def script(request: Request) -> list[TokenEvent | PenstockError]:
        return [TokenEvent(request.id, tuple(b"ab")), Overloaded("Too much.")]

    served = serve(FakeEngine(script))
    stream = sdk(served).messages.create(model="bytes", max_tokens=50, messages=[USER], stream=True)
    with pytest.raises(anthropic.APIStatusError) as caught:
        for _ in stream:
            pass
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"] == {"type": "overloaded_error", "message": "Too much."}
    assert body["request_id"]
    assert raw_events(served)[-1][0] == "error"


def test_the_sdk_tries_again_when_we_are_overloaded(serve: Serve) -> None:
    attempts: list[Request] = []

    def script(request: Request) -> list[TokenEvent | PenstockError]:
        attempts.append(request)
        if len(attempts) == 1:
            return [Overloaded("Full.", retry_after_s=0.01)]
        return [TokenEvent(request.id, tuple(b"ok"), finish_reason=FinishReason.STOP)]

    served = serve(FakeEngine(script))
    answer = sdk(served, max_retries=2).messages.create(model="bytes", max_tokens=9, messages=[USER])
    assert len(attempts) == 2
    assert answer.content[0].type == "text"


def test_pings_while_nothing_else_comes(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.api.http.answers.KEEP_ALIVE_S", 0.02)
    served = serve(FakeEngine(lambda request: [TokenEvent(request.id, (104,))]))
    body = {"model": "bytes", "max_tokens": 50, "messages": [USER], "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/messages", json=body) as answer:
        names = (line for line in answer.iter_lines() if line.startswith("event: "))
        seen = [next(names) for _ in range(7)]
    assert seen == [
        *("event: message_start", "event: ping", "event: content_block_start", "event: content_block_delta"),
        *["event: ping"] * 3,
    ]


def test_a_reader_that_leaves_ends_the_request(serve: Serve) -> None:
    served = serve(FakeEngine(lambda request: [TokenEvent(request.id, (104,))]))
    stream = sdk(served).messages.create(model="bytes", max_tokens=50, messages=[USER], stream=True)
    next(iter(stream))
    stream.close()
    served.wait_until(lambda: len(served.engine.aborted) == 1)


def test_tools_that_a_provider_would_run_are_skipped_and_named(serve: Serve) -> None:
    served = serve(scripted("ok", template=TOOL_TEMPLATE))
    searched: Any = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "found"},
    ]
    raw = sdk(served).messages.with_raw_response.create(
        model="bytes",
        max_tokens=20,
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": searched},
            {"role": "user", "content": "go on"},
        ],
        tools=[TIME, {"type": "web_search_20250305", "name": "web_search"}],
        tool_choice={"type": "auto"},
        extra_body={"mcp_servers": [{"type": "url", "url": "https://example.com", "name": "m"}]},
    )
    for name in ("web_search_20250305", "mcp_servers", "server_tool_use", "web_search_tool_result"):
        assert f"'{name}'" in raw.headers["warning"]
    prompt = prompt_of(served.engine.added[-1])
    assert "found" in prompt
    assert "web_search" not in prompt
