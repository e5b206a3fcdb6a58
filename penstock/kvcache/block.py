"""One KV block's bookkeeping, and the state that follows from it."""

from __future__ import annotations

import enum

from penstock.kvcache.hashing import BlockHash


class IntegrityError(AssertionError):
    """The cache contradicts itself, or was asked for what no correct caller asks: always a bug, never
    load."""


class BlockState(enum.Enum):
    FREE = "free"
    ACTIVE = "active"
    CACHED = "cached"
    PINNED = "pinned"


class Block:
    """A record that lives as long as the cache. Only KVCache writes to it; `state` is derived, never
    stored."""

    __slots__ = ("block_hash", "block_id", "last_use", "parent", "pinned_until", "references")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.references = 0
        self.block_hash: BlockHash | None = None  # set exactly while the index leads to this block
        self.parent: BlockHash | None = None  # set together with block_hash; it need not be indexed itself
        self.pinned_until: float | None = None  # only indexed blocks carry a pin, active ones too
        self.last_use = 0  # a counter, not a time: the order of last releases

    @property
    def state(self) -> BlockState:
        if self.references:
            return BlockState.ACTIVE
        if self.block_hash is None:
            return BlockState.FREE
        return BlockState.CACHED if self.pinned_until is None else BlockState.PINNED
