"""What Anthropic's fields become: cache marks where the client put them, and usage that adds up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from penstock.api.anthropic.endpoints import message_usage
from penstock.api.anthropic.requests import GUARDED_FIELDS, MessagesRequest
from penstock.api.http.parsing import BodyDecoder
from penstock.core.errors import InvalidRequest
from penstock.core.request import Tier
from penstock.gateway.prompts import CacheMark, ChatMessage, ChatPrompt, GenerationRequest, TextPart, Usage
from tests.api.conftest import direct_client
from tests.gateway.fake_engine import FakeEngine

FIVE_MINUTES, HOUR = CacheMark(300.0), CacheMark(3600.0)
SHORT = {"type": "ephemeral"}
LONG = {"type": "ephemeral", "ttl": "1h"}
USER = {"role": "user", "content": "hi"}
_decoder = BodyDecoder(MessagesRequest, GUARDED_FIELDS)


def request_from(**fields: Any) -> GenerationRequest:
    body = {"model": "m", "max_tokens": 10, "messages": [USER]} | fields
    return _decoder.decode(json.dumps(body).encode()).to_generation()


def prompt(**fields: Any) -> ChatPrompt:
    (prompt,) = request_from(**fields).prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def text(words: str, control: dict[str, str] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": words} | ({"cache_control": control} if control else {})


def test_marks_stand_where_the_client_put_them() -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}, "cache_control": LONG}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}, "cache_control": SHORT}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "ok", "cache_control": SHORT}
    made = prompt(
        tools=[tool],
        system=[text("a"), text("b", LONG)],
        messages=[
            {"role": "user", "content": [text("c", SHORT), text("d")]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    )
    assert made.tools[0].cache == HOUR
    system, user, assistant, answer = made.messages
    assert system.content == (TextPart("a"), TextPart("b", HOUR))
    assert user.content == (TextPart("c", FIVE_MINUTES), TextPart("d"))
    assert assistant.tool_calls[0].cache == FIVE_MINUTES
    assert (answer.role, answer.cache) == ("tool", FIVE_MINUTES)


def test_a_mark_on_the_request_stands_at_its_end() -> None:
    assert prompt(cache_control=LONG).messages[-1].cache == HOUR
    own = prompt(cache_control=LONG, messages=[{"role": "user", "content": [text("x", SHORT)]}])
    assert own.messages[-1].cache is None
    assert own.messages[-1].content == (TextPart("x", FIVE_MINUTES),)


def test_without_marks_content_is_plain_text() -> None:
    made = prompt(system=[text("a")], messages=[{"role": "user", "content": [text("b")]}])
    assert [message.content for message in made.messages] == ["a", "b"]


def test_turns_of_one_role_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining two at a time copied the earlier turns again for each turn."""
    num_read = 0
    parts_of = ChatMessage.parts.fget  # type: ignore[attr-defined]

    def counted(message: ChatMessage) -> Sequence[TextPart]:
        nonlocal num_read
        parts: Sequence[TextPart] = parts_of(message)
        num_read += len(parts)
        return parts

    monkeypatch.setattr(ChatMessage, "parts", property(counted))
    (made,) = prompt(messages=[{"role": "user", "content": f"{number}"} for number in range(500)]).messages
    assert made.content == tuple(TextPart(f"{number}") for number in range(500))
    assert num_read == 500


def test_what_surrounds_the_prompt() -> None:
    made = request_from(metadata={"user_id": "u1"}, stop_sequences=["a", "b"], temperature=0)
    assert (made.user, made.endpoint, made.sampling.stop, made.sampling.temperature) == (
        "u1",
        "messages",
        ("a", "b"),
        0,
    )
    assert (made.tier, request_from(service_tier="auto").tier) == (Tier.DEFAULT, Tier.PRIORITY)


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, None),
        ({"type": "enabled", "budget_tokens": 1024}, True),
    ],
)
def test_thinking(thinking: dict[str, Any] | None, thinks: bool | None) -> None:
    made = prompt(thinking=thinking, max_tokens=2000)
    assert (made.thinks, made.max_thinking_tokens) == (thinks, 1024 if thinks else None)


