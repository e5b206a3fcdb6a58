"""Decides which pin ends next. Knows expiry times as plain numbers and never reads a clock.

A pin that ends before its parent's leaves a chain that can still be matched; the reverse would not. Chains
are pinned from their root with one expiry, and pins are only ever extended, so a parent's pin never ends
first; among equal expiries the deepest block loses its pin first.
"""

from __future__ import annotations

import heapq

from penstock.kvcache.block import Block, IntegrityError


class PinHeap:
    """Every pin, on active blocks too: such a pin takes effect when the block's last reference goes."""

    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = blocks
        self._count = 0
        self._expiries: list[
            tuple[float, int, int]
        ] = []  # heap of (until, -depth, block id), stale ones included
        self._max_entries = 2 * len(blocks) + 64

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
        """Take away one pin that ended, the earliest; None when every pin has time left."""
        first = self._first()
        return self._take() if first is not None and first[0] <= now else None

    def first_to_end(self) -> Block:
        """The block whose pin has the least time left."""
        first = self._first()
        if first is None:
            raise IntegrityError("nothing is pinned, so no pin can be given up")
        return self._blocks[first[2]]

    def pop_first_to_end(self) -> Block:
        """Take away the pin with the least time left."""
        self.first_to_end()
        return self._take()

    def end(self, block: Block) -> None:
        """Take away the pin of this block."""
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
        # The depth too: a block may have been used anew, and pinned until the same time.
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
