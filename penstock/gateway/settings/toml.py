"""Writes a settings document as TOML, so that what the database holds can be edited as a file and applied again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from penstock.gateway.settings.settings import Document

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(document: Document) -> str:
    """`tomllib` reads the same document from the text."""
    return "\n".join(_table(document, ())).lstrip("\n")


def _table(table: Document, path: tuple[str, ...]) -> Iterator[str]:
    values = {key: value for key, value in table.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    if path and (values or not tables):
        yield ""
        yield f"[{'.'.join(map(_key, path))}]"
    for key, value in values.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, inside in tables.items():
        yield from _table(inside, (*path, key))


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Decimal):
        text = format(value, "f")
        return text if "." in text else f"{text}.0"  # a fraction stays one
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{_key(key)} = {_value(inside)}" for key, inside in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return str(value)


def _text(text: str) -> str:
    # JSON's escapes are TOML's, except that TOML wants DEL escaped as well.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
