"""Which replica a session key leads to: the same one in every gateway, without messages between gateways.

Highest random weight: each pair of key and replica has a score, and the highest wins. When a replica comes or goes,
only the keys that lead to it move.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd: multiplying by it loses nothing, and spreads low bits upwards


@lru_cache(maxsize=65_536)
def number_of(key: str) -> int:
    """64 bits that look random. Python's own hash would differ between processes."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")


def score(key_number: int, replica_number: int) -> int:
    mixed = ((key_number ^ replica_number) * _MULTIPLIER) & _MASK
    return ((mixed ^ (mixed >> 29)) * _MULTIPLIER) & _MASK
