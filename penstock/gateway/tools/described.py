"""Rewrites chats for templates that know nothing of tools, or of several calls in a turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from penstock.gateway.prompts import ChatMessage, ImagePart, TextPart, Tool
from penstock.gateway.tools.tool_format import ToolFormat


def described_in_words(
    messages: Sequence[ChatMessage],
    tools: tuple[Tool, ...],
    tool_format: ToolFormat,
    *,
    has_system: bool = True,
) -> tuple[ChatMessage, ...]:
    """Describe tools at the end of the system prompt, or, for templates without such a turn, at the beginning of the
    user's first turn. Earlier calls stand in the model's turns as the model would write them, and results come back
    as a user's turn."""
    told: list[ChatMessage] = []
    for message in messages:
        if message.role == "tool":
            _add_result(told, message)
        elif message.tool_calls:
            told.append(_with_written_calls(message, tool_format))
        else:
            told.append(message)
    if tools:
        _instruct(told, tool_format.instructions(tools), has_system=has_system)
    return tuple(told)


def with_single_calls(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Give each call a turn of its own, as if the call had waited for the result of the one before."""
    told: list[ChatMessage] = []
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        if len(message.tool_calls) < 2:
            told.append(message)
            continue
        results = []
        while rest and rest[0].role == "tool":
            results.append(rest.popleft())
        content = message.content
        for call in message.tool_calls:
            told.append(msgspec.structs.replace(message, content=content, tool_calls=(call,)))
            told += [result for result in results if result.tool_call_id == call.id]
            content = ""
        ids = {call.id for call in message.tool_calls}
        told += [result for result in results if result.tool_call_id not in ids]
    return tuple(told)


def _instruct(told: list[ChatMessage], instructions: str, *, has_system: bool) -> None:
    if told and told[0].role == "user" and not has_system:
        told[0] = msgspec.structs.replace(told[0], content=(TextPart(instructions + "\n"), *_parts(told[0])))
    elif told and told[0].role == "system":
        system = told[0]
        told[0] = msgspec.structs.replace(
            system, content=(*_parts(system), TextPart("\n" + instructions)), cache=None
        )
    else:
        told.insert(0, ChatMessage("system", instructions))


def _with_written_calls(message: ChatMessage, tool_format: ToolFormat) -> ChatMessage:
    written = TextPart(tool_format.written(message.tool_calls))
    parts = (*_parts(message), written)
    return msgspec.structs.replace(message, content=parts, tool_calls=())


def _add_result(told: list[ChatMessage], message: ChatMessage) -> None:
    """Results of parallel calls share a turn, because many templates want turns to alternate."""
    body = "\n".join(part.text for part in _parts(message))
    images = tuple(part for part in _parts(message) if isinstance(part, ImagePart))
    result = TextPart(f"<tool_response>\n{body}\n</tool_response>", message.cache)
    last = told[-1] if told else None
    if last is not None and last.role == "user" and last.tool_call_id is not None:
        told[-1] = msgspec.structs.replace(last, content=(*_parts(last), result, *images))
    else:
        told.append(ChatMessage("user", (result, *images), tool_call_id=message.tool_call_id or ""))


def _parts(message: ChatMessage) -> tuple[TextPart, ...]:
    if isinstance(message.content, str):
        return (TextPart(message.content),) if message.content else ()
    return message.content