def test_input_tokens_leave_out_what_the_cache_read_and_wrote() -> None:
    usage = Usage(
        100,
        7,
        60,
        cache_read_tokens=50,
        cache_write_5m_tokens=20,
        cache_write_1h_tokens=10,
        reasoning_tokens=3,
    )
    shown = msgspec.to_builtins(message_usage(usage, Tier.BATCH))
    assert shown == {
        "input_tokens": 20,
        "cache_creation_input_tokens": 30,
        "cache_read_input_tokens": 50,
        "cache_creation": {"ephemeral_5m_input_tokens": 20, "ephemeral_1h_input_tokens": 10},
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 3},
        "service_tier": "batch",
    }


def test_plain_text_documents_and_search_results_are_read_as_text() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "The sky is green."}
    parts = {"type": "content", "content": [text("One."), text("Two.")]}
    found = {
        "type": "search_result",
        "source": "https://a.example",
        "title": "A",
        "content": [text("Found.")],
    }
    document = {
        "type": "document",
        "source": plain,
        "title": "Sky",
        "context": "From a dream.",
        "citations": {"enabled": True},
        "cache_control": SHORT,
    }
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document, found]}
    made = prompt(
        messages=[
            {"role": "user", "content": [document, {"type": "document", "source": parts}, text("Colour?")]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    )
    sky = "<document>\n<title>Sky</title>\n<context>From a dream.</context>\nThe sky is green.\n</document>"
    assert made.messages[0].content == (
        TextPart(sky, FIVE_MINUTES),
        TextPart("<document>\nOne.\nTwo.\n</document>"),
        TextPart("Colour?"),
    )
    source = "<source>https://a.example</source>"
    search_result = f"<search_result>\n<title>A</title>\n{source}\nFound.\n</search_result>"
    assert made.messages[2].content == f"{sky}\n{search_result}"


@pytest.mark.parametrize(
    ("kind", "name", "required"),
    [
        ("bash_20250124", "bash", []),
        ("text_editor_20250728", "str_replace_based_edit_tool", ["command", "path"]),
        ("text_editor_20241022", "str_replace_editor", ["command", "path"]),
        ("memory_20250818", "memory", ["command"]),
        ("computer_20250124", "computer", ["action"]),
    ],
)
def test_tools_that_clients_run_get_a_schema(kind: str, name: str, required: list[str]) -> None:
    (tool,) = prompt(tools=[{"type": kind, "name": name, "cache_control": SHORT}]).tools
    assert (tool.name, tool.parameters["required"], tool.cache) == (name, required, FIVE_MINUTES)
    assert tool.description
    assert tool.parameters["properties"].keys() >= set(required)


def test_edits_of_the_context_are_named_and_not_made() -> None:
    clear = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 10}}
    thoughts = {"type": "clear_thinking_20251015", "keep": "all"}
    made = request_from(context_management={"edits": [clear, clear, thoughts, {"type": "x" * 999}]})
    assert [warning.param for warning in made.warnings] == ["context_management"] * 2
    assert "'clear_tool_uses_20250919'" in made.warnings[0].message
    assert all(len(warning.message) < 200 for warning in made.warnings)
    assert not request_from(context_management={"edits": [thoughts]}).warnings
    assert not request_from(context_management=None).warnings
    with pytest.raises(InvalidRequest, match="context_management"):
        request_from(context_management={"edits": ["clear"]})


async def test_an_unknown_path_answers_in_the_shape_of_the_client() -> None:
    async with direct_client(FakeEngine()) as client:
        plain = await client.get("/v1/nothing")
        answer = await client.get("/v1/nothing", headers={"anthropic-version": "2023-06-01"})
    assert (plain.status_code, answer.status_code) == (404, 404)
    assert plain.json()["error"]["message"] == answer.json()["error"]["message"]
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", "not_found_error")


async def test_a_count_names_edits_that_were_skipped() -> None:
    body = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}]}
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    async with direct_client(FakeEngine()) as client:
        plain = (await client.post("/v1/messages/count_tokens", json=body)).json()
        edited = (
            await client.post("/v1/messages/count_tokens", json=body | {"context_management": edits})
        ).json()
    assert plain.keys() == {"input_tokens"}
    assert edited["input_tokens"] == plain["input_tokens"]
    assert "clear_tool_uses_20250919" in edited["warnings"][0]["message"]
