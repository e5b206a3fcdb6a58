"""The items of the Responses API, and the chat that they stand for.

A conversation is a flat list of items: messages, reasoning, calls and their outputs. A chat has turns: what the model
thought, said and called between two turns of others is one turn of its own.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from penstock.api.openai.answers import ChatLogprob
from penstock.core.errors import InvalidRequest
from penstock.gateway.prompts import ChatMessage, TextPart, ToolCall

ItemStatus = Literal["in_progress", "completed", "incomplete"]

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
_ROLES = frozenset({"user", "assistant", "system", "developer"})
_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_RESPONSE_OF_ITEM = re.compile(r"(?:msg|fc|ctc|rs)_(\w+)-\d+")
# The parameters that a custom tool, which takes any text, has for the model.
CUSTOM_TOOL_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class ContentPart(msgspec.Struct, omit_defaults=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None


class InputItem(msgspec.Struct, omit_defaults=True):
    """Any item that a client sends, or that a stored response holds."""

    type: str | None = None  # absent for a message
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None  # of a custom tool's call
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None


class OutputText(msgspec.Struct):
    text: str
    logprobs: list[ChatLogprob] = []
    annotations: list[Any] = []
    type: str = "output_text"


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    content: list[OutputText]
    status: ItemStatus
    role: str = "assistant"


class ReasoningText(msgspec.Struct):
    text: str
    type: str = "reasoning_text"


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    content: list[ReasoningText]
    status: ItemStatus
    summary: list[Any] = []


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class OutputCustomCall(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


def new_id(kind: str) -> str:
    return f"{_ID_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"


def response_id_of(item_id: str) -> str | None:
    """The id of the response whose output holds an item. Only items of outputs have such ids."""
    found = _RESPONSE_OF_ITEM.fullmatch(item_id)
    return None if found is None else f"resp_{found[1]}"


def custom_input_of(arguments: str) -> str:
    """The text that the model passed to a custom tool. A call that was cut off gives what was written of it."""
    try:
        return _decode_arguments(arguments).input
    except msgspec.DecodeError:
        return arguments


class _CustomArguments(msgspec.Struct):
    input: str


_decode_arguments = msgspec.json.Decoder(_CustomArguments).decode


def input_items(wire: str | list[InputItem]) -> list[InputItem]:
    """What the client sent, in the full form in which it can be listed later: with types, ids and parts."""
    items = [InputItem(role="user", content=wire)] if isinstance(wire, str) else wire
    return [_full(item) for item in items]


def _full(item: InputItem) -> InputItem:
    kind = item.type or "message"
    full = msgspec.structs.replace(item, type=kind, id=item.id or new_id(kind))
    if kind == "message":
        full.status = item.status or "completed"
        if isinstance(item.content, str):
            part_type = "output_text" if item.role == "assistant" else "input_text"
            annotations: list[Any] | None = [] if item.role == "assistant" else None
            full.content = [ContentPart(part_type, item.content, annotations=annotations)]
    return full


def messages_of(items: Iterable[InputItem], instructions: str | None) -> tuple[ChatMessage, ...]:
    chat = _Chat()
    if instructions:
        chat.messages.append(ChatMessage("system", instructions))
    for position, item in enumerate(items):
        chat.add(item, f"input[{position}]")
    chat.end_turn()
    return tuple(chat.messages)


class _Chat:
    """Gathers items into turns."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._reasoning: list[str] = []
        self._said: list[TextPart] = []
        self._calls: list[ToolCall] = []

    def add(self, item: InputItem, param: str) -> None:
        match item.type or "message":
            case "message":
                self._add_message(item, param)
            case "reasoning":
                parts = item.content if isinstance(item.content, list) else item.summary
                self._reasoning += [part.text or "" for part in parts or ()]
            case "function_call":
                self._calls.append(_call(item, item.arguments or "{}", param))
            case "custom_tool_call":
                arguments = msgspec.json.encode(_CustomArguments(item.input or "")).decode()
                self._calls.append(_call(item, arguments, param))
            case "function_call_output" | "custom_tool_call_output":
                self.end_turn()
                if item.call_id is None:
                    raise InvalidRequest(f"{param}.call_id is missing.", param=f"{param}.call_id")
                result = _texts(item.output, f"{param}.output")
                self.messages.append(ChatMessage("tool", result, tool_call_id=item.call_id))
            case kind:
                raise InvalidRequest(f"{param} is of type {kind!r}, which is not supported.", param=param)

    def end_turn(self) -> None:
        """Close the turn of the model, if one is open."""
        if self._said or self._calls:
            reasoning = "\n".join(self._reasoning) or None
            self.messages.append(
                ChatMessage(
                    "assistant", tuple(self._said), tool_calls=tuple(self._calls), reasoning=reasoning
                )
            )
        self._reasoning, self._said, self._calls = [], [], []

    def _add_message(self, item: InputItem, param: str) -> None:
        if item.role not in _ROLES:
            raise InvalidRequest(
                f"{param}.role is {item.role!r}, which is none of {', '.join(sorted(_ROLES))}.",
                param=f"{param}.role",
            )
        texts = _texts(item.content, f"{param}.content")
        if item.role == "assistant":
            if self._calls:
                self.end_turn()
            self._said += texts
            return
        self.end_turn()
        role = "system" if item.role == "developer" else item.role
        self.messages.append(ChatMessage(role, texts))


def _call(item: InputItem, arguments: str, param: str) -> ToolCall:
    if item.call_id is None or item.name is None:
        raise InvalidRequest(f"{param} must have a call_id and a name.", param=param)
    return ToolCall(item.call_id, item.name, arguments)


def _texts(content: str | list[ContentPart] | None, param: str) -> tuple[TextPart, ...]:
    if content is None:
        raise InvalidRequest(f"{param} is missing.", param=param)
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(TextPart(_text_of(part, param)) for part in content)


def _text_of(part: ContentPart, param: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text if part.type in _TEXT_PARTS else None
    if text is None:
        raise InvalidRequest(
            f"{param} has a part of type {part.type!r}; this model takes text parts only.", param=param
        )
    return text
