"""The KV cache as other rooms see it: prefixes are matched, tables are opened, blocks are published and retained.

    match       how much of a prefix is cached
    BlockTable  the blocks of one request: `open_table`, then `fill`, `grow`, `close`
    publish     other requests may find a full block from now on
    Retention   which prefixes are kept until when

`states` has the slots of layers with a fixed state, `windows` the blocks of layers with a window. `take_copies`
returns the copies of bytes that decisions need. `pool` describes the states of a block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import inf

from penstock.core.hashing import BlockHash
from penstock.core.messages import EngineStats, KVEvent
from penstock.core.plan import KVCopy, StateSlots, WindowLayout
from penstock.kvcache.pool import BlockPool
from penstock.kvcache.retention import Retention
from penstock.kvcache.table import BlockTable, TailHalves, num_blocks_to_grow
from penstock.kvcache.windows import window_memory


def blocks_of_context(
    num_tokens: int, block_size: int, windows: WindowLayout | None, step_tokens: int = 1
) -> int:
    """Return the number of blocks with memory that a request of `num_tokens` needs, if each step computes
    `step_tokens`."""
    num_blocks = -(-num_tokens // block_size)
    if windows is None:
        return num_blocks
    own = window_memory(windows.groups, block_size, num_tokens, step_tokens)
    return own + (num_blocks if windows.num_blocks is None else 0)


def longest_context(num_blocks: int, block_size: int, windows: WindowLayout | None) -> int:
    """Return the most tokens of a request that runs alone in a cache."""
    memory = num_blocks if windows is None or windows.num_blocks is None else windows.num_blocks
    low, high = 0, num_blocks
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_of_context(middle * block_size, block_size, windows) <= memory:
            low = middle
        else:
            high = middle - 1
    return low * block_size


class KVCache:
    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        max_pinned_fraction: float = 0.5,
        num_host_blocks: int = 0,
        halves_blocks: bool = False,
        states: StateSlots | None = None,
        windows: WindowLayout | None = None,
    ) -> None:
        """`halves_blocks`: the executor can keep the last tokens of two requests in one block. `states`: the model
        has layers with a fixed state. `windows`: the model has layers that free the blocks behind their window."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_host_blocks = num_host_blocks
        self.pool = BlockPool(  # for this room, figures and tests
            num_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            states=states,
            windows=windows,
        )
        self.states = self.pool.states
        self.windows = self.pool.windows
        self.window_layout = windows
        # Window blocks take their memory from the pool of all blocks, or have a pool of their own.
        self.has_window_memory = windows is not None and windows.num_blocks is not None
        self.retention = Retention(self.pool, max_pinned_fraction)
        self._tails = TailHalves(self.pool, enabled=halves_blocks)

        self._restarted_s = (
            -inf
        )  # when events were restarted: no request may have told the time since long ago

        # Counters since construction.
        self.lookup_tokens = 0
        self.hit_tokens = 0

        # The most frequent calls go straight to the pool.
        self.match = self.pool.match
        self.match_on_device = self.pool.match_on_device
        self.publish = self.pool.publish
        self.withdraw = self.pool.withdraw

    @property
    def num_available(self) -> int:
        """Return the number of blocks that tables could get now."""
        return self.pool.num_available

    @property
    def num_memory_blocks(self) -> int:
        """Return the number of blocks with memory. A model in which every layer has a window uses its pool blocks
        only to count tokens; its memory is in window blocks."""
        layout = self.window_layout
        return self.num_blocks if layout is None or layout.num_blocks is None else layout.num_blocks

    @property
    def num_memory_available(self) -> int:
        """Return the number of blocks with memory that requests could get now."""
        return self.num_available if self.windows is None else self.windows.memory.num_available

    def num_spare(self, num_blocks: int, num_window_blocks: int) -> int:
        """Return how many blocks remain after requests take these many blocks and window blocks. A negative result is
        the number of missing blocks."""
        if not self.has_window_memory:
            return self.num_available - num_blocks - num_window_blocks
        lacking = min(0, self.num_available - num_blocks)
        return lacking or self.num_memory_available - num_window_blocks

    def longest_context(self) -> int:
        """Return the most tokens of a request that runs alone."""
        return longest_context(self.num_blocks, self.block_size, self.window_layout)

    @property
    def usage(self) -> float:
        """Return the share of blocks that no request can get now: active or pinned blocks."""
        return 1.0 - self.num_memory_available / self.num_memory_blocks

    @property
    def tail_slots(self) -> int:
        """Return the number of tokens by which a table grows."""
        return self._tails.num_slots

    def open_table(self, found: Sequence[BlockHash] = ()) -> BlockTable:
        """Open a table that starts with the blocks of a matched prefix. These blocks cannot be evicted from now
        on."""
        return BlockTable(self.pool, self._tails, found)

    def share_blocks(self, block_ids: Sequence[int]) -> BlockTable:
        """Open a table of blocks that another table has too, indexed or not."""
        self.pool.share(block_ids)
        table = BlockTable(self.pool, self._tails)
        table.block_ids = list(block_ids)
        return table

    def num_blocks_to_grow(self, tables: Iterable[BlockTable]) -> int:
        """Return the number of blocks that these tables need to grow together."""
        return num_blocks_to_grow(tables, self._tails)

    def record_lookup(self, num_tokens: int, num_hit_tokens: int) -> None:
        """Count the tokens of a request that starts, and its cached tokens."""
        self.lookup_tokens += num_tokens
        self.hit_tokens += num_hit_tokens

    @property
    def has_copies(self) -> bool:
        """Return whether blocks that were handed out still hold contents to be copied."""
        return self.pool.has_copies

    def take_copies(self) -> tuple[KVCopy, ...]:
        """Return the copies that decisions since the last call need, in order. They are made after all steps planned
        before, and before any step planned from now on writes."""
        return self.pool.take_copies()

    def take_events(self) -> list[KVEvent]:
        """Return the changes of the index since the last call, in order. If the missed events would be more than the
        whole index, the events are `cleared` and then the whole index."""
        now = max(self.pool.now, self._restarted_s)
        return self.pool.events.take(self.pool.indexed(), self.retention.entries(now))

    def restart_events(self, now: float = -inf) -> None:
        """Make the next `take_events` return `cleared`, the whole index and all prefixes that are kept, for a reader
        that has missed events."""
        self._restarted_s = now
        self.pool.events.restart()

    def stats(self) -> EngineStats:
        """Return the cache's part of EngineStats."""
        pool, retention = self.pool, self.retention
        return EngineStats(
            num_kv_blocks=self.num_memory_blocks,
            num_kv_blocks_used=self.num_memory_blocks - self.num_memory_available,
            prefix_cache_queries=self.lookup_tokens,
            prefix_cache_hits=self.hit_tokens,
            num_pinned_blocks=retention.num_pins,
            num_pins_demoted=retention.pins_given_up,
            num_host_blocks=self.num_host_blocks,
            num_host_blocks_used=len(pool.host),
            num_blocks_to_host=pool.copies_to_host,
            num_blocks_from_host=pool.copies_from_host,
            num_kept_blocks_lost=retention.num_lost,
        )

    def check_integrity(self, tables: Collection[BlockTable] | None = None) -> None:
        """Raise IntegrityError unless every block is in exactly one state and all records agree. With all open
        tables, also check that reference counts and halves of blocks are exactly theirs."""
        block_tables = None if tables is None else [table.block_ids for table in tables]
        windows = [table.windows for table in tables or () if table.windows is not None]
        self.pool.check_integrity(block_tables, windows)
        self.retention.check()
        if self.states is not None:
            slots = None if tables is None else {table.state_slot for table in tables} - {None}
            self.states.check_integrity(slots)
        if tables is not None:
            self._tails.check_integrity(table.tail for table in tables if table.tail is not None)
