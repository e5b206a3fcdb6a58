"""The pool of KV blocks and its prefix index. Knows ids, hashes and reference counts; no tensor, token, request or
clock. Used by this room only: other rooms use `KVCache`, `BlockTable` and `Retention`.

Every block is in exactly one state, which follows from three facts about it:

    state    references  indexed  pinned   becomes
    free     0           no       no       active by allocate
    active   1 or more   either   either   on last release: free if not indexed, pinned if pinned, else cached
    cached   0           yes      no       active by acquire; pinned by retention; free when evicted or cleared
    pinned   0           yes      yes      active by acquire; cached when the pin ends; free when cleared

"Indexed" means that the block is full, and is found by its hash: any request with the same prefix may take a
reference, also while other requests hold one, and nothing is copied. A hash leads to one block. A request that
computes the same prefix at the same time gets a private block, which becomes free on release.

An evicted block that is still retained goes to a slot of host memory, if there is one, and `restore` copies it back.
With `spills`, all evicted blocks do.
A hash leads to a block or to a slot, never to both. `take_copies` returns the copies of bytes that follow.

Methods that take hashes expect them in chain order from the start of the chain. All work is O(1) per block, except
for an eviction, which is O(log) of the number of chain tails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf

from penstock.core.hashing import BlockHash
from penstock.core.plan import BlockCopy, HalfCopy, KVCopy, StateCopy, StateSlots, WindowLayout
from penstock.kvcache.block import Block, BlockState, EventLog, IntegrityError
from penstock.kvcache.eviction import EvictionOrder, HostTier, PinHeap
from penstock.kvcache.states import StatePool
from penstock.kvcache.windows import WindowPool, WindowTable


class BlockPool:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        num_host_blocks: int,
        states: StateSlots | None = None,
        windows: WindowLayout | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a cache needs blocks and tokens in them, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.index: dict[BlockHash, Block] = {}  # only this class changes it
        # Records are made when blocks are first handed out: a large cache, or a simulation of many, starts at once.
        self._blocks: list[Block] = []
        self._free: list[
            int
        ] = []  # ids of blocks that were used before; a stack: the block freed last is reused first
        self.cached = EvictionOrder(self._blocks, self.index, num_blocks)
        self.pins = PinHeap(self._blocks, num_blocks)  # shared with Retention, which decides what is pinned
        self.host = HostTier(num_host_blocks)
        self.events = EventLog(max_pending_hashes=2 * num_blocks + 1024)
        self.states = None if states is None else StatePool(self, states)
        self.windows: WindowPool | None = None  # window blocks that share the hashes of this pool's blocks
        self._window_pool: WindowPool | None = None  # window blocks that take their memory from this pool
        if windows is not None:
            self._open_windows(windows)
        # True if evicted blocks that are not retained go to host memory; set by the scheduler.
        self.spills = False
        self.now = -inf  # the latest time that a caller has passed
        self._copies: list[KVCopy] = []  # in the order of the decisions that need them
        self._num_active = 0
        self._num_releases = 0

        # Counters since construction.
        self.copies_to_host = 0
        self.copies_from_host = 0

    def _open_windows(self, layout: WindowLayout) -> None:
        memory = self
        if layout.num_blocks is not None:
            memory = BlockPool(
                layout.num_blocks, self.block_size, enable_prefix_caching=False, num_host_blocks=0
            )
        self.windows = memory._window_pool = WindowPool(memory, layout.groups, self.block_size)

    @property
    def num_available(self) -> int:
        """Return the number of blocks that `allocate` could hand out now."""
        num_available = self.num_blocks - len(self._blocks) + len(self._free) + len(self.cached)
        return num_available if self._window_pool is None else num_available + self._window_pool.num_evictable

    def next_use(self) -> int:
        """Count a release. Returns the count, by which blocks are ordered for eviction."""
        self._num_releases += 1
        return self._num_releases

    @property
    def num_free(self) -> int:
        return self.num_blocks - len(self._blocks) + len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self.cached)

    @property
    def num_active(self) -> int:
        return self._num_active

    @property
    def num_pinned(self) -> int:
        """Return the number of blocks held by a pin alone. A pinned block that requests use counts as active."""
        return len(self._blocks) - len(self._free) - len(self.cached) - self._num_active

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """Count the leading hashes that are indexed, here or in host memory. Changes nothing."""
        index, host = self.index, self.host.index
        for position, block_hash in enumerate(hashes):
            if block_hash not in index and block_hash not in host:
                return position
        return len(hashes)

    def match_on_device(self, hashes: Sequence[BlockHash]) -> int:
        """Count the leading hashes that are indexed here. Changes nothing."""
        index = self.index
        for position, block_hash in enumerate(hashes):
            if block_hash not in index:
                return position
        return len(hashes)

    def find(self, block_hash: BlockHash) -> Block | None:
        """Return the block, or the slot of host memory, with this hash."""
        return self.index.get(block_hash) or self.host.index.get(block_hash)

    def acquire(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Take a reference on each of these blocks. Raises, and changes nothing, if one is not on the device."""
        try:
            blocks = [self.index[block_hash] for block_hash in hashes]
        except KeyError as missing:
            raise IntegrityError(f"block {missing} is not indexed: match before acquiring") from None
        for block in blocks:
            block.references += 1
            if block.references == 1:
                self._num_active += 1
                if block.pinned_until is None:
                    self.cached.remove(block)
        return [block.block_id for block in blocks]

    def allocate(self, count: int) -> list[int] | None:
        """Hand out blocks with unknown contents and one reference each, and evict cached blocks as needed. Returns
        None, and changes nothing, when there are too few."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        free, blocks = self._free, self._blocks
        num_new = count - len(free)
        if num_new < 0:
            num_new = 0
        elif num_new > self.num_blocks - len(blocks):
            if count > self.num_available:
                return None
            num_new = self.num_blocks - len(blocks)
            while len(free) + num_new < count:
                self._make_room()
        taken = [free.pop() for _ in range(count - num_new)] if free else []
        for block_id in taken:
            blocks[block_id].references = 1
        for block_id in range(len(blocks), len(blocks) + num_new):
            block = Block(block_id)
            block.references = 1
            blocks.append(block)
            taken.append(block_id)
        self._num_active += count
        return taken

    def restore(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Bring blocks back from host memory, with one reference each. As many blocks must be available."""
        # The slots stay reserved meanwhile, because making room may move other blocks to host memory.
        slots = [self.host.take(block_hash) for block_hash in hashes]
        block_ids = self.allocate(len(slots))
        if block_ids is None:
            raise IntegrityError(f"{len(slots)} blocks are restored, and {self.num_available} are available")
        for block_id, slot in zip(block_ids, slots, strict=True):
            self._move_in(slot, self._blocks[block_id])
            self._copies.append(BlockCopy(block_id, slot.block_id, to_host=False))
        self.copies_from_host += len(slots)
        return block_ids

    def copy_half(self, block_id: int, offset: int, to_block_id: int) -> None:
        """Copy half a block to the start of another block, or of the same block."""
        self._copies.append(HalfCopy(block_id, offset, to_block_id))

    def copy_state(self, copy: StateCopy) -> None:
        """Copy a state, in order with the copies of blocks."""
        self._copies.append(copy)

    def lose(self, block_hash: BlockHash) -> None:
        """Record that no block and no slot has this hash any more."""
        self.events.removed(block_hash)
        if self.states is not None:
            self.states.forget(block_hash)
        if self.windows is not None:
            self.windows.forget(block_hash)

    def take_copies(self) -> tuple[KVCopy, ...]:
        """Return the copies that decisions since the last call need, in order. They are made after all steps planned
        before, and before any step planned from now on writes."""
        if not self._copies:
            return ()
        copies, self._copies = tuple(self._copies), []
        return copies

    @property
    def has_copies(self) -> bool:
        """Return whether blocks that were handed out still hold contents to be copied."""
        return bool(self._copies)

    def share(self, block_ids: Sequence[int]) -> None:
        """Take another reference on each of these active blocks, indexed or not."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if not block.references:
                raise IntegrityError(f"block {block_id} is shared, but no table holds it")
            block.references += 1

    def publish(self, block_id: int, block_hash: BlockHash, parent: BlockHash) -> None:
        """Index an active block that is now full of known tokens. If another block already holds that hash,
        the index keeps the older one, and this block stays private."""
        block = self._blocks[block_id]
        if not block.references:
            raise IntegrityError(f"block {block_id} is published, but no table holds it")
        if block.block_hash is not None and block.block_hash != block_hash:
            raise IntegrityError(f"block {block_id} is published twice, with different contents")
        if not self.enable_prefix_caching or block_hash in self.index:
            return
        if block_hash in self.host.index:  # computed again: the copy in host memory is obsolete
            self._move_in(self.host.take(block_hash), block)
            return
        block.block_hash = block_hash
        block.parent = parent
        self.index[block_hash] = block
        self.events.stored(block_hash, parent)

    def withdraw(self, block_ids: Iterable[int]) -> None:
        """Take active blocks out of the index because their contents were never written. Their tables keep them, and
        no other request finds them."""
        for block in (self._blocks[block_id] for block_id in block_ids):
            if block.block_hash is None:
                continue
            if not block.references:
                raise IntegrityError(f"block {block.block_id} is withdrawn, but no table holds it")
            del self.index[block.block_hash]
            if block.pinned_until is not None:
                self.pins.end(block)
            self.lose(block.block_hash)
            block.block_hash = block.parent = block.term = None

    def release(self, block_ids: Sequence[int]) -> None:
        """Release one reference to each block; ids in chain order. A block without references stays reusable
        if indexed, and is free at once if not."""
        blocks = self._blocks
        for block_id in reversed(block_ids):
            block = blocks[block_id]
            if block.references > 1:
                block.references -= 1
                continue
            if not block.references:
                raise IntegrityError(f"block {block_id} is released, but no table holds it")
            block.references = 0
            self._num_active -= 1
            if block.block_hash is None:
                self._free.append(block_id)
                continue
            block.last_use = self.next_use()
            if block.pinned_until is None:
                self.cached.add(block)

    def clear(self) -> None:
        """Forget every prefix, pins included. Active blocks stay with their holders, are no longer indexed, and are
        free once released."""
        self.pins.clear()
        self.cached.clear()
        self.host.clear()
        for block in self.index.values():
            block.block_hash = block.parent = block.term = None
            if not block.references:
                self._free.append(block.block_id)
        self.index.clear()
        self.events.cleared()
        if self.states is not None:
            self.states.clear()
        if self.windows is not None:
            self.windows.clear()

    def check_integrity(
        self, tables: Iterable[Sequence[int]] | None = None, windows: Sequence[WindowTable] = ()
    ) -> None:
        """Raise IntegrityError unless every block is in exactly one state and all records agree. With the block
        tables of every holder of references, also check that the reference counts are exactly those."""
        if self.windows is not None:
            self.windows.check_integrity(None if tables is None else windows)
            memory = self.windows.memory
            if isinstance(memory, BlockPool) and memory is not self:
                memory.check_integrity(None if tables is None else (), windows)
        if tables is not None and self._window_pool is not None:
            tables = [*tables, *self._window_pool.holdings(windows)]
        check_cache(self._blocks, self._free, self.index, tables)
        self.cached.check()
        self.pins.check()
        self.host.check()
        if not self.index.keys().isdisjoint(self.host.index):
            raise IntegrityError("a hash leads to a block and to a slot of host memory")
        if self._num_active != sum(block.references > 0 for block in self._blocks):
            raise IntegrityError(f"the count of active blocks, {self._num_active}, is wrong")

    def indexed(self) -> Iterator[tuple[BlockHash, BlockHash]]:
        """Yield (hash, parent) of every indexed block and slot."""
        for index in (self.index.items(), self.host.index.items()):
            for block_hash, block in index:
                if block.parent is not None:
                    yield block_hash, block.parent

    def _make_room(self) -> None:
        """Evict the block with the least value."""
        window_pool = self._window_pool
        if window_pool is not None and window_pool.num_evictable:
            tail = self.cached.oldest_tail() if len(self.cached) else None
            if window_pool.is_evicted_before(None if tail is None else tail.last_use):
                window_pool.evict()
                return
        self._evict(self.cached.oldest_tail())

    def _evict(self, block: Block) -> None:
        block_hash = block.block_hash
        assert block_hash is not None
        del self.index[block_hash]
        self.cached.remove(block)
        lost: BlockHash | None = block_hash
        if block.term is not None and block.term.until <= self.now:
            block.term = None
        if block.term is not None or self.spills:
            lost = self._move_out(block)
        if lost is not None:
            self.lose(lost)
        block.block_hash = block.parent = block.term = None
        self._free.append(block.block_id)

    def _move_out(self, block: Block) -> BlockHash | None:
        """Move a block to host memory. Returns the hash that is now in neither tier, if there is one."""
        lost = self.host.store(block)
        if lost != block.block_hash:
            assert block.block_hash is not None
            slot = self.host.index[block.block_hash]
            self._copies.append(BlockCopy(block.block_id, slot.block_id, to_host=True))
            self.copies_to_host += 1
        return lost

    def _move_in(self, slot: Block, block: Block) -> None:
        """Move the contents of a slot of host memory into an active block."""
        assert slot.block_hash is not None
        block.block_hash, block.parent, block.term = slot.block_hash, slot.parent, slot.term
        self.index[slot.block_hash] = block
        self.host.free(slot)


def check_cache(
    blocks: Sequence[Block],
    free: Sequence[int],
    index: Mapping[BlockHash, Block],
    tables: Iterable[Sequence[int]] | None,
) -> None:
    _check_free_list(blocks, free)
    _check_index(blocks, index)
    if tables is not None:
        _check_references(blocks, tables)


def _check_free_list(blocks: Sequence[Block], free: Sequence[int]) -> None:
    if len(set(free)) != len(free):
        raise IntegrityError("the free list holds a block twice")
    should_be_free = {block.block_id for block in blocks if block.state is BlockState.FREE}
    if set(free) != should_be_free:
        raise IntegrityError(
            f"blocks {sorted(set(free) ^ should_be_free)} are free but not listed, or the reverse"
        )


def _check_index(blocks: Sequence[Block], index: Mapping[BlockHash, Block]) -> None:
    for block_hash, block in index.items():
        if block.block_hash != block_hash:
            raise IntegrityError(f"a hash leads to block {block.block_id}, which holds something else")
        if block is not blocks[block.block_id]:
            raise IntegrityError(f"the index holds a foreign record of block {block.block_id}")
    for block in blocks:
        if block.references < 0:
            raise IntegrityError(f"block {block.block_id} has {block.references} references")
        if (block.block_hash is None) != (block.parent is None):
            raise IntegrityError(f"block {block.block_id} has a hash without a parent, or the reverse")
        if block.block_hash is not None and index.get(block.block_hash) is not block:
            raise IntegrityError(
                f"block {block.block_id} counts as indexed, but its hash does not lead to it"
            )
        if block.block_hash is None and (block.pinned_until is not None or block.term is not None):
            raise IntegrityError(f"block {block.block_id} is pinned or retained but not indexed")
        if block.pinned_until is not None and (block.term is None or block.term.until != block.pinned_until):
            raise IntegrityError(f"block {block.block_id} is not pinned for as long as it is retained")


def _check_references(blocks: Sequence[Block], tables: Iterable[Sequence[int]]) -> None:
    holders = Counter(block_id for table in tables for block_id in table)
    for block in blocks:
        held = holders[block.block_id]
        if block.references != held:
            raise IntegrityError(
                f"block {block.block_id} has {block.references} references, but tables hold it {held} times"
            )
