"""Requests in the words of other servers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.core.errors import InvalidRequest
from penstock.core.grammar_text import lenient
from penstock.core.identity import Principal
from penstock.core.request import Grammar
from penstock.gateway.external.models import calls_for
from penstock.gateway.prompts import (
    CacheMark,
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    SamplingOptions,
    TextPart,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolCall,
    ToolChoice,
)

USER = ChatMessage("user", "Hello")
WEATHER = Tool("weather", "Tells the weather.", {"type": "object"}, strict=True)


def bodies(
    *prompts: Prompt, max_tokens: int | None = None, n: int = 1, **sampling: Any
) -> list[dict[str, Any]]:
    request = GenerationRequest(
        prompts=prompts,
        sampling=SamplingOptions(**sampling),
        n=n,
        principal=Principal(workspace_id="w"),
        user="somebody",
        prompt_cache_key="session",
    )
    calls = calls_for("r", request, model="m", max_tokens=max_tokens, context=None, region="eu")
    for number, call in enumerate(calls):
        assert (call.id, call.model, call.tenant) == (f"r-{number}", "m", "w")
        assert (call.region, call.affinity_key) == ("eu", "session")
        assert call.api == ("chat/completions" if "messages" in call.body else "completions")
        assert "somebody" not in json.dumps(call.body), "who asks is nobody else's business"
    return [call.without_cache_marks().body if call.has_cache_marks else call.body for call in calls]


def body(prompt: Prompt, **sampling: Any) -> dict[str, Any]:
    (only,) = bodies(prompt, **sampling)
    return only


def chat(*messages: ChatMessage, **fields: Any) -> ChatPrompt:
    return ChatPrompt(messages=messages or (USER,), **fields)


def test_a_plain_chat_says_no_more_than_it_must() -> None:
    assert body(chat()) == {
        "messages": [{"role": "user", "content": "Hello"}],
    }


def test_marks_of_prompt_caching_are_for_servers_that_take_them() -> None:
    hour, short = CacheMark(3600.0), CacheMark(300.0)
    prompt = chat(
        ChatMessage("system", (TextPart("One.", hour), TextPart("Two."))),
        ChatMessage("user", "Hello", cache=short),
        ChatMessage("user", (TextPart("a"), TextPart("b")), cache=short),
        tools=(Tool("weather", cache=short),),
    )
    request = GenerationRequest(prompts=(prompt,), sampling=SamplingOptions())
    (call,) = calls_for("r", request, model="m", max_tokens=None, context=None, region="")
    assert call.has_cache_marks
    system, user, last = (message["content"] for message in call.body["messages"])
    assert system[0]["cache_control"] == {"type": "ephemeral", "ttl": "1h"}
    assert "cache_control" not in system[1]
    assert user == [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]
    assert [("cache_control" in part) for part in last] == [False, True]
    assert call.body["tools"][0]["cache_control"] == {"type": "ephemeral"}
    plain = call.without_cache_marks().body
    assert "cache_control" not in json.dumps(plain)
    assert [message["content"] for message in plain["messages"]] == ["One.\nTwo.", "Hello", "a\nb"]


def test_every_sampling_option_that_was_given() -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "presence_penalty": 0.2}
    given |= {"frequency_penalty": 0.3, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True}
    sent = body(
        chat(),
        **given,
        seed=7,
        stop=("a", "b"),
        stop_token_ids=(3,),
        logit_bias={5: -1.0},
        logprobs=2,
        max_tokens=9,
    )
    expected = given | {"seed": 7, "stop": ["a", "b"], "stop_token_ids": [3], "logit_bias": {"5": -1.0}}
    expected |= {"logprobs": True, "top_logprobs": 2, "max_tokens": 9}
    assert {name: sent[name] for name in expected} == expected
    assert body(TextPrompt("x"), logprobs=2)["logprobs"] == 2


def test_texts_and_tokens_are_completions() -> None:
    assert body(TextPrompt("Once"))["prompt"] == "Once"
    assert body(TokenPrompt((1, 2)))["prompt"] == [1, 2]


def test_answers_of_one_prompt_have_consecutive_seeds() -> None:
    sent = bodies(TextPrompt("a"), TextPrompt("b"), n=2, seed=5)
    assert [(each["prompt"], each["seed"]) for each in sent] == [("a", 5), ("a", 6), ("b", 5), ("b", 6)]
    assert all("seed" not in each for each in bodies(TextPrompt("a"), n=2))


def test_a_conversation_with_tools() -> None:
    call = ToolCall("c1", "weather", '{"city": "Rome"}')
    prompt = chat(
        ChatMessage("system", (TextPart("One.", CacheMark(300.0)), TextPart("Two."))),
        ChatMessage("assistant", "", tool_calls=(call,), reasoning="Hm."),
        ChatMessage("tool", "rain", tool_call_id="c1", name="weather"),
        tools=(WEATHER, Tool("now")),
        tool_choice=ToolChoice("named", "weather", parallel=False),
        thinks=False,
        template_options={"mood": "good"},
    )
    sent = body(prompt)
    assert sent["messages"] == [
        {"role": "system", "content": "One.\nTwo."},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                }
            ],
        },
        {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "c1"},
    ]
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["weather", "now"]
    assert sent["tools"][0]["function"]["strict"] is True
    assert "strict" not in sent["tools"][1]["function"]
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert sent["parallel_tool_calls"] is False
    assert sent["chat_template_kwargs"] == {"mood": "good", "enable_thinking": False}


@pytest.mark.parametrize("mode", ["auto", "none", "required"])
def test_how_tools_may_be_called(mode: Any) -> None:
    sent = body(chat(tools=(WEATHER,), tool_choice=ToolChoice(mode)))
    assert sent.get("tool_choice") == (None if mode == "auto" else mode)


def test_an_answer_that_the_client_began() -> None:
    sent = body(chat(USER, ChatMessage("assistant", "The answer is"), continues_last=True))
    assert (sent["continue_final_message"], sent["add_generation_prompt"]) == (True, False)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("grammar", "fields"),
    [
        (Grammar("json"), {"response_format": {"type": "json_object"}}),
        (
            Grammar("json_schema", json.dumps(SCHEMA)),
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        (
            Grammar("json_schema", json.dumps(lenient(SCHEMA))),
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": False},
                }
            },
        ),
        (Grammar("regex", "a+"), {"structured_outputs": {"regex": "a+"}}),
        (Grammar("choice", '["a"]'), {"structured_outputs": {"choice": ["a"]}}),
        (Grammar("ebnf", "root ::= x"), {"structured_outputs": {"grammar": "root ::= x"}}),
    ],
)
def test_what_an_answer_must_look_like(grammar: Grammar, fields: dict[str, Any]) -> None:
    sent = body(chat(), grammar=grammar)
    assert {name: sent[name] for name in fields} == fields


def test_structural_tags_cannot_be_passed_on() -> None:
    with pytest.raises(InvalidRequest, match="cannot be passed on"):
        body(chat(), grammar=Grammar("structural_tag", "{}"))


def test_prompts_that_begin_alike_have_texts_that_do() -> None:
    def text(*messages: ChatMessage) -> str:
        request = GenerationRequest(prompts=(chat(*messages, tools=(WEATHER,)),), sampling=SamplingOptions())
        return calls_for("r", request, model="m", max_tokens=None, context=None, region="")[0].text

    first = text(USER)
    assert text(USER, ChatMessage("assistant", "Hi."), USER).startswith(first)
