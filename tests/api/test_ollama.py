"""Ollama's API as the real `ollama` client sees it, and what the client never sends."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import ollama
import pytest

from penstock.api.ollama.requests import OllamaMessage
from penstock.api.ollama.requests import _chat_messages as ollama_chat_messages
from penstock.core.errors import PenstockError
from penstock.core.gateway_config import ServerConfig
from penstock.core.plan import TokenEvent
from penstock.core.request import Grammar, Request, Tier
from tests.api.conftest import Serve, Served, direct_client
from tests.api.scripted import THINKING_TEMPLATE, TOOL_TEMPLATE, prompt_of, scripted
from tests.api.test_embeddings import close, embedding_engine, vector_of
from tests.gateway.fake_engine import FakeEngine, script_text

USER = {"role": "user", "content": "Hello"}
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
COUNTERS = ("total_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")


def client(served: Served, key: str | None = None) -> ollama.Client:
    return ollama.Client(served.url, headers={"Authorization": f"Bearer {key}"} if key else None)


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


@pytest.mark.parametrize("name", ["bytes", "bytes:latest"])
def test_chat(serve: Serve, name: str) -> None:
    answer = client(serve(scripted("Hello there"))).chat(name, [USER])
    assert (answer.model, answer.done, answer.done_reason) == (name, True, "stop")
    assert (answer.message.role, answer.message.content) == ("assistant", "Hello there")
    assert answer.message.tool_calls is None
    assert answer.eval_count == 12
    assert all(answer[counter] > 0 for counter in COUNTERS)
    assert answer.load_duration == 0


def test_chat_stream(serve: Serve) -> None:
    parts = list(client(serve(scripted("Hello there"))).chat("bytes", [USER], stream=True))
    assert "".join(part.message.content or "" for part in parts) == "Hello there"
    assert len(parts) > 1
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[0].eval_count is None
    assert parts[-1].done_reason == "stop"
    assert parts[-1].eval_count == 12
    assert all(parts[-1][counter] > 0 for counter in COUNTERS)


def test_generate(serve: Serve) -> None:
    engine = scripted(prompt_of)
    ask = client(serve(engine)).generate
    assert ask("bytes", "Hello").response == "<|user|>Hello<|end|><|assistant|>"
    assert ask("bytes", "Hello", system="Be short.").response == (
        "<|system|>Be short.<|end|><|user|>Hello<|end|><|assistant|>"
    )
    assert ask("bytes", "As it is", raw=True).response == "As it is"
    parts = list(ask("bytes", "Hello", stream=True))
    assert "".join(part.response or "" for part in parts) == "<|user|>Hello<|end|><|assistant|>"
    assert parts[-1].done
    assert parts[-1].prompt_eval_count == len(engine.added[-1].prompt_token_ids)


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_without_a_prompt_loads_the_model(serve: Serve, streams: bool) -> None:
    engine = scripted("never")
    api = client(serve(engine))
    answers = [
        api.generate("bytes", stream=streams),
        api.chat("bytes", [], stream=streams),
        api.generate("bytes", keep_alive=0, stream=streams),
    ]
    reasons = [(list(answer)[-1] if streams else answer)["done_reason"] for answer in answers]
    assert reasons == ["load", "load", "unload"]
    assert not engine.added


def test_options(serve: Serve) -> None:
    engine = scripted("abc. def")
    api = client(serve(engine))
    options = {
        "num_predict": 30.0,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.7,
        "min_p": 0.1,
        "seed": 3,
        "repeat_penalty": 1.25,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "stop": ["."],
        "num_ctx": 128,
        "unheard_of": True,
    }
    assert api.chat("bytes", [USER], options=options).message.content == "abc"
    sampling = engine.added[-1].sampling
    assert sampling.max_tokens == 30
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.7, 0.1)
    assert (sampling.seed, sampling.repetition_penalty, sampling.stop) == (3, 1.25, (".",))
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    assert sampling.repeat_last_n == 64
    api.chat("bytes", [USER], options={"repeat_penalty": 1.1, "repeat_last_n": 20, "mirostat": 0, "tfs_z": 1})
    assert engine.added[-1].sampling.repeat_last_n == 20

    api.chat("bytes", [USER])
    usual = engine.added[-1].sampling
    assert (usual.temperature, usual.top_k, usual.top_p) == (0.8, 40, 0.9)
    assert (usual.min_p, usual.repetition_penalty, usual.repeat_last_n) == (0.0, 1.0, None)
    unlimited = {"num_predict": -1, "top_k": 0, "seed": -1, "temperature": 0}
    api.chat("bytes", [USER], options=unlimited)
    sampling = engine.added[-1].sampling
    assert sampling.max_tokens == usual.max_tokens
    assert (sampling.top_k, sampling.temperature) == (None, 0)


def test_options_of_the_other_dialects(serve: Serve) -> None:
    engine = scripted("abc")
    options = {"xtc_probability": 0.5, "logit_bias": {"5": 1.5}, "bad_words": ["no"], "dry_multiplier": 0.8}
    more = {"min_tokens": 2, "priority": -1, "top_n_sigma": 1.5, "guided_regex": "abc?", "num_batch": 4}
    client(serve(engine)).chat("bytes", [USER], options=options | more)
    (asked,) = engine.added
    sampling = asked.sampling
    assert (sampling.xtc_probability, sampling.logit_bias, sampling.min_tokens) == (0.5, {5: 1.5}, 2)
    assert (sampling.bad_words, sampling.top_n_sigma) == ((tuple(b"no"), tuple(b" no")), 1.5)
    assert sampling.dry is not None
    assert sampling.grammar is not None
    assert asked.tier is Tier.PRIORITY


def test_num_predict_ends_an_answer(serve: Serve) -> None:
    answer = client(serve(scripted("Hello there"))).chat("bytes", [USER], options={"num_predict": 5})
    assert (answer.message.content, answer.done_reason, answer.eval_count) == ("Hello", "length", 5)


def test_format(serve: Serve) -> None:
    engine = scripted('{"age": 3}')
    api = client(serve(engine))
    assert api.chat("bytes", [USER], format="json").message.content == '{"age": 3}'
    assert engine.added[-1].sampling.grammar == Grammar("json")
    api.generate("bytes", "How old?", format=SCHEMA)
    grammar = engine.added[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    assert "age" in grammar.text


@pytest.mark.parametrize("streams", [False, True])
def test_tools(serve: Serve, streams: bool) -> None:
    engine = scripted(TWO_CALLS, template=TOOL_TEMPLATE)
    api = client(serve(engine))
    answer = api.chat("bytes", [USER], tools=[WEATHER], stream=streams)
    parts = list(answer) if streams else [answer]
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", {"city": "Paris"}),
        ("weather", {"city": "Rome"}),
    ]
    assert "".join(part.message.content or "" for part in parts).strip() == "Let me see."
    assert parts[-1].done_reason == "stop"

    turns = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
        {"role": "tool", "tool_name": "weather", "content": "rainy"},
    ]
    assert api.chat("bytes", turns, tools=[WEATHER]).done
    prompt = prompt_of(engine.added[-1])
    assert '"city": "Paris"' in prompt
    assert prompt.index("sunny") < prompt.index("rainy")


def test_a_call_that_was_cut_off_is_left_out(serve: Serve) -> None:
    engine = scripted(TWO_CALLS, template=TOOL_TEMPLATE)
    limit = {"num_predict": TWO_CALLS.index("Rome")}
    answer = client(serve(engine)).chat("bytes", [USER], tools=[WEATHER], options=limit)
    assert [call.function.arguments for call in answer.message.tool_calls or ()] == [{"city": "Paris"}]
    assert answer.done_reason == "length"


async def test_results_answer_the_first_call_of_their_tool() -> None:
    def called(name: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {}}}

    wire = msgspec.convert(
        [
            {"role": "assistant", "tool_calls": [called("a"), called("b"), called("b"), called("a")]},
            {"role": "tool", "tool_name": "b"},
            {"role": "tool", "tool_name": "unknown"},
            {"role": "tool", "tool_name": "a"},
            {"role": "tool"},
            {"role": "tool", "tool_name": "b"},
        ],
        list[OllamaMessage],
    )
    turns = ollama_chat_messages(wire)
    assert [turn.tool_call_id for turn in turns[1:]] == [
        "call_0_1",
        "call_0_0",
        "call_0_3",
        "call_0_2",
        "call_unknown",
    ]


@pytest.mark.parametrize("streams", [False, True])
def test_thinking(serve: Serve, streams: bool) -> None:
    engine = scripted("First\n</think>\n\nthen this.", template=THINKING_TEMPLATE)
    api = client(serve(engine))
    answer = api.chat("bytes", [USER], think=True, stream=streams)
    parts = list(answer) if streams else [answer]
    assert "".join(part.message.thinking or "" for part in parts).strip() == "First"
    assert "".join(part.message.content or "" for part in parts).strip() == "then this."
    assert api.generate("bytes", "Hello", think="low").thinking
    api.chat("bytes", [USER], think=False)
    assert "<think>" not in prompt_of(engine.added[-1])


def test_a_model_that_does_not_think_takes_think(serve: Serve) -> None:
    answer = client(serve(scripted("Hi"))).chat("bytes", [USER], think=True)
    assert (answer.message.content, answer.message.thinking) == ("Hi", None)


def test_logprobs(serve: Serve) -> None:
    answer = client(serve(scripted("Hi"))).chat("bytes", [USER], logprobs=True, top_logprobs=2)
    assert answer.logprobs is not None
    assert [entry.token for entry in answer.logprobs] == ["H", "i"]
    assert all(len(entry.top_logprobs or ()) == 2 for entry in answer.logprobs)


def test_models(serve: Serve) -> None:
    api = client(serve(scripted("Hi", template=TOOL_TEMPLATE)))
    (listed,) = api.list().models
    assert listed.model == "bytes"
    assert listed.modified_at is not None
    assert len(listed.digest or "") == 64
    (loaded,) = api.ps().models
    assert (loaded.model, loaded.context_length) == ("bytes", 8192)
    assert loaded.expires_at is not None
    shown = api.show("bytes")
    assert shown.template == TOOL_TEMPLATE
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo is not None
    architecture = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{architecture}.context_length"] == 8192
    assert api.pull("bytes").status == "success"


def test_embeddings(serve: Serve) -> None:
    api = client(serve(embedding_engine(max_model_len=64)))
    answer = api.embed("bytes", ["one", "another"])
    assert all(
        close(vector, vector_of(text.encode()))
        for vector, text in zip(answer.embeddings, ("one", "another"), strict=True)
    )
    assert answer.prompt_eval_count == 10
    assert (answer.total_duration or 0) > 0
    assert close(api.embed("bytes", "one").embeddings[0], vector_of(b"one"))
    assert close(api.embeddings("bytes", "one").embedding, vector_of(b"one"))
    assert len(api.embed("bytes", "one", dimensions=3).embeddings[0]) == 3


def test_long_inputs_are_cut_unless_told_otherwise(serve: Serve) -> None:
    api = client(serve(embedding_engine(max_model_len=64)))
    text = "x" * 1000
    assert close(api.embed("bytes", text).embeddings[0], vector_of(b"x" * 63))
    for _ in range(2):  # the second time, the cut text's vector is in the cache
        with pytest.raises(ollama.ResponseError, match="63 tokens") as caught:
            api.embed("bytes", text, truncate=False)
        assert caught.value.status_code == 400


def test_keys(serve: Serve) -> None:
    served = serve(scripted("Hi"), server=ServerConfig(api_key="secret"))
    assert client(served, "secret").chat("bytes", [USER]).message.content == "Hi"
    with pytest.raises(ollama.ResponseError) as caught:
        client(served, "wrong").chat("bytes", [USER])
    assert caught.value.status_code == 401
    assert httpx.get(f"{served.url}/api/version").json()["version"]
    assert httpx.head(served.url).status_code == 200


def test_errors_of_the_client(serve: Serve) -> None:
    api = client(serve(scripted("Hi")))
    with pytest.raises(ollama.ResponseError, match="'nothing' is not served") as caught:
        api.chat("nothing", [USER])
    assert caught.value.status_code == 404
    for name in ("nothing", "nothing:latest"):
        with pytest.raises(ollama.ResponseError, match="not served"):
            api.show(name)
    with pytest.raises(ollama.ResponseError, match="not served"):
        api.pull("nothing")


def test_an_error_in_a_stream(serve: Serve) -> None:
    def script(request: Request) -> list[TokenEvent | PenstockError]:
        return [*script_text("Hel")(request)[:3], PenstockError("The engine is gone.")]

    stream = client(serve(FakeEngine(script))).chat("bytes", [USER], stream=True)
    assert next(stream).message.content == "H"
    with pytest.raises(ollama.ResponseError, match=r"The engine is gone\."):
        list(stream)


def test_a_client_that_leaves_cancels_its_request(serve: Serve) -> None:
    served = serve(FakeEngine())  # which says nothing by itself
    served.ask_and_leave("/api/chat", {"model": "bytes", "messages": [USER]})
    served.wait_until(lambda: bool(served.engine.aborted))


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("chat", {"messages": [{"role": "pirate", "content": ""}]}, "messages[0].role"),
        ("chat", {"messages": [{**USER, "images": ["aGk="]}]}, "takes text only"),
        ("chat", {"messages": [{**USER, "tool_calls": [{"function": {"name": "f"}}]}]}, "Only an assistant"),
        ("chat", {"messages": [USER], "think": "perhaps"}, "think is 'perhaps'"),
        ("chat", {"messages": [USER], "format": "yaml"}, "format is 'yaml'"),
        ("chat", {"messages": [USER], "format": {"type": "nonsense"}}, ""),
        ("chat", {"messages": [USER], "options": {"temperature": "hot"}}, "options"),
        ("chat", {"messages": [USER], "options": {"num_predict": 1.5}}, "options.num_predict"),
        ("chat", {"messages": [USER], "options": {"num_predict": 10**400}}, "num_predict"),
        ("chat", {"messages": [USER], "options": {"top_k": 1e300}}, "top_k"),
        ("chat", {"messages": [USER], "options": {"seed": 10**30}}, "seed"),
        ("chat", {"messages": [USER], "options": {"repeat_penalty": -1}}, "repetition_penalty"),
        ("chat", {"messages": [USER], "options": {"mirostat": 2}}, "mirostat"),
        ("chat", {"messages": [USER], "options": {"tfs_z": 0.5}}, "tfs_z"),
        ("chat", {"messages": [USER], "options": {"repeat_last_n": -2}}, "repeat_last_n"),
        ("chat", {"messages": [USER], "options": []}, "options"),
        ("chat", {"messages": [USER], "tools": [{"type": "magic", "function": {"name": "f"}}]}, "magic"),
        ("chat", {"messages": "hello"}, "messages"),
        ("chat", {"messages": [USER], "logprobs": True, "top_logprobs": 99}, "logprobs"),
        ("generate", {"prompt": "x", "suffix": "y"}, "no tokens to fill in the middle"),
        ("generate", {"prompt": "x", "images": ["aGk="]}, "takes text only"),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template is not supported"),
        ("generate", {"prompt": "x", "context": [1]}, "/api/chat"),
        ("generate", {"prompt": "x", "raw": True, "system": "s"}, "raw"),
        ("generate", {"prompt": 3}, "prompt"),
        ("generate", {"prompt": "x" * 9000}, "8192"),
        ("embed", {}, "input"),
        ("embed", {"input": []}, "input"),
        ("embed", {"input": [1, 2]}, "input"),
        ("embeddings", {"prompt": ""}, "input"),
        ("show", {}, "model is missing"),
    ],
)
async def test_bad_input(path: str, body: dict[str, Any], says: str) -> None:
    engine = embedding_engine(max_model_len=8192) if path.startswith("embed") else scripted("Hi")
    async with direct_client(engine) as http:
        response = await http.post(f"/api/{path}", json=body)
    assert response.status_code == 400, response.text
    (error,) = response.json().values()
    assert says in error
    assert not engine.added


async def test_nothing_but_json_and_known_paths() -> None:
    async with direct_client(scripted("Hi"), max_body_bytes=1000) as http:
        for response, status in [
            (await http.post("/api/chat", content=b"{"), 400),
            (await http.post("/api/chat", content=b"[" * 900), 400),
            (await http.post("/api/chat", content=b"x" * 2000), 413),
            (await http.get("/api/chat"), 405),
            (await http.post("/api/push", json={"model": "bytes"}), 404),
        ]:
            assert response.status_code == status
            assert list(response.json()) == ["error"]


@pytest.mark.parametrize("streams", [False, True])
async def test_what_is_not_done_as_asked_is_told(streams: bool) -> None:
    body = {
        "messages": [USER],
        "stream": streams,
        "options": {"num_ctx": 9, "num_gpu": None, "num_predict": 99_999},
    }
    async with direct_client(scripted("Hi")) as http:
        response = await http.post("/api/chat", json=body)
    last = (lines(response) if streams else [response.json()])[-1]
    assert [warning["code"] for warning in last["warnings"]] == ["options_ignored", "max_tokens_lowered"]
    assert last["warnings"][0]["message"] == "These options have no effect here: num_ctx."
    assert "num_ctx" in response.headers["warning"]


async def test_lines() -> None:
    """As a client in any language sees them: one JSON object on each line, and no field that is null."""
    async with direct_client(scripted("Hi")) as http:
        parts = lines(await http.post("/api/generate", json={"model": "bytes", "prompt": "Hello"}))
    assert [part["done"] for part in parts] == [False, False, True]
    assert set(parts[0]) == {"model", "created_at", "response", "done"}
    assert set(parts[-1]) == {*parts[0], "done_reason", "load_duration", *COUNTERS}
    assert all(part["created_at"].endswith("Z") for part in parts)
