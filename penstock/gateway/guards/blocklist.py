"""Words, phrases and patterns that must not pass."""

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock.gateway.guards.detector import Detector


class _Terms:
    """Tells whether a term really stands at a place. RE2 finds places fast, but of several terms that begin there it
    prefers one, which need not be the one that ends with a word."""

    def __init__(self, terms: Iterable[str], *, ignore_case: bool, whole_words: bool) -> None:
        self._ignore_case = ignore_case
        self._whole_words = whole_words
        self._terms = frozenset(map(self._folded, terms))
        self._lengths = sorted({len(term) for term in self._terms}, reverse=True)

    def __call__(self, text: str, start: int, end: int) -> int | None:
        for length in self._lengths:
            candidate_end = start + length
            if candidate_end > end or self._folded(text[start:candidate_end]) not in self._terms:
                continue
            if not self._whole_words or self._stands_alone(text, start, candidate_end):
                return candidate_end
        return None

    def _folded(self, text: str) -> str:
        return text.lower() if self._ignore_case else text

    def _stands_alone(self, text: str, start: int, end: int) -> bool:
        """A word ends where letters and digits do, in every script; RE2's own idea of a word is ASCII."""
        begins = start == 0 or not (text[start - 1].isalnum() and text[start].isalnum())
        ends = end >= len(text) or not (text[end].isalnum() and text[end - 1].isalnum())
        return begins and ends


def blocklist_detectors(
    label: str, terms: Iterable[str], patterns: Iterable[str], *, ignore_case: bool, whole_words: bool
) -> tuple[Detector, ...]:
    detectors = [Detector(label, pattern, ignore_case=ignore_case) for pattern in patterns]
    # Longest first: the check looks no further than what RE2 found.
    ordered = sorted(set(terms), key=len, reverse=True)
    if ordered:
        alternatives = "|".join(map(re.escape, ordered))
        check = _Terms(ordered, ignore_case=ignore_case, whole_words=whole_words)
        detectors.append(Detector(label, alternatives, ignore_case=ignore_case, check=check))
    return tuple(detectors)
