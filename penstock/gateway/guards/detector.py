"""Finds one kind of thing in text: a pattern that RE2 looks for, and a check of what it found.

A detector has no state: `scanner.Scanner` drives it over text that may still be growing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import re2

from penstock.core.errors import ConfigError
from penstock.gateway.guards.shape import PatternShape, shape_of

MAX_PATTERN_BYTES = 8 << 20  # of RE2's memory for one pattern
MAX_STREAM_MATCH_CHARS = 1024

# Given a text and the bounds of a candidate in it, the end of the real thing, which may be earlier; None: it is not
# one. May look at one character on either side, no further.
Check: TypeAlias = Callable[[str, int, int], int | None]


@dataclass(frozen=True)
class Detector:
    """`label` names what was found: in reasons, in metrics, and in the [LABEL] that replaces it."""

    label: str
    pattern: str
    ignore_case: bool = False
    check: Check | None = None

    def __post_init__(self) -> None:
        _ = self.compiled, self.shape  # a bad pattern shows when settings are read, not when a request is

    @cached_property
    def compiled(self) -> Any:
        options = re2.Options()
        options.log_errors = False
        options.case_sensitive = not self.ignore_case
        options.max_mem = MAX_PATTERN_BYTES
        options.never_capture = True  # only where a match lies matters, and RE2 finds that far quicker
        try:
            return re2.compile(self.pattern, options)
        except re2.error as error:
            detail = error.args[0].decode() if error.args else "unknown"
            raise ConfigError(
                f"The pattern {self.pattern!r} cannot be used: {detail}.",
                hint="Patterns are in RE2's syntax, which has no look-around and no back-references.",
            ) from error

    @cached_property
    def shape(self) -> PatternShape:
        return shape_of(self.pattern, ignore_case=self.ignore_case)

    def check_streamable(self) -> None:
        """Raises ConfigError when a stream could not promise how far it holds text back."""
        longest = self.shape.max_chars
        if longest is None or longest > MAX_STREAM_MATCH_CHARS:
            reach = "without end" if longest is None else f"{longest} characters"
            raise ConfigError(
                f"The pattern {self.pattern!r} can match {reach}, so answers could not stream past it.",
                hint=f"Bound its repeats, as in {{1,64}}, to at most {MAX_STREAM_MATCH_CHARS} characters in all; "
                'or use it with stage = "input".',
            )

    def find(self, text: str, start: int) -> tuple[int, int] | None:
        """The leftmost real thing at or after `start`."""
        while True:
            match = self.compiled.search(text, start)
            if match is None:
                return None
            begin, end = match.span()
            if self.check is None:
                return begin, end
            real_end = self.check(text, begin, end)
            if real_end is not None:
                return begin, real_end
            start = begin + 1
