"""Finds the line of a TOML text on which a key stands, which Python's parser does not tell. Used only for messages.

A statement is the fewest lines that parse on their own, so that strings and arrays over several lines need no care.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Path: TypeAlias = tuple[str | int, ...]


def key_lines(text: str) -> dict[Path, int]:
    """The line, from 1, of every key and table in a text that parses. What stands inside a value of several lines
    has the line on which the value begins."""
    found: dict[Path, int] = {}
    table: Path = ()
    lengths: dict[Path, int] = {}  # of arrays of tables
    for line, source in _statements(text):
        statement = tomllib.loads(source)
        if source.lstrip().startswith("["):
            table = _table_path(statement, lengths, is_array=source.lstrip().startswith("[["))
            for depth in range(1, len(table) + 1):
                found.setdefault(table[:depth], line)
        else:
            for path in _paths(statement):
                found.setdefault(table + path, line)
    return found


def nearest_line(lines: Mapping[Path, int], path: Sequence[str | int]) -> int | None:
    """Where a key stands, or the closest table around it."""
    for depth in range(len(path), 0, -1):
        line = lines.get(tuple(path[:depth]))
        if line is not None:
            return line
    return None


def _statements(text: str) -> Iterator[tuple[int, str]]:
    lines = text.splitlines()
    start = 0
    while start < len(lines):
        stripped = lines[start].strip()
        end = start + 1
        if stripped and not stripped.startswith("#"):
            while not _parses(source := "\n".join(lines[start:end])) and end < len(lines):
                end += 1
            yield start + 1, source
        start = end


def _parses(source: str) -> bool:
    try:
        tomllib.loads(source)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _table_path(statement: dict[str, Any], lengths: dict[Path, int], *, is_array: bool) -> Path:
    """The path of a header. A step through an array of tables goes to its last element so far."""
    path: Path = ()
    inside: Any = statement
    while inside:
        if isinstance(inside, list):
            inside = inside[0]
            continue
        ((key, inside),) = inside.items()
        path += (key,)
        is_last = inside in ({}, [{}])
        if is_array and is_last:
            lengths[path] = lengths.get(path, 0) + 1
        if path in lengths:
            path += (lengths[path] - 1,)
    return path


def _paths(value: Any) -> Iterator[Path]:
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return
    for key, inside in items:
        yield (key,)
        for path in _paths(inside):
            yield (key, *path)
