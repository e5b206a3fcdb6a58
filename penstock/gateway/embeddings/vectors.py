"""Vectors as bytes: little-endian float32, as engines send them and as clients may ask for them."""

from __future__ import annotations

import math
import sys
from array import array

BYTES_PER_NUMBER = 4


def numbers(vector: bytes) -> list[float]:
    values = array("f")
    values.frombytes(vector)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def shortened(vector: bytes, dimensions: int) -> bytes:
    """The first `dimensions` numbers, brought back to length 1."""
    kept = numbers(vector[: dimensions * BYTES_PER_NUMBER])
    length = math.sqrt(math.fsum(number * number for number in kept)) or 1.0
    values = array("f", [number / length for number in kept])
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
