"""This module holds guards and the patterns that they search for. A guard finds things in text; the rule of the guard
says what follows.

A `Detector` is a pattern that RE2 runs, and a check of each match. It has no state: `scanner.Scanner` drives it over
text that may still be growing. Text may be passed on as soon as no match can begin in it any more, so `shape_of`
tells how long a match can be and of which characters it consists. RE2 does not tell this, so Python's parser reads
each pattern too; the few spellings that the two read differently are refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from re import _constants as tokens  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Protocol, TypeAlias

import re2

from penstock.core.errors import ConfigError
from penstock.core.identity import Principal
from penstock.core.request import Tier

# Python before 3.11.5 has one bound for both repetitions and widths.
UNBOUNDED_CHARS = int(getattr(parser, "MAXWIDTH", parser.MAXREPEAT))
MAX_OPENING_CHARS = 6
_ANY = r"[\s\S]"
_CATEGORIES = {
    tokens.CATEGORY_DIGIT: r"\d",
    tokens.CATEGORY_NOT_DIGIT: r"\D",
    tokens.CATEGORY_SPACE: r"\s",
    tokens.CATEGORY_NOT_SPACE: r"\S",
    tokens.CATEGORY_WORD: r"\w",
    tokens.CATEGORY_NOT_WORD: r"\W",
}
_REPEATS = (tokens.MAX_REPEAT, tokens.MIN_REPEAT, tokens.POSSESSIVE_REPEAT)


@dataclass(frozen=True, slots=True)
class PatternShape:
    """A rough form of a pattern. `opening` matches the beginning of every match, or as much of the beginning as the
    text still holds; `every` matches each character that a match may contain. Both may allow more than the pattern,
    never less."""

    max_chars: int | None  # None: a match has no longest length
    opening: re.Pattern[str]
    every: re.Pattern[str]

    def first_undecided(self, text: str) -> int:
        """Return the first position of `text` at which a match might begin that depends on what follows the text; the
        length of the text when there is none."""
        tail_start = 0 if self.max_chars is None else max(0, len(text) - self.max_chars)
        reversed_tail = text[: tail_start - 1 if tail_start else None : -1]
        run = self.every.match(reversed_tail)
        run_start = len(text) - (run.end() if run is not None else 0)
        beginning = self.opening.search(text, run_start)
        return beginning.start() if beginning is not None else len(text)


def shape_of(pattern: str, *, ignore_case: bool) -> PatternShape:
    """Raises ConfigError for a pattern that matches nothing at all, or that RE2 and Python would read differently."""
    if "{," in pattern or "[[:" in pattern:
        raise ConfigError(
            f"The pattern {pattern!r} uses a spelling that is read in different ways.",
            hint="Write {0,n} for {,n}, and \\d, \\w or \\s for named classes.",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parsed = parser.parse(pattern, re.IGNORECASE if ignore_case else 0)
    except (re.error, Warning, RecursionError, OverflowError) as error:
        raise ConfigError(f"The pattern {pattern!r} cannot be used: {error}.") from error
    shortest, longest = parsed.getwidth()
    if shortest < 1:
        raise ConfigError(f"The pattern {pattern!r} matches an empty text, so it would match everywhere.")
    folds_case = bool(parsed.state.flags & re.IGNORECASE) or _folds_case_inside(parsed)
    opening = ""
    for alternatives in reversed(_opening_of(parsed)):
        character = _one_of(alternatives, folds_case=folds_case)
        opening = f"{character}(?:\\Z|{opening})" if opening else character
    every = _one_of(list(_characters_of(parsed)), folds_case=folds_case)
    return PatternShape(
        max_chars=None if longest >= UNBOUNDED_CHARS else int(longest),
        opening=re.compile(opening, re.ASCII),
        every=re.compile(f"{every}*", re.ASCII),
    )


def _one_of(alternatives: Sequence[str], *, folds_case: bool) -> str:
    # Beyond ASCII, RE2 and Python fold case by different tables.
    if folds_case and any(not alternative.isascii() for alternative in alternatives):
        return _ANY
    joined = "|".join(dict.fromkeys(alternatives))
    if not folds_case:
        return f"(?:{joined})"
    # With and without folding, since a group may fold for itself alone, and a negated set then allows less. The long
    # s and the Kelvin sign are s and k to RE2.
    return f"(?:{joined}|(?i:{joined})|\u017f|\u212a)"


def _opening_of(items: Sequence[Any]) -> list[list[str]]:
    """Return the characters that are possible at each of the first positions of a match."""
    places: list[list[str]] = []
    for operation, argument in items:
        if operation is tokens.AT:
            continue
        if _is_character(operation):
            places.append([_character(operation, argument)])
        elif operation in _REPEATS and len(argument[2]) == 1 and _is_character(argument[2][0][0]):
            fewest, most, body = argument
            places += [[_character(*body[0])]] * min(fewest, MAX_OPENING_CHARS)
            if fewest != most:
                break
        else:
            break
        if len(places) >= MAX_OPENING_CHARS:
            break
    return places[:MAX_OPENING_CHARS] or [_first_of(items)[0]]


def _characters_of(items: Sequence[Any]) -> Iterator[str]:
    """Yield every character that these nodes can consume, as patterns of one character."""
    for operation, argument in items:
        if _is_character(operation):
            yield _character(operation, argument)
        for child in _children(operation, argument):
            yield from _characters_of(child)


def _first_of(items: Sequence[Any]) -> tuple[list[str], bool]:
    """Return the possible beginnings of a sequence of nodes, and whether it may be empty."""
    found: list[str] = []
    for operation, argument in items:
        if _is_character(operation):
            return [*found, _character(operation, argument)], False
        children = _children(operation, argument)
        if not children:  # an assertion consumes nothing
            continue
        firsts = [_first_of(child) for child in children]
        for characters, _ in firsts:
            found += characters
        may_be_empty = any(empty for _, empty in firsts)
        if operation in _REPEATS and argument[0] == 0:
            may_be_empty = True
        if not may_be_empty:
            return found, False
    return found, True


def _is_character(operation: Any) -> bool:
    return operation in (tokens.LITERAL, tokens.NOT_LITERAL, tokens.ANY, tokens.IN)


def _children(operation: Any, argument: Any) -> list[Sequence[Any]]:
    if operation is tokens.BRANCH:
        return list(argument[1])
    if operation is tokens.SUBPATTERN:
        return [argument[-1]]
    if operation in _REPEATS:
        return [argument[2]]
    if operation is tokens.ATOMIC_GROUP:
        return [argument]
    return []


def _character(operation: Any, argument: Any) -> str:
    if operation is tokens.ANY:
        return _ANY
    if operation is tokens.LITERAL:
        return re.escape(chr(argument))
    if operation is tokens.NOT_LITERAL:
        return f"[^{_in_set(chr(argument))}]"
    return _set(argument)


def _set(members: Sequence[Any]) -> str:
    negated = members[0][0] is tokens.NEGATE
    parts = []
    for operation, argument in members[1:] if negated else members:
        if operation is tokens.RANGE:
            low, high = argument
            parts.append(f"{_in_set(chr(low))}-{_in_set(chr(high))}")
        elif operation is tokens.CATEGORY:
            parts.append(_CATEGORIES[argument])
        else:
            parts.append(_in_set(chr(argument)))
    return f"[{'^' if negated else ''}{''.join(parts)}]"


def _in_set(character: str) -> str:
    return f"\\{character}" if character in r"\]^-[&~|#" else character


def _folds_case_inside(items: Sequence[Any]) -> bool:
    """Return whether any group ignores case on its own account, as (?i:…) does."""
    for operation, argument in items:
        if operation is tokens.SUBPATTERN and argument[1] & re.IGNORECASE:
            return True
        if any(_folds_case_inside(child) for child in _children(operation, argument)):
            return True
    return False


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
        _ = self.compiled, self.shape  # a bad pattern fails when settings are read, not during a request

    @cached_property
    def compiled(self) -> Any:
        options = re2.Options()
        options.log_errors = False
        options.case_sensitive = not self.ignore_case
        options.max_mem = MAX_PATTERN_BYTES
        options.never_capture = True  # only the position of a match matters, which RE2 finds far faster
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
        """Return the leftmost match at or after `start` that passes the check."""
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


class GuardFailed(Exception):
    """A guard could not decide: the guard broke, took too long, or got an answer that it cannot read."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A text to be reviewed as a whole. `untrusted` is the part of it that no operator wrote: texts of users and
    results of tools."""

    text: str
    untrusted: str


@dataclass(frozen=True, slots=True)
class Review:
    """A guard's objection to a text. `reason` is for logs, and quotes nothing of the text."""

    label: str
    reason: str
    score: float = 1.0


class Asker(Protocol):
    """The caller whose request is reviewed. A guard that asks a model does so in the caller's name."""

    @property
    def principal(self) -> Principal: ...
    @property
    def tier(self) -> Tier: ...


class Guard:
    """Finds things in passing text, or reviews a text as a whole; most do one of the two. This one has only
    detectors.

    A guard with detectors never makes a reader wait for more than the longest of their matches. One that reviews
    makes the reader wait for the whole answer, unless its rule only flags.
    """

    reviews = False

    def __init__(self, detectors: tuple[Detector, ...] = ()) -> None:
        self.detectors = detectors

    async def review(self, subject: Subject, asker: Asker) -> Review | None:
        """Return the guard's objection to a text; None if there is none. Raises GuardFailed when the guard cannot
        decide."""
        return None
