"""Keeps the words of a chat apart from the control tokens of its template.

A message that spells out a control token, `<|im_end|>` say, must not end its own turn and speak as someone else. So
before a template is rendered such spellings are replaced by marks that no tokenizer knows; afterwards they are put
back, and their places are remembered, to be tokenized as the plain text that they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

# Unicode promises that these are never characters. A text that holds the first one all the same is marked itself.
_MARK = "\U0010fffe"
_NUMBERS_FROM = 0xF0000  # private use: one code point for each control token


class RenderedChat(msgspec.Struct, frozen=True):
    text: str
    plain_ranges: tuple[tuple[int, int], ...] = ()  # where the text spells control tokens that are none


class PlainTextMarks:
    def __init__(self, control_tokens: Iterable[str]) -> None:
        self._spellings = sorted({*control_tokens, _MARK} - {""}, key=lambda text: (-len(text), text))
        self._numbers = {spelling: number for number, spelling in enumerate(self._spellings)}
        self._spelled = re.compile(_any_of(self._spellings))
        self._marked = re.compile(f"{_MARK}([\U000f0000-\U000ffffd])")

    def mark(self, text: str) -> str:
        if self._spelled.search(text) is None:
            return text
        return self._spelled.sub(lambda found: _MARK + chr(_NUMBERS_FROM + self._numbers[found[0]]), text)

    def restore(self, rendered: str) -> RenderedChat:
        if _MARK not in rendered:
            return RenderedChat(rendered)
        pieces: list[str] = []
        ranges: list[tuple[int, int]] = []
        length = end = 0
        for found in self._marked.finditer(rendered):
            number = ord(found[1]) - _NUMBERS_FROM
            if number >= len(self._spellings):
                continue
            before, spelling = rendered[end : found.start()], self._spellings[number]
            pieces += (before, spelling)
            start = length + len(before)
            length = start + len(spelling)
            ranges.append((start, length))
            end = found.end()
        pieces.append(rendered[end:])
        return RenderedChat("".join(pieces), tuple(ranges))


def _any_of(spellings: Sequence[str]) -> str:
    """A pattern for the longest of them. Some models have hundreds of control tokens, and texts in HTML as many `<`:
    so the pattern decides by the first two characters before it looks at each."""
    groups: dict[str, list[str]] = {}
    for spelling in spellings:  # longest first
        groups.setdefault(spelling[:2], []).append(re.escape(spelling[2:]))
    ordered = sorted(groups.items(), key=lambda group: -len(group[0]))
    return "|".join(f"{re.escape(start)}(?:{'|'.join(rests)})" for start, rests in ordered)
