"""Query parameters, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from starlette.requests import Request

from penstock.core.errors import InvalidRequest

Choice = TypeVar("Choice", bound=str)

_MAX_DIGITS = 9


def text_of(request: Request, name: str) -> str | None:
    """NUL is refused because not every database can even look for it."""
    text = request.query_params.get(name)
    if text is not None and "\0" in text:
        raise InvalidRequest(f"{name} must not hold a NUL character.", param=name)
    return text


def integer_of(request: Request, name: str, *, default: int, low: int, high: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
    if not is_number or not low <= int(text) <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, not {text[:20]!r}.", param=name)
    return int(text)


def choice_of(request: Request, name: str, *, default: Choice, choices: Sequence[Choice]) -> Choice:
    text = request.query_params.get(name, default)
    for choice in choices:
        if text == choice:
            return choice
    raise InvalidRequest(f"{name} must be one of {', '.join(choices)}, not {text[:20]!r}.", param=name)
