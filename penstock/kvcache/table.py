"""Block tables: the blocks that one holder, such as a running request, has references on. Knows counts of tokens.

A table is opened with the leading blocks that were found in the cache, filled with blocks for all known tokens, grown
by a tail at a time, and closed. Every reference to a block belongs to one table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.core.hashing import BlockHash
from penstock.kvcache.pool import BlockPool
from penstock.kvcache.tails import TailHalves


class BlockTable:
    __slots__ = ("_found", "_pool", "_tails", "block_ids", "half_offset", "num_reused_blocks", "num_slots")

    def __init__(self, pool: BlockPool, tails: TailHalves, found: Sequence[BlockHash] = ()) -> None:
        """Takes references on the blocks of a matched prefix, except on those that are in host memory."""
        host = pool.host.index
        self._pool = pool
        self._tails = tails
        self._found = found
        on_device = [block_hash for block_hash in found if block_hash not in host] if host else found
        self.block_ids = pool.acquire(on_device)
        self.num_reused_blocks = len(found)  # leading blocks that were found in the cache
        self.num_slots = 0  # tokens that the table has room for, once it is filled
        self.half_offset: int | None = None  # first slot of its half, if it has half of the last block

    @property
    def num_own_blocks(self) -> int:
        """Blocks that come free for certain when the table is closed."""
        return len(self.block_ids) - self.num_reused_blocks - (self.half_offset is not None)

    @property
    def whole_block_ids(self) -> list[int]:
        return self.block_ids if self.half_offset is None else self.block_ids[:-1]

    @property
    def tail(self) -> tuple[int, int] | None:
        """The block that the table has only half of, and the first slot of that half."""
        return None if self.half_offset is None else (self.block_ids[-1], self.half_offset)

    def num_missing(self, num_tokens: int) -> int:
        """Blocks that must be available to fill the table for so many tokens. Half a block counts as a whole one."""
        return -(-num_tokens // self._pool.block_size) - len(self.block_ids)

    def fill(self, num_tokens: int) -> None:
        """Add the blocks that are missing for so many tokens: from host memory, or with unknown contents. The last
        tokens get half a block where that is enough."""
        pool = self._pool
        if len(self.block_ids) < len(self._found):
            self._restore()
        takes_half = self._tails.suffices(num_tokens % pool.block_size)
        new = pool.allocate(self.num_missing(num_tokens) - takes_half)
        assert new is not None, "the caller makes sure that there are enough blocks"
        self.block_ids += new
        self.num_slots = len(self.block_ids) * pool.block_size
        if takes_half:
            block_id, self.half_offset = self._tails.take()
            self.block_ids.append(block_id)
            self.num_slots += self._tails.num_slots

    def grow(self) -> bool:
        """Add room for the next tokens, for which `num_blocks_to_grow` must be available; returns whether the last
        tokens belong elsewhere now."""
        tails = self._tails
        self.num_slots += tails.num_slots
        before = self.tail
        if before is None:
            block_id, self.half_offset = tails.take()
            self.block_ids.append(block_id)
            return True
        block_id = self.block_ids[-1] = tails.widen(*before)
        self.half_offset = None
        return (block_id, 0) != before

    def close(self) -> None:
        """Give back all references. The table is empty afterwards."""
        if self.tail is not None:
            self._tails.give_back(*self.tail)
        self._pool.release(self.whole_block_ids)
        self.block_ids = []
        self.half_offset = None
        self.num_slots = 0

    def _restore(self) -> None:
        """Bring the blocks of the found prefix back that are in host memory."""
        host = self._pool.host.index
        to_restore = [block_hash for block_hash in self._found if block_hash in host]
        restored = dict(zip(to_restore, self._pool.restore(to_restore), strict=True))
        on_device = iter(self.block_ids)
        self.block_ids = [restored[key] if key in restored else next(on_device) for key in self._found]


def num_blocks_to_grow(tables: Iterable[BlockTable], tails: TailHalves) -> int:
    """Blocks that must be available for these tables to grow together."""
    num_tails = num_blocks = 0
    num_spare = tails.num_spare
    for table in tables:
        if table.half_offset is None:
            num_tails += 1
        elif tails.is_shared(table.block_ids[-1]):
            num_blocks += 1
        else:  # it takes the other half of its block
            num_spare -= 1
    return num_blocks + max(0, num_tails - num_spare)
