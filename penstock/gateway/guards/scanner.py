"""Runs detectors over text that arrives in pieces, and hides what they find.

Text is held back from the first position at which a match may still begin, which is at most the longest pattern's
length before the end. The joined output does not depend on how the text was cut: every decision is made on the
original text, at positions whose outcome no further text can change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.gateway.guards.detector import Detector

# Whole texts are fed in slices of this many characters, so that no search is longer than a slice and a match.
SLICE_CHARS = 1024


@dataclass(frozen=True, slots=True)
class Span:
    """A detector's finding at `[start, end)` of the whole text."""

    start: int
    end: int
    detector: Detector


class _Cursor:
    """The progress of one detector, in positions of the whole text."""

    __slots__ = ("detector", "next_search")

    def __init__(self, detector: Detector) -> None:
        self.detector = detector
        self.next_search = 0

    def take(self, text: str, base: int, decided: int) -> list[Span]:
        """Matches that begin before `decided`. `text` begins at position `base` of the whole."""
        spans = []
        while self.next_search < decided:
            found = self.detector.find(text, self.next_search - base)
            if found is None or base + found[0] >= decided:
                self.next_search = decided
                break
            span = Span(base + found[0], base + found[1], self.detector)
            spans.append(span)
            self.next_search = span.end
        return spans


class Scanner:
    """`hides` are replaced by their label, `stops` end the text before them, and `notes` only are reported.

    `spans` collects everything that was found, in the order of decisions."""

    def __init__(
        self, hides: Sequence[Detector] = (), stops: Sequence[Detector] = (), notes: Sequence[Detector] = ()
    ) -> None:
        self._stopping = frozenset(map(id, stops))
        # Findings that are only noted hold nothing back; the search for them is the same.
        self._holding = [*hides, *stops]
        self._cursors = [_Cursor(detector) for detector in self._holding]
        self._notes = Scanner(hides=notes) if notes else None
        self._buffer = ""  # begins with one character that is out already, for patterns that look behind
        self._base = 0
        self._released = 0  # how much of the whole text was passed on or hidden
        self._hidden_until = 0
        self._is_in_json_string = False
        self._is_after_backslash = False
        self.spans: list[Span] = []
        self.stopped: Span | None = None

    @property
    def is_bounded(self) -> bool:
        """Return whether every match has a longest length. If not, nothing is decided before the end, and slices
        would be gone over again and again."""
        notes_are_bounded = self._notes is None or self._notes.is_bounded
        return notes_are_bounded and all(detector.shape.max_chars is not None for detector in self._holding)

    @property
    def num_held_chars(self) -> int:
        return self._base + len(self._buffer) - self._released

    def push(self, text: str, *, is_json: bool = False) -> str:
        """Return the text that is now known to be allowed."""
        return self._advance(text, is_final=False, is_json=is_json)

    def finish(self, *, is_json: bool = False) -> str:
        """Return the text that was held back, at the end of the text."""
        return self._advance("", is_final=True, is_json=is_json)

    def _advance(self, text: str, *, is_final: bool, is_json: bool) -> str:
        if self.stopped is not None:
            return ""
        if self._notes is not None:
            self._notes._advance(text, is_final=is_final, is_json=False)
            self.spans += self._notes.spans
            self._notes.spans = []
        if not self._holding:
            return text
        self._buffer += text
        decided = self._base + (len(self._buffer) if is_final else self._first_undecided())
        spans = [span for cursor in self._cursors for span in cursor.take(self._buffer, self._base, decided)]
        spans.sort(key=lambda span: (span.start, -span.end))
        shown = self._show(spans, decided, is_json=is_json)
        kept = max(self._base, self._released - 1)
        self._buffer = self._buffer[kept - self._base :]
        self._base = kept
        return shown

    def _first_undecided(self) -> int:
        return min(detector.shape.first_undecided(self._buffer) for detector in self._holding)

    def _show(self, spans: Sequence[Span], decided: int, *, is_json: bool) -> str:
        pieces: list[str] = []
        for span in spans:
            self.spans.append(span)
            if id(span.detector) in self._stopping:
                pieces.append(self._release(span.start, is_json=is_json))
                self.stopped = span
                return "".join(pieces)
            if span.start >= self._hidden_until:
                pieces.append(self._release(span.start, is_json=is_json))
                label = f"[{span.detector.label}]"
                # A bare label is no JSON value.
                pieces.append(f'"{label}"' if is_json and not self._is_in_json_string else label)
            self._hidden_until = max(self._hidden_until, span.end)
        pieces.append(self._release(decided, is_json=is_json))
        return "".join(pieces)

    def _release(self, until: int, *, is_json: bool) -> str:
        """Pass on the text up to `until`, without its hidden parts."""
        until = max(until, self._released)
        shown_from = min(max(self._released, self._hidden_until), until)
        if is_json:
            self._follow_json(self._buffer[self._released - self._base : until - self._base])
        self._released = until
        return self._buffer[shown_from - self._base : until - self._base]

    def _follow_json(self, text: str) -> None:
        for character in text:
            if self._is_after_backslash:
                self._is_after_backslash = False
            elif character == "\\" and self._is_in_json_string:
                self._is_after_backslash = True
            elif character == '"':
                self._is_in_json_string = not self._is_in_json_string


def scan_whole(
    text: str, scanner: Scanner, *, is_json: bool = False, between_slices: Callable[[], None] = lambda: None
) -> str:
    """Return all of a text that is there already, as `push` and `finish` would show it. `between_slices` may raise to
    end a scan that takes too long."""
    pieces = []
    slice_chars = SLICE_CHARS if scanner.is_bounded else max(1, len(text))
    for start in range(0, len(text), slice_chars):
        between_slices()
        pieces.append(scanner.push(text[start : start + slice_chars], is_json=is_json))
    return "".join([*pieces, scanner.finish(is_json=is_json)])
