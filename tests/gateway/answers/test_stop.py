"""Stop strings: the streamed outcome must equal a plain search in the whole text, however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.text.detokenizer import StopMatcher

ALPHABET = st.text(alphabet="ab<é", max_size=6)
STOPS = st.lists(st.text(alphabet="ab<é", min_size=1, max_size=5), min_size=1, max_size=4)


def plain_search(text: str, stops: list[str]) -> str | None:
    """Text before the stop string that is complete first; None when there is none."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return None


@given(st.lists(ALPHABET, max_size=12), STOPS)
def test_same_as_plain_search(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    emitted = ""
    text = ""
    for piece in pieces:
        text += piece
        emitted += matcher.push(piece)
        before_stop = plain_search(text, stops)
        if before_stop is not None:
            assert emitted == before_stop
            assert matcher.matched in stops
            assert matcher.push("more") == ""
            assert matcher.finish() == ""
            return
        held = text[len(emitted) :]
        longest_possible = max(
            (size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])), default=0
        )
        assert text.startswith(emitted)
        assert len(held) == longest_possible, "held back exactly as far as a stop string may have begun"
    assert matcher.matched is None
    assert emitted + matcher.finish() == text


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["\n\n"], ["line\n", "\nmore"], "line"),
        (["</s>"], ["a<", "/", "s>b"], "a"),
        (["aab"], ["a", "a", "a", "b"], "a"),
        (["abcd", "bc"], ["abcX"], "a"),
        (["END"], ["the ENDING"], "the "),
    ],
)
def test_examples(stops: list[str], pieces: list[str], expected: str) -> None:
    matcher = StopMatcher(stops)
    assert "".join(matcher.push(piece) for piece in pieces) == expected
