"""The protocol of parsers of answers, and the parsers that know no tool calls: plain text and reasoning.

The joined output does not depend on the pieces in which the text arrives. Parsers hold back only text that may still
become a marker or the head of a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Protocol

import msgspec


class AnswerSink(Protocol):
    """The receiver of a parser's output, in order."""

    def add_reasoning(self, text: str) -> None: ...
    def add_text(self, text: str) -> None: ...
    def begin_call(self, name: str) -> None: ...
    def add_arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        ...


class OutputParser(Protocol):
    @property
    def is_reasoning(self) -> bool:
        """Return whether the next text is a part of the reasoning."""
        ...

    def push(self, text: str) -> None: ...

    def finish(self) -> None:
        """End the answer: return everything that was held back."""
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
    """Return how much of the end of `text` may be the beginning of one of `markers`."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def first_marker(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    """Return where the first of `markers` stands, and which it is."""
    found = [(position, marker) for marker in markers if (position := text.find(marker)) >= 0]
    return min(found, default=None)


class SteppedParser:
    """A parser with one step for each state. A step takes what it can from the buffer; False asks for more text."""

    def __init__(self, state: str, steps: Mapping[str, Callable[[], bool]]) -> None:
        self._state = state
        self._steps = steps
        self._buffer = ""

    def push(self, text: str) -> None:
        self._buffer += text
        while self._buffer and self._steps[self._state]():
            pass

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken


class SectionParser(SteppedParser):
    """Finds the sections that may hold calls, by the markers in front of them. A section that holds no call is passed
    on as text. White space between text and calls belongs to neither."""

    is_reasoning = False

    def __init__(
        self,
        sink: AnswerSink,
        opening: tuple[str, ...],
        steps: Mapping[str, Callable[[], bool]],
        *,
        hides_markers: bool,
    ) -> None:
        super().__init__("text", {"text": self._step_text, **steps})
        self._sink = sink
        self._opening = opening
        self._hides_markers = hides_markers
        self._raw: list[str] = []  # of a section, until its first call has begun
        self._had_call = False  # in this section
        self._had_any_call = False
        self._trims_text = False  # whether white space at the beginning of the text is to go

    def _step_text(self) -> bool:
        found = first_marker(self._buffer, self._opening)
        if found is None:
            safe = self._buffer[: len(self._buffer) - held_length(self._buffer, self._opening)]
            self._add_text(self._take(len(safe.rstrip())))
            return False
        position, marker = found
        before = self._take(position)
        self._add_text(before.rstrip())
        self._take(len(marker))
        self._raw = [before[len(before.rstrip()) :] + ("" if self._hides_markers else marker)]
        self._state = "section"
        return True

    def _end_text(self) -> None:
        """Let go of the text held back, unless the answer ends where one more call was about to begin."""
        rest = self._buffer.lstrip()
        is_cut_off = self._had_any_call and rest and held_length(rest, self._opening) == len(rest)
        if not is_cut_off:
            self._add_text(self._buffer)

    def _add_text(self, text: str) -> None:
        if self._trims_text:
            text = text.lstrip()
        if text:
            self._trims_text = False
            self._sink.add_text(text)

    def _note_call(self) -> None:
        self._had_call = self._had_any_call = True

    def _leave_section(self) -> None:
        if self._had_call:
            self._trims_text = True
        self._add_text("".join(self._raw))
        self._raw = []
        self._had_call = False
        self._state = "text"


class ReasoningMarks(msgspec.Struct, frozen=True):
    """The marks around the thoughts of a model family. `is_open`: answers begin inside the thoughts, whatever the
    prompt."""

    start: str
    end: str
    is_open: bool = False
    turn_start: str = ""  # between thoughts and calls that a grammar forces
    answer_start: str = ""  # between thoughts and an answer that a grammar binds
    answer_alone: str = ""  # in front of such an answer without thoughts
    others: tuple[str, ...] = ()  # what an answer without thoughts may begin with; empty: anything
    stops: tuple[str, ...] = ()  # texts that end thoughts, too, and belong to what follows
    # Tags around the text of an answer, which do not belong to the text.
    wrappers: tuple[tuple[str, str], ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts of which some may be control tokens: the first mark may be such a token and a word."""
        wrappers = (tag for pair in self.wrappers for tag in pair)
        return (self.start, self.end, *re.findall(r"<[^<>]+>", self.start), *self.stops, *wrappers)


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
        begun, marks = text.lstrip(), self._marks
        if begun.startswith(marks.start):
            self._state = "inside"
            return begun[len(marks.start) :]
        if begun.startswith(marks.end):  # some models close thoughts that they have not opened
            self._state = "behind"
            return begun[len(marks.end) :]
        if marks.start.startswith(begun) or marks.end.startswith(begun):
            self._held = text
            return ""
        self._state = "outside"
        return text

    def _push_inside(self, text: str) -> str:
        marks = self._marks
        found = first_marker(text, (marks.end, *marks.stops))
        if found is not None:
            position, marker = found
            self._reason(text[:position].rstrip())
            self._state = "behind"
            return text[position + (len(marker) if marker == marks.end else 0) :]
        safe = text[: len(text) - held_length(text, (marks.end, *marks.stops))].rstrip()
        self._reason(safe)
        self._held = text[len(safe) :]
        return ""

    def _reason(self, text: str) -> None:
        if not self._has_reasoned:
            text = text.lstrip()
        if text:
            self._has_reasoned = True
            self._sink.add_reasoning(text)


class AnswerUnwrapper:
    """Takes the tags off an answer that is between two tags, with the white space next to them. Calls may follow."""

    is_reasoning = False

    def __init__(self, then: OutputParser, wrappers: tuple[tuple[str, str], ...]) -> None:
        self._then = then
        self._wrappers = dict(wrappers)
        self._state: Literal["start", "begun", "inside", "behind", "outside"] = "start"
        self._closing = ""
        self._held = ""

    def push(self, text: str) -> None:
        text, self._held = self._held + text, ""
        if self._state == "start":
            text = self._push_start(text)
        if self._state in ("begun", "behind"):
            text = text.lstrip()
            if text:
                self._state = "inside" if self._state == "begun" else "outside"
        if self._state == "inside":
            self._push_inside(text)
        elif self._state == "outside" and text:
            self._then.push(text)

    def finish(self) -> None:
        if self._held:
            self._then.push(self._held)
        self._held = ""
        self._then.finish()

    def _push_start(self, text: str) -> str:
        begun = text.lstrip()
        opening = next((each for each in self._wrappers if begun.startswith(each)), None)
        if opening is not None:
            self._state, self._closing = "begun", self._wrappers[opening]
            return begun[len(opening) :]
        if any(each.startswith(begun) for each in self._wrappers):
            self._held = text
            return ""
        self._state = "outside"
        return text

    def _push_inside(self, text: str) -> None:
        position = text.find(self._closing)
        if position < 0:
            safe = text[: len(text) - held_length(text, (self._closing,))].rstrip()
            self._held = text[len(safe) :]
        else:
            safe = text[:position].rstrip()
            self._state = "behind"
        if safe:
            self._then.push(safe)
        if position >= 0:
            self.push(text[position + len(self._closing) :])
