"""Finds the first stop string in a text that arrives in pieces, and holds back only text that may still become the
beginning of a stop string.

The outcome does not depend on how the text was cut: the stop string that is complete first wins, and of two that end
together the longer one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache

from penstock.gateway.text.detokenizer import Detokenizer


@lru_cache(maxsize=256)
def _border_lengths(pattern: str) -> Sequence[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix. All answers to a
    request share it."""
    borders = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = borders[length - 1]
        if pattern[position] == pattern[length]:
            length += 1
        borders[position] = length
    return borders


class StopMatcher:
    """Follows every stop string at once (Knuth-Morris-Pratt), in time linear in the text."""

    def __init__(self, stop_strings: Sequence[str], *, keeps_match: bool = False) -> None:
        self._keeps_match = keeps_match  # the stop string is a part of the text
        self._patterns = [(pattern, _border_lengths(pattern)) for pattern in stop_strings]
        self._first_characters = frozenset(pattern[0] for pattern in stop_strings)
        self._matched_lengths = [0] * len(stop_strings)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is now known to come before any stop string. After a match nothing more comes out."""
        if self.matched is not None:
            return ""
        if not self._held and self._first_characters.isdisjoint(text):
            return text
        buffer = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            longest = self._step(character)
            if longest:
                self.matched = longest
                self._held = ""
                return buffer[: position if self._keeps_match else position - len(longest)]
        num_held = max(self._matched_lengths)
        self._held = buffer[len(buffer) - num_held :]
        return buffer[: len(buffer) - num_held]

    def finish(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def fork(self) -> StopMatcher:
        """Return a matcher that continues from here by itself."""
        forked = copy.copy(self)
        forked._matched_lengths = list(self._matched_lengths)
        return forked

    def _step(self, character: str) -> str | None:
        """Advance every pattern by one character; the longest that this completes, if any."""
        complete: str | None = None
        for index, (pattern, borders) in enumerate(self._patterns):
            length = self._matched_lengths[index]
            while length and pattern[length] != character:
                length = borders[length - 1]
            if pattern[length] == character:
                length += 1
            self._matched_lengths[index] = length
            if length == len(pattern) and (complete is None or length > len(complete)):
                complete = pattern
        return complete


class StopWatch:
    """Tells whether a sequence of tokens has come to a stop string. A watch never changes, so sequences with the same
    beginning share its watch. The first `min_tokens` tokens are no part of a stop string."""

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_tokens = min_tokens

    @property
    def is_stopped(self) -> bool:
        return self._matcher.matched is not None

    def after(self, token_id: int) -> StopWatch:
        """Return the watch of the sequence with one token more."""
        detokenizer, matcher = self._detokenizer.fork(), self._matcher
        text = detokenizer.push((token_id,))
        if text and not self._min_tokens:
            matcher = matcher.fork()
            matcher.push(text)
        return StopWatch(detokenizer, matcher, max(0, self._min_tokens - 1))
