"""Block tables list the blocks on which one holder, such as a running request, has references. Their tails may be
halves of blocks. Knows counts of tokens.

The last block of a running request is on average half empty. So two requests may share one block, a half each, while
half a block holds the last tokens of each. Other requests never find such a block, since only full blocks are found.

A request that outgrows its half gets a whole block, with its tokens at the start: its own block if no other request
uses that block, else another one. Tokens that are not at the start yet are copied there.

Two requests in a block are two references to it, so the cache sees nothing unusual.

A table is opened with the leading blocks that were found in the cache, filled with blocks for all known tokens, grown
by a tail at a time, and closed. Every reference to a block belongs to one table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.core.hashing import BlockHash
from penstock.kvcache.block import IntegrityError
from penstock.kvcache.pool import BlockPool
from penstock.kvcache.windows import WindowTable


class TailHalves:
    def __init__(self, pool: BlockPool, *, enabled: bool) -> None:
        """Unless enabled, every tail is a whole block."""
        if enabled and pool.block_size % 2:
            raise ValueError(f"a block of {pool.block_size} tokens has no halves")
        self._pool = pool
        self._enabled = enabled
        self.num_slots = pool.block_size // 2 if enabled else pool.block_size  # of a tail
        self._spare: dict[int, int] = {}  # by block, the first slot of the unused half

    @property
    def num_spare(self) -> int:
        """Return the number of tails that need no new block."""
        return len(self._spare)

    def suffices(self, num_tokens: int) -> bool:
        """Return whether half a block has room for these last tokens of a request."""
        return self._enabled and 0 < num_tokens <= self.num_slots

    def take(self) -> tuple[int, int | None]:
        """Take a tail. Returns its block, and the first slot of a half, or None for a whole block. There must be a
        spare half or an available block."""
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
        """Return whether both halves of this block are taken."""
        return block_id not in self._spare

    def widen(self, block_id: int, offset: int) -> int:
        """Replace a half by a whole block that starts with the contents of the half. If the half's block is
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
        """Give back a half that is no longer needed."""
        if self._spare.pop(block_id, None) is None:
            self._spare[block_id] = offset
        self._pool.release((block_id,))

    def check_integrity(self, tails: Iterable[tuple[int, int]]) -> None:
        """Raise unless the halves in use, given as (block, offset), and the spare halves add up to whole blocks."""
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


class BlockTable:
    # fmt: off
    __slots__ = (
        "_found", "_pool", "_tails", "block_ids", "half_offset", "num_reused_blocks", "num_slots",
        "state_slot", "windows",
    )
    # fmt: on

    def __init__(self, pool: BlockPool, tails: TailHalves, found: Sequence[BlockHash] = ()) -> None:
        """Take references on the blocks of a matched prefix, except on blocks in host memory."""
        host = pool.host.index
        self._pool = pool
        self._tails = tails
        self._found = found
        on_device = [block_hash for block_hash in found if block_hash not in host] if host else found
        self.block_ids = pool.acquire(on_device)
        self.num_reused_blocks = len(found)  # leading blocks that were found in the cache
        self.num_slots = 0  # tokens that the table has room for, once it is filled
        self.half_offset: int | None = None  # first slot of its half, if it has half of the last block
        self.state_slot: int | None = None  # of a running request, where layers have a fixed state
        self.windows: WindowTable | None = None  # of a running request, where layers have windows

    @property
    def num_own_blocks(self) -> int:
        """Return the number of blocks that are certain to be freed when the table is closed."""
        return len(self.block_ids) - self.num_reused_blocks - (self.half_offset is not None)

    @property
    def whole_block_ids(self) -> list[int]:
        return self.block_ids if self.half_offset is None else self.block_ids[:-1]

    @property
    def tail(self) -> tuple[int, int] | None:
        """Return the block of which the table has only half, and the first slot of that half."""
        return None if self.half_offset is None else (self.block_ids[-1], self.half_offset)

    def num_missing(self, num_tokens: int) -> int:
        """Return the number of blocks needed to fill the table for this many tokens. Half a block counts as a whole
        one."""
        return -(-num_tokens // self._pool.block_size) - len(self.block_ids)

    def fill(self, num_tokens: int) -> None:
        """Add the missing blocks for this many tokens: from host memory, or with unknown contents. The last
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
        """Add room for the next tokens, for which `num_blocks_to_grow` must be available. Returns whether the last
        tokens moved."""
        tails, offset = self._tails, self.half_offset
        self.num_slots += tails.num_slots
        if offset is None:
            block_id, self.half_offset = tails.take()
            self.block_ids.append(block_id)
            return True
        before = self.block_ids[-1]
        self.block_ids[-1] = tails.widen(before, offset)
        self.half_offset = None
        return self.block_ids[-1] != before or offset != 0

    def open_windows(self) -> None:
        """Take the window blocks that the first token after the found prefix attends to."""
        if self._pool.windows is not None:
            self.windows = WindowTable(self._pool.windows, self._found)

    def open_state(self) -> None:
        """Take a state slot, which starts at the end of the found prefix."""
        if self._pool.states is not None:
            self.state_slot = self._pool.states.open(self._found[-1] if self._found else None)

    def close_state(self, at: BlockHash | None = None) -> None:
        """Give back the state slot, if there is one. With `at`, the state is at the end of the block with this hash,
        and may serve other requests."""
        if self._pool.states is not None and self.state_slot is not None:
            self._pool.states.close(self.state_slot, at)
            self.state_slot = None

    def close(self) -> None:
        """Give back all references. The table is empty afterwards."""
        self.close_state()
        if self.windows is not None:
            self.windows.close()
            self.windows = None
        if self.tail is not None:
            self._tails.give_back(*self.tail)
        self._pool.release(self.whole_block_ids)
        self.block_ids = []
        self.half_offset = None
        self.num_slots = 0

    def _restore(self) -> None:
        """Bring blocks of the found prefix back from host memory."""
        host = self._pool.host.index
        to_restore = [block_hash for block_hash in self._found if block_hash in host]
        restored = dict(zip(to_restore, self._pool.restore(to_restore), strict=True))
        on_device = iter(self.block_ids)
        self.block_ids = [restored[key] if key in restored else next(on_device) for key in self._found]


def num_blocks_to_grow(tables: Iterable[BlockTable], tails: TailHalves) -> int:
    """Return the number of blocks that these tables need to grow together."""
    num_tails = num_blocks = 0
    num_spare = tails.num_spare
    for table in tables:
        if table.half_offset is None:
            num_tails += 1
        elif tails.is_shared(table.block_ids[-1]):
            num_blocks += 1
        else:  # the table takes the other half of its own block
            num_spare -= 1
    return num_blocks + max(0, num_tails - num_spare)
