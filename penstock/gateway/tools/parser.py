"""What a parser of answers takes in and gives out.

Whatever the pieces in which the text arrives, the joined output is the same. Parsers hold back only what may still
turn out to be a marker or the head of a call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


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
