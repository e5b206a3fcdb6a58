"""Decides which cached prefixes are kept, and until when. Knows hashes and times; no request and no clock.

Prompt caching retains a prefix until a time, which each use may prolong. The pool pins such blocks, which keeps them
from eviction, up to a maximum number of pinned blocks. When a pin must be given up before its time, the retention
stays: the block goes to host memory when it is evicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.core.hashing import BlockHash
from penstock.core.messages import KeptEntry
from penstock.kvcache.block import Block, IntegrityError, RetentionTerm
from penstock.kvcache.pool import BlockPool


class Retention:
    def __init__(self, pool: BlockPool, max_pinned_fraction: float) -> None:
        if not 0.0 <= max_pinned_fraction <= 1.0:
            raise ValueError(f"max_pinned_fraction is a share from 0 to 1, not {max_pinned_fraction}")
        self._pool = pool
        self.max_pinned_blocks = int(pool.num_blocks * max_pinned_fraction)
        self.pins_given_up = 0  # before their time: over max_pinned_blocks, or to let a request run

    @property
    def num_pins(self) -> int:
        """Return the number of blocks that carry a pin, active ones and those of windows too."""
        windows = self._pool.windows
        return len(self._pool.pins) + (windows.num_pinned if windows is not None else 0)

    @property
    def num_lost(self) -> int:
        """Return the number of blocks that a client asked to retain, and that were dropped before their time because
        neither the device nor host memory had room."""
        return self._pool.host.num_lost

    def retain(self, hashes: Sequence[BlockHash], until: float, now: float) -> int:
        """Retain the indexed part of this prefix until a time, or longer if that was decided before. Returns for how
        many of its blocks there is room: blocks that are pinned, are in host memory, or find a free slot there if
        they are evicted. Past `max_pinned_blocks`, the pins with the least time left are given up, which may include
        these."""
        self.expire(now)
        if until <= now:
            return 0
        blocks = []
        num_in_host_memory = 0
        for depth, block_hash in enumerate(hashes):
            block = self._pool.index.get(block_hash)
            if block is not None:
                self._pin(block, depth, until)
                blocks.append(block)
            elif self._pool.host.prolong(block_hash, depth, until, was_asked_for=True):
                num_in_host_memory += 1
            else:
                break
        if self._pool.windows is not None and len(blocks) == len(hashes):
            self._pool.windows.pin(hashes)
        while self.num_pins > self.max_pinned_blocks:
            self._give_up_pin()
        num_pinned = sum(block.pinned_until is not None for block in blocks)
        num_unpinned = len(blocks) - num_pinned
        return num_pinned + num_in_host_memory + min(num_unpinned, self._pool.host.num_free)

    def swap_out(self, hashes: Sequence[BlockHash], until: float, now: float) -> None:
        """Move these blocks to host memory if they are evicted before `until`. Nothing is pinned, and retention that
        was decided before stays as it is."""
        self.expire(now)
        for depth, block_hash in enumerate(hashes):
            block = self._pool.index.get(block_hash)
            if block is None:
                self._pool.host.prolong(block_hash, depth, until, was_asked_for=False)
            elif block.term is None or block.term.until <= now:
                block.term = RetentionTerm(until, depth, was_asked_for=False)

    def retain_entry(self, hashes: Sequence[BlockHash], ttl_s: float, since: float, now: float) -> int:
        """Retain a prefix until `ttl_s` after `since`, as an entry that `entry_ttl_s` finds by its last hash. Returns
        the same as `retain`."""
        num_pinned = self.retain(hashes, since + ttl_s, now)
        last = self._pool.find(hashes[-1])
        if last is not None and last.term is not None and since + ttl_s > now:
            longest = max(ttl_s, last.term.entry_ttl_s or 0.0)
            last.term = replace(last.term, entry_ttl_s=longest)
            self._tell(hashes[-1], last.term, num_pinned, now)
        return num_pinned

    def prolong_entry(self, hashes: Sequence[BlockHash], since: float, now: float) -> None:
        """Prolong the entry that ends with the last of these hashes, if there is one, by its own time to live."""
        ttl_s = self.entry_ttl_s(hashes[-1], now)
        if ttl_s is None:
            return
        before = self._pool.find(hashes[-1])
        until = None if before is None or before.term is None else before.term.until
        num_kept = self.retain(hashes, since + ttl_s, now)
        last = self._pool.find(hashes[-1])
        if last is not None and last.term is not None and last.term.until != until:
            self._tell(hashes[-1], last.term, num_kept, now)

    def entries(self, now: float) -> Iterator[KeptEntry]:
        """Yield the entries that have not ended."""
        for index in (self._pool.index, self._pool.host.index):
            for block_hash, block in index.items():
                term = block.term
                if term is not None and term.entry_ttl_s is not None and term.until > now:
                    yield KeptEntry(block_hash, term.depth + 1, term.until - now)

    def _tell(self, block_hash: BlockHash, term: RetentionTerm, num_kept: int, now: float) -> None:
        if num_kept:
            self._pool.events.kept(KeptEntry(block_hash, num_kept, term.until - now))

    def entry_ttl_s(self, block_hash: BlockHash, now: float) -> float | None:
        """Return the time to live of the entry that ends with this block; None if no entry does, or the entry has
        expired."""
        block = self._pool.find(block_hash)
        term = None if block is None else block.term
        return None if term is None or term.until <= now else term.entry_ttl_s

    def expire(self, now: float) -> int:
        """End the retention of blocks whose time has come; returns how many pins ended. Retention never ends without
        this call."""
        if now > self._pool.now:
            self._pool.now = now
        num_expired = 0
        while (block := self._pool.pins.pop_expired(now)) is not None:
            block.term = None
            self._unpinned(block)
            num_expired += 1
        if self._pool.host.index:
            for block_hash in self._pool.host.expire(now, keeps=self._pool.spills):
                self._pool.lose(block_hash)
        return num_expired

    def give_way(self, num_blocks: int, num_window_blocks: int = 0) -> None:
        """Give up pins, the pin with the least time left first, until enough blocks and window blocks are available,
        or no pin is left."""
        pool = self._pool
        memory = pool if pool.windows is None else pool.windows.memory
        needed = num_blocks + num_window_blocks if memory is pool else num_blocks
        while len(pool.pins) and (pool.num_available < needed or memory.num_available < num_window_blocks):
            self._give_up_pin()

    def check(self) -> None:
        if self.num_pins > self.max_pinned_blocks:
            raise IntegrityError(f"{self.num_pins} blocks are pinned, and {self.max_pinned_blocks} may be")

    def _pin(self, block: Block, depth: int, until: float) -> None:
        """Pin a block until a time, or for as long as it was retained before."""
        was_cached = not block.references and block.pinned_until is None
        term = block.term
        if term is None or term.until <= self._pool.now:
            block.term = RetentionTerm(until, depth)
        else:
            block.term = replace(term, until=max(term.until, until), was_asked_for=True)
        self._pool.pins.extend(block)
        if was_cached:
            self._pool.cached.remove(block)

    def _give_up_pin(self) -> None:
        """Give up the pin with the least time left. Its block stays retained, and goes to host memory when the block
        is evicted."""
        self._unpinned(self._pool.pins.pop_first_to_end())
        self.pins_given_up += 1

    def _unpinned(self, block: Block) -> None:
        """Note that a block lost its pin. Without references it is a cached block, as old as its last use."""
        if self._pool.windows is not None and block.block_hash is not None:
            self._pool.windows.unpin(block.block_hash)
        if not block.references:
            self._pool.cached.add(block)
