"""The texts of a request's prompts: taken out to be looked at, and put back changed.

Everything that a template may write is a text here: contents, reasoning, names, ids, arguments and tools. A message's
parts are read as the template writes them, one line after the other, and also without the line breaks, so that what
the edge of a part cuts in two is found as well.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.gateway.guards.guard import Subject
from penstock.gateway.guards.scanner import Span
from penstock.gateway.prompts import ChatMessage, ChatPrompt, Prompt, TextPart, TextPrompt

TRUSTED_ROLES = frozenset({"system", "developer", "assistant"})
USUAL_ROLES = TRUSTED_ROLES | {"user", "tool", "function"}
PART_SEPARATOR = "\n"  # what templates, and external servers, put between the parts of a message


@dataclass(frozen=True, slots=True)
class Passage:
    """A text of a prompt, in the pieces that the client sent it in."""

    pieces: tuple[str, ...]
    is_trusted: bool
    is_json: bool = False

    @property
    def text(self) -> str:
        """The pieces as a template writes them."""
        return PART_SEPARATOR.join(self.pieces)


def passages(prompt: Prompt) -> list[Passage]:
    """The texts of a prompt, in the order in which `replaced` expects them back. Token prompts have none: the caller
    must decode them."""
    if isinstance(prompt, TextPrompt):
        return [Passage((prompt.text,), is_trusted=False)]
    if isinstance(prompt, ChatPrompt):
        of_messages = [passage for message in prompt.messages for passage in _message_passages(message)]
        of_options = [Passage((text,), is_trusted=False) for text in _texts_of(prompt.template_options)]
        of_tools = [Passage((text,), is_trusted=True) for text in _texts_of(_tools_of(prompt))]
        return of_messages + of_options + of_tools
    return []


def _message_passages(message: ChatMessage) -> Iterator[Passage]:
    is_trusted = message.role in TRUSTED_ROLES
    content = message.content
    pieces = (content,) if isinstance(content, str) else tuple(part.text for part in content)
    yield Passage(pieces, is_trusted)
    for text in (message.reasoning, message.name, message.tool_call_id, _odd_role(message)):
        if text:
            yield Passage((text,), is_trusted)
    for call in message.tool_calls:
        yield Passage((call.arguments,), is_trusted, is_json=True)
        for text in (call.name, call.id):
            yield Passage((text,), is_trusted)


def _odd_role(message: ChatMessage) -> str | None:
    """A role that is a client's own invention; the usual ones need no look."""
    return None if message.role in USUAL_ROLES else message.role


def replaced(prompt: Prompt, passages: Iterator[tuple[str, ...]]) -> Prompt:
    """`prompt` with the pieces of every passage exchanged."""
    if isinstance(prompt, TextPrompt):
        return TextPrompt(*next(passages))
    if isinstance(prompt, ChatPrompt):
        messages = tuple(_replaced_message(message, passages) for message in prompt.messages)
        for param, value in (("chat_template_kwargs", prompt.template_options), ("tools", _tools_of(prompt))):
            if [(text,) for text in _texts_of(value)] != [next(passages) for _ in _texts_of(value)]:
                raise InvalidRequest(
                    f"A safety policy would have to redact a part of {param}, which cannot be done.",
                    param=param,
                )
        return msgspec.structs.replace(prompt, messages=messages)
    return prompt


def _tools_of(prompt: ChatPrompt) -> list[Any]:
    return [[tool.name, tool.description, tool.parameters] for tool in prompt.tools]


def _texts_of(given: Any) -> list[str]:
    """Every text in what a client gives to the model's template, names included. Without recursion, because the value
    is a client's."""
    found: list[str] = []
    waiting: list[Any] = [given]
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

    def changed(text: str | None) -> str | None:
        return next(passages)[0] if text else text

    reasoning, name, tool_call_id = map(changed, (message.reasoning, message.name, message.tool_call_id))
    role = changed(_odd_role(message)) or message.role
    calls = tuple(
        msgspec.structs.replace(
            call, arguments=next(passages)[0], name=next(passages)[0], id=next(passages)[0]
        )
        for call in message.tool_calls
    )
    return msgspec.structs.replace(
        message,
        role=role,
        content=content,
        reasoning=reasoning,
        name=name,
        tool_call_id=tool_call_id,
        tool_calls=calls,
    )


def spans_across_edges(pieces: Sequence[str], spans: Sequence[Span]) -> list[Span]:
    """The findings that an edge between two pieces cuts in two. `spans` are positions in the pieces joined without
    separators; the result has positions in the text with separators."""
    edges = list(accumulate(len(piece) for piece in pieces))[:-1]
    found = []
    for span in spans:
        num_before = bisect_right(edges, span.start)
        num_inside = bisect_left(edges, span.end) - num_before
        if num_inside > 0:
            width = len(PART_SEPARATOR)
            start, end = span.start + num_before * width, span.end + (num_before + num_inside) * width
            found.append(Span(start, end, span.detector))
    return found


def hidden(pieces: Sequence[str], spans: Sequence[Span]) -> tuple[str, ...]:
    """`pieces` with labels in place of `spans`, which are in order. A label stands where its span begins."""
    shown = []
    offset = 0
    for piece in pieces:
        shown.append(_hidden_in_piece(piece, offset, spans))
        offset += len(piece) + len(PART_SEPARATOR)
    return tuple(shown)


def _hidden_in_piece(piece: str, offset: int, spans: Sequence[Span]) -> str:
    piece_end = offset + len(piece)
    parts = []
    done = offset
    hidden_until = 0
    for span in spans:
        if span.start >= piece_end:
            break
        if span.start >= max(hidden_until, offset):
            parts.append(piece[done - offset : span.start - offset])
            parts.append(f"[{span.detector.label}]")
        hidden_until = max(hidden_until, span.end)
        done = max(done, min(hidden_until, piece_end))
    parts.append(piece[done - offset :])
    return "".join(parts)


def subject_of(prompts: Sequence[Sequence[Passage]]) -> Subject:
    """Everything that the prompts say, for a review as a whole."""
    every = [passage for prompt in prompts for passage in prompt if passage.text]
    return Subject(
        text="\n\n".join(passage.text for passage in every),
        untrusted="\n\n".join(
            text for passage in every if not passage.is_trusted for text in _readings_of(passage)
        ),
    )


def _readings_of(passage: Passage) -> list[str]:
    """Parts with the line breaks between them, and without, because a model may read over them."""
    return [passage.text] if len(passage.pieces) == 1 else [passage.text, "".join(passage.pieces)]
