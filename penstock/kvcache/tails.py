"""Halves of blocks, for the last tokens of requests. Knows ids; no tensor, token, request or clock.

The last block of a running request is on average half empty. So two requests may share one block, a half each, while
half a block holds the last tokens of each. Other requests never find such a block, since only full blocks are found.

A request that outgrows its half gets a whole block, with its tokens at the start of it: the block it is in if it is
alone there, else another one. Unless they are there already, this costs a copy of half a block.

Two requests in a block are two references to it, so the cache sees nothing unusual.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.kvcache.block import IntegrityError
from penstock.kvcache.pool import BlockPool


class TailHalves:
    def __init__(self, pool: BlockPool, *, enabled: bool) -> None:
        """Unless enabled, every tail is a whole block."""
        if enabled and pool.block_size % 2:
            raise ValueError(f"a block of {pool.block_size} tokens has no halves")
        self._pool = pool
        self._enabled = enabled
        self.num_slots = pool.block_size // 2 if enabled else pool.block_size  # of a tail
        self._spare: dict[int, int] = {}  # by block, the first slot of the half that no request has

    @property
    def num_spare(self) -> int:
        """Tails that can be had without a block."""
        return len(self._spare)

    def suffices(self, num_tokens: int) -> bool:
        """Whether half a block holds so many tokens, the last of a request."""
        return self._enabled and 0 < num_tokens <= self.num_slots

    def take(self) -> tuple[int, int | None]:
        """A tail: its block, and the first slot of a half, or None for the whole of it. There must be a spare half or
        an available block."""
        if self._spare:
            block_id, offset = self._spare.popitem()
            self._pool.share((block_id,))
            return block_id, offset
        block_id = self._take_block()
        if not self._enabled:
            return block_id, None
        self._spare[block_id] = self.num_slots
        return block_id, 0

    def is_shared(self, block_id: int) -> bool:
        """Whether both halves of this block are taken."""
        return block_id not in self._spare

    def widen(self, block_id: int, offset: int) -> int:
        """Exchange a half for a whole block, which holds at its start what the half did. If the half's block is
        shared, a block must be available."""
        pool = self._pool
        if self._spare.pop(block_id, None) is not None:
            if offset:
                pool.copy_half(block_id, offset, block_id)
            return block_id
        whole_id = self._take_block()
        pool.copy_half(block_id, offset, whole_id)
        self.give_back(block_id, offset)
        return whole_id

    def give_back(self, block_id: int, offset: int) -> None:
        """A half is no longer needed."""
        if self._spare.pop(block_id, None) is None:
            self._spare[block_id] = offset
        self._pool.release((block_id,))

    def check_integrity(self, tails: Iterable[tuple[int, int]]) -> None:
        """Raise unless the halves that are taken, given as (block, offset), and the spare ones make whole blocks."""
        halves = sorted([*tails, *self._spare.items()])
        blocks = sorted({block_id for block_id, _ in halves})
        if halves != [(block_id, offset) for block_id in blocks for offset in (0, self.num_slots)]:
            raise IntegrityError(
                f"halves of blocks do not add up: {halves}, of which {self._spare} are spare"
            )

    def _take_block(self) -> int:
        block_ids = self._pool.allocate(1)
        assert block_ids is not None, "room is made before requests grow"
        return block_ids[0]
