"""The size of a Lark grammar once its terminals stand in place of their names. The matcher writes them out before its
own limits count anything: a kilobyte of terminals that each name the next one several times would take all memory.

Reads as little of the notation as it needs; the matcher's compiler does the rest. Rules may name rules as often as
they like: the matcher does not write rules out.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

# Texts, patterns and comments that do not end are read to their end all the same: the compiler refuses them.
_TOKEN = re.compile(
    r"""(?P<comment>(?://|\#)[^\n]*)
    |"(?:\\.|[^"\\\n])*+"?
    |/(?:\\[\s\S]|[^/\\])*+/?
    |<[^<>\s]+>
    |(?P<name>[A-Za-z_]\w*)(?:\.[-+]?\d+)?
    |::
    |\S""",
    re.ASCII | re.VERBOSE,
)


class _Terminal:
    """The size of the definition of a terminal, and the number of times that the definition names other terminals."""

    __slots__ = ("num_own", "references")

    def __init__(self) -> None:
        self.num_own = 0
        self.references: Counter[str] = Counter()


def expanded_size(lark: str, limit: int) -> int:
    """Return the characters of all terminals, written out; no more than `limit` + 1 of them are counted for one."""
    terminals: dict[str, _Terminal] = defaultdict(_Terminal)
    for name, token, is_name in _definitions(lark):
        if not is_name:
            terminals[name].num_own += len(token)
        elif _is_terminal(token):
            terminals[name].references[token] += 1
    sizes: dict[str, int] = {}
    for name in tuple(terminals):
        _measure(name, terminals, sizes, limit)
    return sum(size for name, size in sizes.items() if _is_terminal(name))


def _definitions(lark: str) -> Iterator[tuple[str, str, bool]]:
    """Return the tokens of each definition with the name that is defined, and whether the token is a name."""
    tokens = [token for token in _TOKEN.finditer(lark) if token["comment"] is None]
    defined = ""  # a rule that has options in brackets, or no definition yet
    for token, following in pairwise([*tokens, None]):
        assert token is not None
        is_name = token["name"] is not None
        if is_name and following is not None and following[0] in (":", "::"):
            defined = token["name"]
        elif token[0] == "]" and following is not None and following[0] == ":":
            defined = ""
        elif token[0] != ":":
            yield defined, token["name"] or token[0], is_name


def _measure(name: str, terminals: dict[str, _Terminal], sizes: dict[str, int], limit: int) -> None:
    """Find the size of a terminal and of those that it names, without recursion. The matcher refuses a terminal that
    names itself: here, that name counts for nothing."""
    waiting, begun = [name], set[str]()
    while waiting:
        current = waiting[-1]
        terminal = terminals.get(current)
        if current in sizes or terminal is None:
            waiting.pop()
        elif current not in begun:
            begun.add(current)
            waiting += [each for each in terminal.references if each not in sizes and each not in begun]
        else:
            named = sum(count * sizes.get(each, 1) for each, count in terminal.references.items())
            sizes[current] = min(terminal.num_own + named, limit + 1)
            waiting.pop()


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()
