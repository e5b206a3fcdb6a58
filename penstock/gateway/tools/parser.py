"""The protocol of parsers of answers, and the parsers that know no tool calls: plain text and reasoning.

The joined output does not depend on the pieces in which the text arrives. Parsers hold back only text that may still
become a marker or the head of a call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec


class AnswerSink(Protocol):
    """Where a parser puts what it recognised, in order."""

    def add_reasoning(self, text: str) -> None: ...
    def add_text(self, text: str) -> None: ...
    def begin_call(self, name: str) -> None: ...
    def add_arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        ...


class OutputParser(Protocol):
    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is a part of the reasoning."""
        ...

    def push(self, text: str) -> None: ...

    def finish(self) -> None:
        """The answer is over: let go of everything held back."""
        ...


class PlainText:
    """The end of a chain of parsers when no tool may be called: all of it is text."""

    is_reasoning = False

    def __init__(self, sink: AnswerSink) -> None:
        self._sink = sink

    def push(self, text: str) -> None:
        if text:
            self._sink.add_text(text)

    def finish(self) -> None:
        pass


def held_length(text: str, markers: Iterable[str]) -> int:
    """How much of the end of `text` may be the beginning of one of `markers`."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def first_marker(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    """Where the first of `markers` stands, and which it is."""
    found = [(position, marker) for marker in markers if (position := text.find(marker)) >= 0]
    return min(found, default=None)


class ReasoningMarks(msgspec.Struct, frozen=True):
    """What a family writes around its thoughts. `is_open`: answers begin inside the thoughts, whatever the prompt."""

    start: str
    end: str
    is_open: bool = False
    turn_start: str = ""  # between thoughts and calls that a grammar forces
    answer_start: str = ""  # between thoughts and an answer that a grammar binds
    answer_alone: str = ""  # in front of such an answer without thoughts
    others: tuple[str, ...] = ()  # what an answer without thoughts may begin with; empty: anything


THINK = ReasoningMarks("<think>", "</think>")


class ReasoningSplitter:
    """Hands everything after the reasoning to `then`. White space around the reasoning belongs to neither part.

    `is_open` says that the prompt ended inside the reasoning, as some templates do.
    """

    def __init__(
        self, sink: AnswerSink, then: OutputParser, *, is_open: bool, marks: ReasoningMarks = THINK
    ) -> None:
        self._marks = marks
        self._sink = sink
        self._then = then
        self._state: Literal["start", "inside", "behind", "outside"] = "inside" if is_open else "start"
        self._held = ""
        self._has_reasoned = False

    @property
    def is_reasoning(self) -> bool:
        return self._state == "inside"

    def push(self, text: str) -> None:
        if self._state == "outside":
            self._then.push(text)
            return
        text = self._held + text
        self._held = ""
        if self._state == "start":
            text = self._push_start(text)
        if self._state == "inside":
            text = self._push_inside(text)
        if self._state == "behind":
            text = text.lstrip()
            if text:
                self._state = "outside"
        if self._state == "outside" and text:
            self._then.push(text)

    def finish(self) -> None:
        if self._state == "start":
            self._then.push(self._held)
        elif self._state == "inside":
            self._reason(self._held.rstrip())
        self._held = ""
        self._then.finish()

    def _push_start(self, text: str) -> str:
        begun = text.lstrip()
        if begun.startswith(self._marks.start):
            self._state = "inside"
            return begun[len(self._marks.start) :]
        if self._marks.start.startswith(begun):
            self._held = text
            return ""
        self._state = "outside"
        return text

    def _push_inside(self, text: str) -> str:
        position = text.find(self._marks.end)
        if position >= 0:
            self._reason(text[:position].rstrip())
            self._state = "behind"
            return text[position + len(self._marks.end) :]
        safe = text[: len(text) - held_length(text, (self._marks.end,))].rstrip()
        self._reason(safe)
        self._held = text[len(safe) :]
        return ""

    def _reason(self, text: str) -> None:
        if not self._has_reasoned:
            text = text.lstrip()
        if text:
            self._has_reasoned = True
            self._sink.add_reasoning(text)
