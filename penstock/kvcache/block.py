"""The record of one KV block, and the state that follows from it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from penstock.core.hashing import BlockHash


class IntegrityError(Exception):
    """The records of the cache contradict each other, or a caller broke a rule. This is always a bug, whatever the
    load."""


class BlockState(enum.Enum):
    FREE = "free"
    ACTIVE = "active"
    CACHED = "cached"
    PINNED = "pinned"


@dataclass(frozen=True, slots=True)
class RetentionTerm:
    """The time until which a block's contents are retained. The record moves with the contents, to host memory and
    back. On the device, a pin keeps the block from eviction, and may end before that time."""

    until: float
    depth: int  # from the root of the chain
    # Set at the end of a retained prefix: how long each use prolongs the retention.
    entry_ttl_s: float | None = None
    was_asked_for: bool = True  # by a client; False for blocks of a preempted request


class Block:
    """The record of a device block or of a slot of host memory. It lives as long as the cache. Only this room writes
    to it; `state` is derived, never stored."""

    __slots__ = ("block_hash", "block_id", "last_use", "parent", "pinned_until", "references", "term")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.references = 0
        self.block_hash: BlockHash | None = None  # set exactly while the block is indexed
        self.parent: BlockHash | None = None  # set together with block_hash; the parent need not be indexed
        self.pinned_until: float | None = None  # only indexed blocks carry a pin, active ones too
        self.term: RetentionTerm | None = None  # of indexed blocks; set while pinned, and may outlast the pin
        self.last_use = 0  # a counter, not a time: the order of last releases

    @property
    def state(self) -> BlockState:
        if self.references:
            return BlockState.ACTIVE
        if self.block_hash is None:
            return BlockState.FREE
        return BlockState.CACHED if self.pinned_until is None else BlockState.PINNED
