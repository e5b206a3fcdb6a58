"""Findings in messages of many parts are hidden part by part."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.guards.inputs import PART_SEPARATOR, hidden

PIECES = st.lists(st.text("ab", max_size=4), min_size=1, max_size=6)
SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=8)


def spans_at(places: list[tuple[int, int]]) -> list[Any]:
    detector = SimpleNamespace(label="X")
    found = [SimpleNamespace(start=at, end=at + length, detector=detector) for at, length in places]
    return sorted(found, key=lambda span: (span.start, -span.end))


def shown_by_character(pieces: list[str], spans: list[Any]) -> Iterator[str]:
    """Each character is hidden or not, and each run of overlapping spans has one label, where it begins."""
    offset = 0
    for piece in pieces:
        shown = ""
        for at, character in enumerate(piece, offset):
            is_first = any(
                span.start == at and not any(other.start < at < other.end for other in spans)
                for span in spans
            )
            is_hidden = any(span.start <= at < span.end for span in spans)
            shown += ("[X]" if is_first else "") + ("" if is_hidden else character)
        yield shown
        offset += len(piece) + len(PART_SEPARATOR)


@given(PIECES, SPANS)
def test_every_character_of_a_finding_is_hidden(pieces: list[str], places: list[tuple[int, int]]) -> None:
    spans = spans_at(places)
    assert hidden(pieces, spans) == tuple(shown_by_character(pieces, spans))


class Counted(list[Any]):
    """Counts how often an entry is looked at."""

    num_looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_looks += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self.num_looks += 1
            yield each


def test_each_finding_is_looked_at_a_few_times_only() -> None:
    """Twenty thousand parts with a finding each took minutes, in which other requests hardly moved."""
    spans = Counted(spans_at([(3 * number, 2) for number in range(500)]))
    assert hidden(["ab"] * 500, spans) == ("[X]",) * 500
    assert spans.num_looks <= 4 * len(spans)
