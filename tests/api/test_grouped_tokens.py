"""A step that verified drafts brings several tokens in one event. Answers, usage and reasons to stop are the same as
when the same tokens come one by one, in every dialect."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from penstock.api.app import create_app
from penstock.cluster.fleet import Fleet
from penstock.core.errors import EngineUnavailable, PenstockError
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.core.plan import TokenEvent, TokenLogprobs
from penstock.core.request import FinishReason, Request
from penstock.gateway.accounts import Accounts, Claim, Outcome
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import GenerationRequest, SamplingOptions, TextPrompt
from tests.api.conftest import direct_client
from tests.api.scripted import THINKING_TEMPLATE, TOOL_TEMPLATE, scripted
from tests.cluster.fake_replicas import FakeReplicas, member
from tests.gateway.fake_engine import CHAT_TEMPLATE, FakeEngine, Script, engine_ready, model_card, script_text
from tests.gateway.guards.read_settings import guard_settings

Sizes = Callable[[], Iterator[int]]


def sizes_of(seed: int) -> Sizes:
    """Sizes of groups as verification gives them: one token, or a few."""

    def sizes() -> Iterator[int]:
        rng = random.Random(seed)
        while True:
            yield rng.choice((1, 1, 2, 3, 5, 8))

    return sizes


def always(size: int) -> Sizes:
    def sizes() -> Iterator[int]:
        while True:
            yield size

    return sizes


GROUPINGS = {
    "pairs": always(2),
    "threes": always(3),
    "all at once": always(1 << 20),
    **{f"random {seed}": sizes_of(seed) for seed in range(4)},
}


def joined(events: Sequence[TokenEvent]) -> TokenEvent:
    first, last = events[0], events[-1]
    return TokenEvent(
        first.request_id,
        tuple(token_id for event in events for token_id in event.token_ids),
        tuple(logprobs for event in events for logprobs in event.logprobs),
        last.finish_reason,
        first.num_cached_tokens,
        first.queue_s,
        last.error,
        first.cache_use,
    )


def grouped(script: Script, sizes: Sizes) -> Script:
    def group(request: Request) -> list[TokenEvent | PenstockError]:
        events = [event for event in script(request) if isinstance(event, TokenEvent)]
        scores = [event for event in events if event.prompt_logprobs is not None]
        rest = [event for event in events if event.prompt_logprobs is None]
        groups: list[TokenEvent | PenstockError] = [*scores]
        for size in sizes():
            if not rest:
                return groups
            groups.append(joined(rest[:size]))
            del rest[:size]
        raise AssertionError("sizes never end")

    return group


USER = {"role": "user", "content": "Weather in Paris?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call> There you are.'
)
PROSE = "Zwölf Boxkämpfer jagen 🦊 quer. Then ENDE, and more text → behind it."
THOUGHTS = "I think that\nthis is it.</think>\n\nThe answer is 42. ENDE"

# By name: the template, the answer, and what is asked besides, in the words of OpenAI's chat completions.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": (CHAT_TEMPLATE, PROSE, {}),
    "stop across tokens": (CHAT_TEMPLATE, PROSE, {"stop": ["ENDE", "n, "]}),
    "stop inside a character": (CHAT_TEMPLATE, PROSE, {"stop": ["🦊"]}),
    "no stop after all": (CHAT_TEMPLATE, PROSE, {"stop": ["ENDE,  ", "it. "]}),
    "max tokens": (CHAT_TEMPLATE, PROSE, {"max_tokens": 27}),
    "max tokens inside a character": (CHAT_TEMPLATE, PROSE, {"max_tokens": 26, "stop": ["ENDE"]}),
    "logprobs": (CHAT_TEMPLATE, PROSE, {"logprobs": True, "top_logprobs": 2}),
    "logprobs and a stop": (CHAT_TEMPLATE, PROSE, {"logprobs": True, "top_logprobs": 1, "stop": ["ENDE"]}),
    "thoughts": (THINKING_TEMPLATE, THOUGHTS, {}),
    "thoughts and a stop": (THINKING_TEMPLATE, THOUGHTS, {"stop": ["42"]}),
    "cut off thoughts": (THINKING_TEMPLATE, THOUGHTS, {"max_tokens": 9}),
    "calls": (TOOL_TEMPLATE, CALLS, {"tools": [TOOL]}),
    "one call": (TOOL_TEMPLATE, CALLS, {"tools": [TOOL], "parallel_tool_calls": False}),
    "forced calls": (TOOL_TEMPLATE, CALLS, {"tools": [TOOL], "tool_choice": "required"}),
    "cut off call": (TOOL_TEMPLATE, CALLS, {"tools": [TOOL], "max_tokens": 60}),
    "calls and logprobs": (TOOL_TEMPLATE, CALLS, {"tools": [TOOL], "logprobs": True}),
    "thoughts and logprobs": (THINKING_TEMPLATE, THOUGHTS, {"logprobs": True, "stop": ["42"]}),
}

_VARYING = {"id", "call_id", "item_id", "created", "created_at", "completed_at", "response_id", "request_id"}


def steady(value: Any) -> Any:
    """An answer without what differs between two answers in any case."""
    if isinstance(value, dict):
        return {
            key: steady(each)
            for key, each in value.items()
            if key not in _VARYING and not key.endswith("_duration")
        }
    return [steady(each) for each in value] if isinstance(value, list) else value


def events_of(response: httpx.Response) -> list[Any]:
    lines = (line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


Fold = Callable[[httpx.Response], Any]


def whole(response: httpx.Response) -> Any:
    return steady(response.json())


def fold_chunks(response: httpx.Response) -> Any:
    """The stream of a chat or completion as one answer, with the usage in its last chunk."""
    answer: dict[str, Any] = {"text": "", "reasoning": "", "logprobs": [], "calls": {}}
    for chunk in events_of(response):
        answer["usage"] = chunk["usage"]
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            answer["text"] += choice.get("text") or delta.get("content") or ""
            answer["reasoning"] += delta.get("reasoning_content") or ""
            answer["finish_reason"] = choice["finish_reason"]
            logprobs = choice["logprobs"] or {}
            if "tokens" in logprobs:
                columns = [column for column in logprobs.values() if column is not None]
                answer["logprobs"] += zip(*columns, strict=True)
            answer["logprobs"] += logprobs.get("content", ())
            for call in delta.get("tool_calls", ()):
                known = answer["calls"].setdefault(call["index"], ["", ""])
                known[0] += call["function"].get("name") or ""
                known[1] += call["function"]["arguments"]
    return answer


def fold_responses(response: httpx.Response) -> Any:
    """The last event of a stream of the Responses API has the answer; deltas say the same."""
    events = events_of(response)
    deltas: dict[tuple[str, int], str] = {}
    logprobs = []
    for event in events:
        if event["type"].endswith(".delta"):
            place = event["type"], event["output_index"]
            deltas[place] = deltas.get(place, "") + event["delta"]
            logprobs += event.get("logprobs", ())
    return steady(events[-1]["response"]), deltas, logprobs


def fold_messages(response: httpx.Response) -> Any:
    blocks: dict[int, list[str]] = {}
    end = {}
    for event in events_of(response):
        if event["type"] == "content_block_start":
            blocks[event["index"]] = [event["content_block"]["type"], ""]
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            text = delta.get("text") or delta.get("partial_json") or delta.get("thinking") or ""
            blocks[event["index"]][1] += text
        elif event["type"] == "message_delta":
            end = steady(event)
    return blocks, end


def fold_lines(response: httpx.Response) -> Any:
    answer: dict[str, Any] = {"text": "", "thinking": "", "calls": [], "logprobs": []}
    for part in map(json.loads, response.text.splitlines()):
        message = part.get("message", part)
        answer["text"] += message.get("content", "") + message.get("response", "")
        answer["thinking"] += message.get("thinking", "")
        answer["calls"] += steady(message.get("tool_calls", []))
        answer["logprobs"] += part.get("logprobs", [])
        answer["end"] = {key: part.get(key) for key in ("done_reason", "eval_count", "prompt_eval_count")}
    return answer


def chat(asked: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [USER], "max_tokens": 400, **asked}


def completions(asked: dict[str, Any]) -> dict[str, Any]:
    body = {"prompt": "hello", "max_tokens": 400, "n": 2, **asked}
    if "logprobs" in asked:
        body["logprobs"] = body.pop("top_logprobs", 0)
    return body


def responses(asked: dict[str, Any]) -> dict[str, Any]:
    body = {"input": "hello", "max_output_tokens": asked.get("max_tokens", 400)}
    if "tools" in asked:
        body["tools"] = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]
        body |= {name: asked[name] for name in ("tool_choice", "parallel_tool_calls") if name in asked}
    if "logprobs" in asked:
        body |= {
            "include": ["message.output_text.logprobs"],
            "top_logprobs": asked.get("top_logprobs", 0),
        }
    return body


def messages(asked: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "bytes", "messages": [USER], "max_tokens": asked.get("max_tokens", 400)}
    if "tools" in asked:
        body["tools"] = [{"name": "weather", "input_schema": PARAMETERS}]
        body["tool_choice"] = {
            "type": "any" if "tool_choice" in asked else "auto",
            "disable_parallel_tool_use": "parallel_tool_calls" in asked,
        }
    if "stop" in asked:
        body["stop_sequences"] = asked["stop"]
    return body


def ollama(asked: dict[str, Any]) -> dict[str, Any]:
    options = {"num_predict": asked.get("max_tokens", 400), "stop": asked.get("stop", [])}
    copied = {name: asked[name] for name in ("tools", "logprobs", "top_logprobs") if name in asked}
    return {"model": "bytes", "messages": [USER], "options": options, **copied}


DIALECTS: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]], Fold]] = {
    "chat": ("/v1/chat/completions", chat, fold_chunks),
    "completions": ("/v1/completions", completions, fold_chunks),
    "responses": ("/v1/responses", responses, fold_responses),
    "messages": ("/v1/messages", messages, fold_messages),
    "ollama": ("/api/chat", ollama, fold_lines),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_groups_change_no_answer(dialect: str, stream: bool, case: str) -> None:
    template, text, asked = CASES[case]
    path, body_of, fold = DIALECTS[dialect]
    body = body_of(
        {name: value for name, value in asked.items() if dialect != "completions" or name != "tools"}
    )
    body["stream"] = stream
    if stream and dialect in ("chat", "completions"):
        body["stream_options"] = {"include_usage": True}
        body.pop("n", None)
    engine = scripted(text, template=template)
    script = engine.script
    assert script is not None
    async with direct_client(engine) as client:
        alone = await client.post(path, json=body, timeout=60)
        assert alone.status_code == 200, alone.text
        expected = fold(alone) if stream else whole(alone)
        for name, sizes in GROUPINGS.items():
            engine.script = grouped(script, sizes)
            answer = await client.post(path, json=body, timeout=60)
            assert (fold(answer) if stream else whole(answer)) == expected, name


@pytest.mark.parametrize(
    "case", ["plain", "stop across tokens", "max tokens", "thoughts", "one call", "calls"]
)
def test_groups_change_no_answer_over_a_websocket(case: str) -> None:
    template, text, asked = CASES[case]
    engine = scripted(text, template=template)
    script = engine.script
    assert script is not None
    app = create_app(Gateway(engine, GatewayConfig()), ServerConfig())

    def answer() -> Any:
        parts: dict[str, str] = {}
        with TestClient(app).websocket_connect("/v1/stream") as socket:
            socket.send_text(json.dumps({"id": "1", **chat(asked)}))
            while True:
                message = json.loads(socket.receive_text())
                if "usage" in message:
                    return parts, steady(message)
                for key in ("token", "reasoning"):
                    parts[key] = parts.get(key, "") + message.get(key, "")
                for call in message.get("tool_calls", ()):
                    place = f"call {call['index']}"
                    parts[place] = parts.get(place, "") + (call.get("name") or "") + call["arguments"]

    expected = answer()
    for name, sizes in GROUPINGS.items():
        engine.script = grouped(script, sizes)
        assert answer() == expected, name


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_groups_hide_the_same_text(stream: bool) -> None:
    """Of a stream that a guard has cut, only what the reader sees is the same: the engine may be ahead of it."""
    engine = scripted("I call 4111 1111 1111 1111, by nightfall, or later.")
    script = engine.script
    assert script is not None
    gateway = Gateway(engine, GatewayConfig())
    rules = [{"guard": "pii"}, {"guard": "blocklist", "terms": ["nightfall"]}]
    gateway.guards.apply(guard_settings({"policies": {"p": {"rules": rules}}, "default_policy": "p"}))
    body = {**chat({}), "stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
    async with direct_client(engine, gateway) as client:
        for name, sizes in {"alone": always(1), **GROUPINGS}.items():
            engine.script = grouped(script, sizes)
            answer = await client.post("/v1/chat/completions", json=body, timeout=60)
            if stream:
                shown = fold_chunks(answer)
                assert shown["text"] == "I call [CREDIT_CARD], by ", name
            else:
                (shown,) = answer.json()["choices"]
                assert shown["message"]["content"] == "I call [CREDIT_CARD], by ", name
            assert shown["finish_reason"] == "content_filter", name


@pytest.mark.parametrize("num_before", range(1, 7))
async def test_an_answer_goes_on_elsewhere_behind_any_token_of_a_group(num_before: int) -> None:
    """A stop string begins at one replica and ends at the other one, inside of a group."""
    text = b"abEND, and more"
    fakes = FakeReplicas()
    fleet = Fleet(seed=0, connect=fakes.connect)
    fleet.update([member("one"), member("two")])
    gateway = Gateway(fleet, GatewayConfig())
    sampling = SamplingOptions(stop=("END",), logprobs=0, max_tokens=50)
    answer = await gateway.submit(GenerationRequest(prompts=(TextPrompt("x"),), sampling=sampling))
    (request_id,) = next(fake.requests for fake in fakes.by_id.values() if fake.requests)

    def tell(replica: str, tokens: bytes) -> None:
        logprobs = tuple(TokenLogprobs(-float(token), (), ()) for token in tokens)
        fakes[replica].tell_events((TokenEvent(request_id, tuple(tokens), logprobs),))

    first = fakes.holder_of(request_id)
    tell(first, text[:num_before])
    if num_before < 5:  # else the first replica has told the whole stop string
        fakes[first].fail(EngineUnavailable("gone"))
        second = fakes.holder_of(request_id)
        assert bytes(fakes[second].requests[request_id].output_token_ids) == text[:num_before]
        tell(second, text[num_before:])
    (delta,) = await answer.collect()
    assert (delta.text, delta.stop_sequence, delta.finish_reason) == ("ab", "END", FinishReason.STOP)
    assert [detail.data for detail in delta.details] == [b"a", b"b"]
    assert answer.usage.completion_tokens == 5
    assert not any(fake.requests for fake in fakes.by_id.values()), "the engine was told"
    fleet.close()


class Rows:
    """Implements `accounts.Ledger`."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def begin(self, claim: Claim) -> None: ...

    def settle(self, claim: Claim, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


PIECES = st.text(st.sampled_from("abcé"), max_size=30)


@settings(deadline=None, max_examples=100)
@given(
    text=PIECES,
    stop=st.lists(st.text(st.sampled_from("abcé"), min_size=1, max_size=4), max_size=3, unique=True),
    max_tokens=st.integers(1, 40),
    logprobs=st.sampled_from([None, 0, 2]),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=40),
)
def test_any_grouping_gives_the_same_text_usage_and_row(
    text: str, stop: list[str], max_tokens: int, logprobs: int | None, sizes: list[int]
) -> None:
    def answer(sizes: Sequence[int]) -> Any:
        def cycle() -> Iterator[int]:
            while True:
                yield from sizes

        rows = Rows()
        engine = FakeEngine(grouped(script_text(text), cycle), READY)
        gateway = Gateway(engine, GatewayConfig(), accounts=Accounts(ledger=rows))
        sampling = SamplingOptions(stop=tuple(stop), max_tokens=max_tokens, logprobs=logprobs)

        async def run() -> Any:
            request = GenerationRequest(prompts=(TextPrompt("x"),), sampling=sampling)
            return await (await gateway.submit(request)).collect()

        deltas = asyncio.run(run())
        (row,) = rows.outcomes
        counted = gateway.metrics.of("bytes")
        return (
            deltas,
            row.usage,
            row.finish_reasons,
            counted.generation_tokens,
            sum(counted.request_generation_tokens.counts),
            counted.request_generation_tokens.total,
        )

    assert answer(sizes) == answer([1])


READY = engine_ready(model_card(), 128)
