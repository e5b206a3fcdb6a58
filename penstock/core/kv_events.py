"""The events by which a replica tells the router about its prefix index. Knows hashes, never tokens or block ids.

Applying the events of one replica in order to an empty set gives exactly the hashes that replica can reuse.
`sequence` starts at 0 and rises by one per event: a reader that sees a gap has missed news and must ask
again.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class KVStored(msgspec.Struct, frozen=True, tag="stored"):
    """A run of one chain became reusable: `block_hashes[0]` follows `parent`, every other one the one before
    it."""

    sequence: int
    block_hashes: tuple[bytes, ...]
    parent: bytes


class KVRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """These hashes can no longer be reused. Tails come before the blocks they hang on."""

    sequence: int
    block_hashes: tuple[bytes, ...]


class KVCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """Nothing of this replica can be reused any more; what follows starts afresh."""

    sequence: int


KVEvent: TypeAlias = KVStored | KVRemoved | KVCleared
