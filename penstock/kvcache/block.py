"""One KV block's bookkeeping, and the state that follows from it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from penstock.core.hashing import BlockHash


class IntegrityError(AssertionError):
    """The cache contradicts itself, or was asked for what no correct caller asks: always a bug, never
    load."""


class BlockState(enum.Enum):
    FREE = "free"
    ACTIVE = "active"
    CACHED = "cached"
    PINNED = "pinned"


@dataclass(frozen=True, slots=True)
class Promise:
    """A block's contents are to be kept until a time. It goes where they go, to host memory and back; a pin is
    how a pool of blocks honours it, and may have to be given up before."""

    until: float
    depth: int  # from the root of the chain
    entry_ttl_s: float | None = None  # where a kept prefix ends: for how long each use prolongs it
    is_kept: bool = True  # because somebody asked for it; what a preempted request left is a mere hope


class Block:
    """A record, of a device block or a slot of host memory, that lives as long as the cache. Only this room
    writes to it; `state` is derived, never stored."""

    __slots__ = ("block_hash", "block_id", "last_use", "parent", "pinned_until", "promise", "references")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.references = 0
        self.block_hash: BlockHash | None = None  # set exactly while the index leads to this block
        self.parent: BlockHash | None = None  # set together with block_hash; it need not be indexed itself
        self.pinned_until: float | None = None  # only indexed blocks carry a pin, active ones too
        self.promise: Promise | None = None  # of indexed blocks; there while pinned, and may outlast the pin
        self.last_use = 0  # a counter, not a time: the order of last releases

    @property
    def state(self) -> BlockState:
        if self.references:
            return BlockState.ACTIVE
        if self.block_hash is None:
            return BlockState.FREE
        return BlockState.CACHED if self.pinned_until is None else BlockState.PINNED
