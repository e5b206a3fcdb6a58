"""Blocks of layers with a window, which attend only to the newest tokens of a request. Knows ids, hashes and counts
of tokens; no tensor and no clock.

A request frees a block of such layers when its next token no longer attends to any token of that block. So the table
of a group of layers is a short run of blocks that moves along with the request, beside the growing table of the
layers with full attention.

The memory of a window block is made of blocks of a pool: `num_parts` of them, since a group has several times as many
layers as a block of the pool has room for. Both kinds of blocks thus share all memory, whatever the lengths of
requests. If every layer of a model has a window, there is a pool for their blocks alone, and the block table only
counts tokens.

A prefix of n blocks can be reused if the blocks of its tokens are indexed, and the window blocks that the next token
sees. A window block can be found by the hash of the block of the same tokens, and goes when that block goes.

    active     one or more tables have the block
    wanted     no table has the block, and a later request is likely to start after it: a prompt, a cached prefix or
               the last token of a request ended within sight of it
    spent      no table has the block, and requests start after it only by chance: evicted before anything else
    pinned     a retained prefix ends within sight of the block; the pin ends with the pin of that prefix's last block
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

from penstock.core.hashing import BlockHash
from penstock.core.plan import WindowBlocks, WindowGroup
from penstock.kvcache.block import IntegrityError


def blocks_in_sight(group: WindowGroup, block_size: int) -> int:
    """Return the largest number of whole blocks in the window of the token after them."""
    return group.window // block_size if group.in_chunks else -(-(group.window - 1) // block_size)


def window_memory(
    groups: Iterable[WindowGroup], block_size: int, num_tokens: int, step_tokens: int = 1
) -> int:
    """Return the blocks of memory that windows need for a request of this many tokens, of which each step computes at
    most `step_tokens`."""
    num_blocks, step = -(-num_tokens // block_size), -(-step_tokens // block_size) + 1
    return sum(each.num_parts * min(num_blocks, blocks_in_sight(each, block_size) + step) for each in groups)


class BlockMemory(Protocol):
    """The part of a block pool that window blocks take their memory from."""

    @property
    def num_available(self) -> int: ...

    def allocate(self, count: int) -> list[int] | None: ...

    def release(self, block_ids: Sequence[int]) -> None: ...

    def next_use(self) -> int: ...


class WindowBlock:
    """The memory of one block of tokens in one group of layers."""

    __slots__ = ("block_hash", "block_ids", "group", "is_wanted", "last_use", "num_pins", "references")

    def __init__(self, group: int, block_ids: list[int]) -> None:
        self.group = group
        self.block_ids = block_ids
        self.references = 1
        self.block_hash: BlockHash | None = None  # set exactly while the index leads to this block
        self.is_wanted = False
        self.num_pins = 0  # retained prefixes that end within the window after this block
        self.last_use = 0  # the pool's counter of releases

    @property
    def comes_free(self) -> bool:
        """Return whether the memory is available once a table that has this block gives it back."""
        return self.references == 1 and not self.num_pins


class WindowPool:
    def __init__(self, memory: BlockMemory, groups: Sequence[WindowGroup], block_size: int) -> None:
        if not groups or any(group.window < 1 or group.num_parts < 1 for group in groups):
            raise ValueError(f"groups of layers with a window need a window and blocks, not {groups}")
        if any(group.in_chunks and group.window % block_size for group in groups):
            raise ValueError(f"chunks of tokens are whole blocks of {block_size}, unlike in {groups}")
        self.groups = tuple(groups)
        self.block_size = block_size
        self.num_parts = sum(group.num_parts for group in groups)
        self.memory = memory
        self._index: list[dict[BlockHash, WindowBlock]] = [{} for _ in groups]
        self._spent: OrderedDict[WindowBlock, None] = OrderedDict()  # the oldest first
        self._wanted: OrderedDict[WindowBlock, None] = OrderedDict()
        self._pinned: dict[BlockHash, list[WindowBlock]] = {}  # by the last block of a retained prefix
        self.num_evictable = 0  # blocks of memory
        self.num_pinned = 0  # blocks of memory

    def first_needed(self, group: int, num_tokens: int) -> int:
        """Return the first block that a request with this many computed tokens still needs."""
        return self.groups[group].first_seen(num_tokens) // self.block_size

    def blocks_of_memory(self, num_tokens: int, step_tokens: int) -> int:
        """Return the memory of a request, as `window_memory` does."""
        return window_memory(self.groups, self.block_size, num_tokens, step_tokens)

    def longest(self, hashes: Sequence[BlockHash]) -> int:
        """Return after how many leading blocks of a prefix a request can start. Changes nothing."""
        count, before = len(hashes), -1
        while count and count != before:
            before = count
            for group, index in enumerate(self._index):
                count = self._longest_in(group, index, hashes, count)
        return count

    def _longest_in(
        self, group: int, index: dict[BlockHash, WindowBlock], hashes: Sequence[BlockHash], count: int
    ) -> int:
        while count:
            first = self.first_needed(group, count * self.block_size)
            missing = next((at for at in range(count - 1, first - 1, -1) if hashes[at] not in index), None)
            if missing is None:
                break
            count = missing
        return count

    def acquire(self, group: int, block_hash: BlockHash) -> WindowBlock:
        block = self._index[group][block_hash]
        block.references += 1
        if block.references == 1 and not block.num_pins:
            self._keep(block)
        return block

    def take(self, group: int) -> WindowBlock:
        """Take a block with unknown contents. There must be memory."""
        block_ids = self.memory.allocate(self.groups[group].num_parts)
        if block_ids is None:
            raise IntegrityError("a window moves on without memory: see `num_missing`")
        return WindowBlock(group, block_ids)

    def release(self, block: WindowBlock, *, is_wanted: bool) -> None:
        block.references -= 1
        if block.references:
            return
        if block.block_hash is None:
            self.memory.release(block.block_ids)
            return
        block.is_wanted |= is_wanted
        block.last_use = self.memory.next_use()
        if not block.num_pins:
            self._offer(block)

    def publish(self, block: WindowBlock, block_hash: BlockHash) -> None:
        """Index a full block. If the hash is indexed already, the older block stays."""
        if block.block_hash is None and block_hash not in self._index[block.group]:
            block.block_hash = block_hash
            self._index[block.group][block_hash] = block

    def withdraw(self, block: WindowBlock) -> None:
        """Remove a block of a table from the index."""
        if block.block_hash is not None:
            self._drop(block)

    def pin(self, hashes: Sequence[BlockHash]) -> None:
        """Pin the blocks that a request needs to start after this prefix, until `unpin` of its last hash."""
        if not hashes or hashes[-1] in self._pinned or self.longest(hashes) < len(hashes):
            return
        end = len(hashes) * self.block_size
        blocks = [
            index[block_hash]
            for group, index in enumerate(self._index)
            for block_hash in hashes[self.first_needed(group, end) :]
        ]
        for block in blocks:
            if not block.num_pins:
                if not block.references:
                    self._keep(block)
                self.num_pinned += len(block.block_ids)
            block.num_pins += 1
            block.is_wanted = True
        self._pinned[hashes[-1]] = blocks

    def unpin(self, block_hash: BlockHash) -> None:
        """End the pin of the prefix that ends with this block, if there is one."""
        for block in self._pinned.pop(block_hash, ()):
            block.num_pins -= 1
            if not block.num_pins:
                self.num_pinned -= len(block.block_ids)
                if not block.references:
                    self._offer(block)

    def forget(self, block_hash: BlockHash) -> None:
        """Drop the window blocks of a block that is no longer indexed."""
        self.unpin(block_hash)
        for index in self._index:
            block = index.get(block_hash)
            if block is not None:
                self._drop(block)

    def clear(self) -> None:
        """Remove all blocks from the index."""
        for index in self._index:
            for block in list(index.values()):
                self._drop(block)
        self._pinned.clear()

    def is_evicted_before(self, last_use: int | None) -> bool:
        """Return whether a window block is evicted before a pool block with this last use; None: there is no pool
        block."""
        if self._spent or not self._wanted or last_use is None:
            return self.num_evictable > 0
        return next(iter(self._wanted)).last_use < last_use

    def evict(self) -> None:
        """Free the memory of a block: the oldest of the spent blocks, or else of the wanted ones."""
        self._drop(next(iter(self._spent or self._wanted)))

    def indexed(self, group: int) -> Iterable[BlockHash]:
        return self._index[group]

    def check_integrity(self, tables: Iterable[WindowTable] | None = None) -> None:
        """Raise IntegrityError unless every block is in one place and the counts are right."""
        blocks = [block for index in self._index for block in index.values()]
        for index in self._index:
            if any(block.block_hash != block_hash for block_hash, block in index.items()):
                raise IntegrityError("a hash leads to a window block that holds something else")
        idle = {block for block in blocks if not block.references and not block.num_pins}
        if idle != {*self._spent, *self._wanted} or len(self._spent) + len(self._wanted) != len(idle):
            raise IntegrityError("window blocks are evictable and not listed, or the reverse")
        if self.num_evictable != sum(len(block.block_ids) for block in idle):
            raise IntegrityError("the count of evictable window blocks is wrong")
        if self.num_pinned != sum(len(block.block_ids) for block in blocks if block.num_pins):
            raise IntegrityError("the count of pinned window blocks is wrong")
        pins = Counter(block for pinned in self._pinned.values() for block in pinned)
        if any(pins[block] != block.num_pins for block in {*blocks, *pins}):
            raise IntegrityError("a window block has pins that no prefix knows")
        if tables is not None:
            held = Counter(block for table in tables for row in table.rows for block in row)
            if any(held[block] != block.references for block in {*held, *blocks}):
                raise IntegrityError("references to window blocks are not those of the tables")

    def holdings(self, tables: Iterable[WindowTable]) -> Iterator[list[int]]:
        """Return the memory of all window blocks, which belongs to this pool."""
        blocks = {block for index in self._index for block in index.values()}
        blocks.update(block for table in tables for row in table.rows for block in row)
        return (block.block_ids for block in blocks)

    def _offer(self, block: WindowBlock) -> None:
        """Make a block evictable."""
        (self._wanted if block.is_wanted else self._spent)[block] = None
        self.num_evictable += len(block.block_ids)

    def _keep(self, block: WindowBlock) -> None:
        """Make a block not evictable."""
        del (self._wanted if block.is_wanted else self._spent)[block]
        self.num_evictable -= len(block.block_ids)

    def _drop(self, block: WindowBlock) -> None:
        """Take a block out of the index; its memory is freed unless tables have the block."""
        assert block.block_hash is not None
        del self._index[block.group][block.block_hash]
        block.block_hash = None
        if block.num_pins:
            self.num_pinned -= len(block.block_ids)
            block.num_pins = 0
            for pinned in self._pinned.values():
                if block in pinned:
                    pinned.remove(block)
        elif not block.references:
            self._keep(block)
        if not block.references:
            self.memory.release(block.block_ids)


class WindowTable:
    """The window blocks of one request: a run of blocks in each group, all of which end at the same token."""

    __slots__ = ("_num_told", "_pool", "end", "firsts", "rows", "wanted_ends")

    def __init__(self, pool: WindowPool, found: Sequence[BlockHash]) -> None:
        """Take the blocks that the first token after a prefix attends to. `WindowPool.longest` has found them."""
        self._pool = pool
        self.end = len(found)  # in blocks
        self.firsts = [
            pool.first_needed(group, self.end * pool.block_size) for group in range(len(pool.groups))
        ]
        self.rows: list[deque[WindowBlock]] = [
            deque(pool.acquire(group, block_hash) for block_hash in found[first:])
            for group, first in enumerate(self.firsts)
        ]
        self.wanted_ends: list[
            int
        ] = []  # ends of prefixes, in blocks, where later requests are likely to start
        self._num_told = 0  # blocks that the executor knows

    @property
    def num_blocks(self) -> int:
        """Return the blocks of memory that the table has."""
        groups = self._pool.groups
        return sum(len(row) * each.num_parts for row, each in zip(self.rows, groups, strict=True))

    def num_missing(self, start: int, end: int) -> int:
        """Return the blocks of memory that must be available to compute tokens `[start, end)`."""
        num_new = max(0, -(-end // self._pool.block_size) - self.end)
        return max(0, num_new * self._pool.num_parts - self._num_spare(start)) if num_new else 0

    def reach(self, start: int, num_tokens: int) -> int:
        """Return how many tokens from `start` on, and at most `num_tokens`, there is memory for."""
        pool = self._pool
        num_new = (pool.memory.num_available + self._num_spare(start)) // pool.num_parts
        return max(0, min(num_tokens, (self.end + num_new) * pool.block_size - start))

    def advance(self, start: int, end: int) -> None:
        """Make room for tokens `[start, end)`, and free the blocks that no token from `start` on attends to. The
        steps planned before have read it by the time that a step planned from now on overwrites it."""
        pool = self._pool
        for group, row in enumerate(self.rows):
            first = self.firsts[group]
            needed = pool.first_needed(group, start)
            while first < needed and row:
                pool.release(row.popleft(), is_wanted=self._is_wanted(group, first))
                first += 1
            self.firsts[group] = max(first, needed)
        for _ in range(-(-end // pool.block_size) - self.end):
            for group, row in enumerate(self.rows):
                row.append(pool.take(group))
            self.end += 1

    def take_new(self) -> tuple[WindowBlocks, ...]:
        """Return the blocks that the executor does not know yet."""
        told, self._num_told = self._num_told, self.end
        return tuple(
            WindowBlocks(group, max(told, first), _ids(row, max(0, told - first)))
            for group, (row, first) in enumerate(zip(self.rows, self.firsts, strict=True))
            if max(told, first) < self.end
        )

    def publish(self, index: int, block_hash: BlockHash) -> None:
        """Index the window blocks of a full block."""
        for row, first in zip(self.rows, self.firsts, strict=True):
            if index >= first:
                self._pool.publish(row[index - first], block_hash)

    def withdraw(self, index: int) -> set[WindowBlock]:
        """Remove the blocks from the `index`-th on from the index, because their contents were never written. Returns
        these blocks."""
        lost = {
            row[at]
            for row, first in zip(self.rows, self.firsts, strict=True)
            for at in range(max(0, index - first), len(row))
        }
        for block in lost:
            self._pool.withdraw(block)
        return lost

    def has_any(self, blocks: Collection[WindowBlock]) -> bool:
        return bool(blocks) and any(block in blocks for row in self.rows for block in row)

    def close(self) -> None:
        """Free all blocks. Later requests are likely to continue from here."""
        for row in self.rows:
            for block in row:
                self._pool.release(block, is_wanted=True)
            row.clear()

    def _num_spare(self, start: int) -> int:
        """Return the blocks of memory that are certain to be freed when the tokens from `start` on are computed."""
        spare = 0
        for group, row in enumerate(self.rows):
            count = min(len(row), self._pool.first_needed(group, start) - self.firsts[group])
            for at in range(count):
                if row[at].comes_free:
                    spare += len(row[at].block_ids)
        return spare

    def _is_wanted(self, group: int, index: int) -> bool:
        reach = index + blocks_in_sight(self._pool.groups[group], self._pool.block_size)
        return any(index < end <= reach for end in self.wanted_ends)


def _ids(row: deque[WindowBlock], start: int) -> tuple[int, ...]:
    return tuple(part for at in range(start, len(row)) for part in row[at].block_ids)
