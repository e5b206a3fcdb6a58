"""Computes percentiles, reads and writes sizes in bytes, and names the bounds of numbers in settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil
from typing import Annotated

from msgspec import Meta

from penstock.core.errors import ConfigError

Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
ShareOrZero = Annotated[float, Meta(ge=0, le=1)]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest observed value that at least this share of values does not exceed. Raises IndexError when
    there are no values."""
    return ordered[max(0, ceil(len(ordered) * percent / 100.0) - 1)]


_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4} | {
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Read a size: 512MiB, 8GiB, 1.5g or a plain number of bytes."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ConfigError(f"'{text}' is not a size.", hint="Write it like 512MiB, 8GiB or a number of bytes.")
    number, unit = found.groups()
    return int(float(number) * _UNITS[(unit or "").lower()])


def format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
