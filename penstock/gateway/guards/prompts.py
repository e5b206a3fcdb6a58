"""The texts of a request's prompts: taken out to be looked at, and put back changed.

A message's parts count as one text, because a template joins them: what a part's edge cuts in two is still found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.gateway.guards.guard import Subject
from penstock.gateway.guards.scanner import Span
from penstock.gateway.prompts import ChatMessage, ChatPrompt, Prompt, TextPart, TextPrompt

TRUSTED_ROLES = frozenset({"system", "developer", "assistant"})


@dataclass(frozen=True, slots=True)
class Passage:
    """A text of a prompt, in the pieces that the client sent it in."""

    pieces: tuple[str, ...]
    is_trusted: bool
    is_json: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def passages(prompt: Prompt) -> list[Passage]:
    """In the order in which `replaced` expects them back. Token prompts have none: the caller must decode them."""
    if isinstance(prompt, TextPrompt):
        return [Passage((prompt.text,), is_trusted=False)]
    if isinstance(prompt, ChatPrompt):
        of_messages = [passage for message in prompt.messages for passage in _message_passages(message)]
        of_options = [Passage((text,), is_trusted=False) for text in _texts_of(prompt.template_options)]
        return of_messages + of_options
    return []


def _message_passages(message: ChatMessage) -> Iterator[Passage]:
    is_trusted = message.role in TRUSTED_ROLES
    content = message.content
    pieces = (content,) if isinstance(content, str) else tuple(part.text for part in content)
    yield Passage(pieces, is_trusted)
    yield Passage((message.reasoning or "",), is_trusted)
    for call in message.tool_calls:
        yield Passage((call.arguments,), is_trusted, is_json=True)


def replaced(prompt: Prompt, passages: Iterator[tuple[str, ...]]) -> Prompt:
    """`prompt` with the pieces of every passage exchanged."""
    if isinstance(prompt, TextPrompt):
        return TextPrompt(*next(passages))
    if isinstance(prompt, ChatPrompt):
        messages = tuple(_replaced_message(message, passages) for message in prompt.messages)
        if any((text,) != next(passages) for text in _texts_of(prompt.template_options)):
            raise InvalidRequest(
                "A safety policy would have to redact what the chat template is given, which cannot be done.",
                param="chat_template_kwargs",
            )
        return msgspec.structs.replace(prompt, messages=messages)
    return prompt


def _texts_of(options: dict[str, Any]) -> list[str]:
    """Every text in what a client gives to the model's template, names included. Without recursion, because it is a
    client's."""
    found: list[str] = []
    waiting: list[Any] = [options]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            waiting += value
    return found


def _replaced_message(message: ChatMessage, passages: Iterator[tuple[str, ...]]) -> ChatMessage:
    pieces = next(passages)
    content: str | tuple[TextPart, ...]
    if isinstance(message.content, str):
        content = pieces[0]
    else:
        content = tuple(
            msgspec.structs.replace(part, text=text)
            for part, text in zip(message.content, pieces, strict=True)
        )
    reasoning = next(passages)[0] or message.reasoning
    calls = tuple(msgspec.structs.replace(call, arguments=next(passages)[0]) for call in message.tool_calls)
    return msgspec.structs.replace(message, content=content, reasoning=reasoning, tool_calls=calls)


def hidden(pieces: Sequence[str], spans: Sequence[Span]) -> tuple[str, ...]:
    """`pieces` with labels in place of `spans`, which are in order. A label stands where its span begins."""
    shown = []
    offset = 0
    for piece in pieces:
        shown.append(_hidden_in_piece(piece, offset, spans))
        offset += len(piece)
    return tuple(shown)


def _hidden_in_piece(piece: str, offset: int, spans: Sequence[Span]) -> str:
    parts = []
    done = offset
    hidden_until = 0
    for span in spans:
        if span.start >= hidden_until and offset <= span.start < offset + len(piece):
            parts.append(piece[max(done, hidden_until) - offset : span.start - offset])
            parts.append(f"[{span.detector.label}]")
        hidden_until = max(hidden_until, span.end)
        if span.end > offset:
            done = max(done, min(span.end, offset + len(piece)))
    parts.append(piece[done - offset :])
    return "".join(parts)


def subject_of(prompts: Sequence[Sequence[Passage]]) -> Subject:
    """Everything that the prompts say, for a review as a whole."""
    every = [passage for prompt in prompts for passage in prompt if passage.text]
    return Subject(
        text="\n\n".join(passage.text for passage in every),
        untrusted="\n\n".join(passage.text for passage in every if not passage.is_trusted),
    )
