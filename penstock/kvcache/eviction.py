"""Decides which cached block is evicted next, and which pin ends next. Knows expiry times as plain numbers and never
reads a clock.

When a pin ends before its parent's pin, the rest of the chain can still be matched; the reverse would not. Chains
are pinned from their root with one expiry, and pins are only ever extended, so a parent's pin never ends
first; among equal expiries the deepest block loses its pin first.

The rule of eviction: among cached blocks that no other cached block follows (the tails), the least recently used goes
first. A chain therefore shrinks from its end, and the rest always starts at its root and can still be matched. Since
a tree of blocks has a leaf, a tail exists whenever anything is cached: every cached block can be evicted.

Tails sit in a heap by last use. Blocks inside a chain are in no structure at all: they are only counted, by
the hash they follow, so that giving back or taking again a chain of any length costs one heap entry or none.
A block that stops being a tail leaves a stale entry behind, which is skipped later.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from penstock.core.hashing import BlockHash
from penstock.kvcache.block import Block, BlockState, IntegrityError


class PinHeap:
    """Holds every pin. The pin of an active block takes effect when the block's last reference is released."""

    def __init__(self, blocks: list[Block], max_blocks: int) -> None:
        """`blocks` grows up to `max_blocks`."""
        self._blocks = blocks
        self._count = 0
        self._expiries: list[
            tuple[float, int, int]
        ] = []  # heap of (until, -depth, block id), stale ones included
        self._max_entries = 2 * max_blocks + 64

    def __len__(self) -> int:
        return self._count

    def extend(self, block: Block) -> None:
        """Pin a block for as long as it is retained, or let its pin end later; never earlier."""
        term = block.term
        assert term is not None
        if block.pinned_until is None:
            self._count += 1
        elif block.pinned_until >= term.until:
            return
        block.pinned_until = term.until
        if len(self._expiries) >= self._max_entries:
            self._expiries = sorted({entry for entry in self._expiries if self._is_current(entry)})
        heapq.heappush(self._expiries, (term.until, -term.depth, block.block_id))

    def pop_expired(self, now: float) -> Block | None:
        """Remove the pin that ended first; return None when every pin has time left."""
        first = self._first()
        return self._take() if first is not None and first[0] <= now else None

    def first_to_end(self) -> Block:
        """Return the block whose pin has the least time left."""
        first = self._first()
        if first is None:
            raise IntegrityError("nothing is pinned, so no pin can be given up")
        return self._blocks[first[2]]

    def pop_first_to_end(self) -> Block:
        """Remove the pin with the least time left."""
        self.first_to_end()
        return self._take()

    def end(self, block: Block) -> None:
        """Remove the pin of this block."""
        if block.pinned_until is None:
            raise IntegrityError(f"block {block.block_id} is not pinned")
        block.pinned_until = None
        self._count -= 1

    def clear(self) -> None:
        for _, _, block_id in self._expiries:
            self._blocks[block_id].pinned_until = None
        self._expiries.clear()
        self._count = 0

    def check(self) -> None:
        pinned = {block.block_id for block in self._blocks if block.pinned_until is not None}
        current = {entry[2] for entry in self._expiries if self._is_current(entry)}
        if len(pinned) != self._count or pinned != current:
            raise IntegrityError(
                f"blocks {sorted(pinned ^ current)} are pinned but not in the heap, or the reverse"
            )

    def _is_current(self, entry: tuple[float, int, int]) -> bool:
        until, negative_depth, block_id = entry
        block = self._blocks[block_id]
        # The depth must match too: a block may have been reused, and pinned until the same time.
        return block.pinned_until == until and block.term is not None and block.term.depth == -negative_depth

    def _first(self) -> tuple[float, int, int] | None:
        while self._expiries and not self._is_current(self._expiries[0]):
            heapq.heappop(self._expiries)
        return self._expiries[0] if self._expiries else None

    def _take(self) -> Block:
        block = self._blocks[heapq.heappop(self._expiries)[2]]
        block.pinned_until = None
        self._count -= 1
        return block


class EvictionOrder:
    def __init__(self, blocks: list[Block], index: Mapping[BlockHash, Block], max_blocks: int) -> None:
        """`blocks` grows up to `max_blocks`."""
        self._blocks = blocks
        self._index = index  # read only: finds the parent of a tail
        self._num_cached = 0
        self._cached_children: dict[BlockHash, int] = {}  # parent hash -> cached blocks that follow it
        self._tails: list[tuple[int, int]] = []  # heap of (last_use, block id), stale entries included
        self._max_entries = 2 * max_blocks + 64

    def __len__(self) -> int:
        return self._num_cached

    def add(self, block: Block) -> None:
        """Add a block that became cached. Its `last_use` says when it was last released."""
        parent = block.parent
        children = self._cached_children
        assert parent is not None
        self._num_cached += 1
        children[parent] = children.get(parent, 0) + 1
        if block.block_hash not in children:
            self._push(block)

    def remove(self, block: Block) -> None:
        """Remove a block that is no longer cached. Call this after the block's state has changed."""
        parent = block.parent
        children = self._cached_children
        assert parent is not None
        self._num_cached -= 1
        remaining = children[parent] - 1
        if remaining:
            children[parent] = remaining
            return
        del children[parent]
        above = self._index.get(parent)
        if above is not None and not above.references and above.pinned_until is None:
            self._push(above)

    def oldest_tail(self) -> Block:
        """Return the block to evict next, which stays in the order until `remove`."""
        while self._tails:
            last_use, block_id = self._tails[0]
            if self._is_tail(last_use, block_id):
                return self._blocks[block_id]
            heapq.heappop(self._tails)
        raise IntegrityError("nothing is cached, so nothing can be evicted")

    def clear(self) -> None:
        self._num_cached = 0
        self._cached_children.clear()
        self._tails.clear()

    def check(self) -> None:
        """Compare the counts and the heap with the records of the blocks."""
        cached = [block for block in self._blocks if block.state is BlockState.CACHED]
        children: dict[BlockHash, int] = {}
        for block in cached:
            assert block.parent is not None
            children[block.parent] = children.get(block.parent, 0) + 1
        if self._num_cached != len(cached):
            raise IntegrityError(f"{len(cached)} blocks are cached, but {self._num_cached} were counted")
        if children != self._cached_children:
            raise IntegrityError("the counts of cached children are wrong")
        queued = {block_id for last_use, block_id in self._tails if self._is_tail(last_use, block_id)}
        tails = {block.block_id for block in cached if block.block_hash not in children}
        if queued != tails:
            raise IntegrityError(f"blocks {sorted(queued ^ tails)} are tails but not queued, or the reverse")

    def _is_tail(self, last_use: int, block_id: int) -> bool:
        block = self._blocks[block_id]
        return (
            block.last_use == last_use
            and not block.references
            and block.block_hash is not None
            and block.pinned_until is None
            and block.block_hash not in self._cached_children
        )

    def _push(self, block: Block) -> None:
        if len(self._tails) >= self._max_entries:
            self._tails = sorted({entry for entry in self._tails if self._is_tail(*entry)})
        heapq.heappush(self._tails, (block.last_use, block.block_id))
