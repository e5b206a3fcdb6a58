"""Rewrites regular expressions of clients for the matcher, whose dialect is Rust's.

`\\d` and `\\w` mean ASCII, as in JSON Schema and in most programs that check an answer; the matcher alone would take
the digits and letters of all scripts. `[` in a character class is a bracket, not a class inside a class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_ASCII = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
_PIECES = re.compile(r"\\.|\(\?<?[=!]|.", re.DOTALL)
_LOOK_AROUNDS = ("(?=", "(?!", "(?<=", "(?<!")
_BOUNDARIES = (r"\b", r"\B")


def for_matcher(pattern: str) -> str:
    return "".join(
        r"\[" if piece == "[" and in_class else _ASCII.get(piece, piece)
        for piece, in_class in _pieces(pattern)
    )


def without_assertions(pattern: str) -> str:
    """The pattern without look-aheads, look-behinds and word boundaries, which no grammar can enforce. The result
    matches everything that the pattern matches, and more."""
    kept: list[str] = []
    depth = 0  # of groups inside an assertion that is left out
    for piece, in_class in _pieces(pattern):
        if depth:
            depth += 0 if in_class else piece.startswith("(") - (piece == ")")
        elif not in_class and piece in _LOOK_AROUNDS:
            depth = 1
        elif in_class or piece not in _BOUNDARIES:
            kept.append(piece)
    return "".join(kept)


def _pieces(pattern: str) -> Iterator[tuple[str, bool]]:
    """The characters of a pattern, with what is escaped or opens a look-around in one piece, and whether each stands
    inside a character class. A class of Rust's own, such as `[[:alpha:]]`, is not looked into."""
    class_start: int | None = None
    for match in _PIECES.finditer(pattern):
        piece = match[0]
        opens_named = piece == "[" and pattern.startswith(":", match.end())
        yield piece, class_start is not None and not opens_named
        if class_start is None and piece == "[":
            class_start = match.end()
        elif (
            class_start is not None and piece == "]" and pattern[class_start : match.start()] not in ("", "^")
        ):
            class_start = None
