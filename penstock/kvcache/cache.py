"""The KV cache as other rooms see it: prefixes are matched, tables are opened, blocks are published and retained.

    match       how much of a prefix is cached
    BlockTable  the blocks of one request: `open_table`, then `fill`, `grow`, `close`
    publish     other requests may find a full block from now on
    Retention   which prefixes are kept until when

What a decision means for bytes is a list of copies, which `take_copies` returns. The states of a block are described
in `pool`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from penstock.core.hashing import BlockHash
from penstock.core.messages import KVEvent
from penstock.core.plan import KVCopy
from penstock.kvcache.pool import BlockPool
from penstock.kvcache.retention import Retention
from penstock.kvcache.table import BlockTable, TailHalves, num_blocks_to_grow


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
    ) -> None:
        """`halves_blocks`: the executor can have the last tokens of two requests in one block."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_host_blocks = num_host_blocks
        self.pool = BlockPool(  # for this room, figures and tests
            num_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            num_host_blocks=num_host_blocks,
        )
        self.retention = Retention(self.pool, max_pinned_fraction)
        self._tails = TailHalves(self.pool, enabled=halves_blocks)

        # Counters since construction.
        self.lookup_tokens = 0
        self.hit_tokens = 0

        # What is called most often goes to the pool without a detour.
        self.match = self.pool.match
        self.match_on_device = self.pool.match_on_device
        self.publish = self.pool.publish
        self.withdraw = self.pool.withdraw

    @property
    def num_available(self) -> int:
        """Blocks that tables could get now."""
        return self.pool.num_available

    @property
    def usage(self) -> float:
        """The share of blocks that no request can have now: active or pinned."""
        return 1.0 - self.num_available / self.num_blocks

    @property
    def tail_slots(self) -> int:
        """Tokens that a table gets room for when it grows."""
        return self._tails.num_slots

    def open_table(self, found: Sequence[BlockHash] = ()) -> BlockTable:
        """A table that begins with the blocks of a matched prefix, which cannot be evicted from now on."""
        return BlockTable(self.pool, self._tails, found)

    def share_blocks(self, block_ids: Sequence[int]) -> BlockTable:
        """A table of blocks that another table has too, whether or not they can be found."""
        self.pool.share(block_ids)
        table = BlockTable(self.pool, self._tails)
        table.block_ids = list(block_ids)
        return table

    def num_blocks_to_grow(self, tables: Iterable[BlockTable]) -> int:
        """Blocks that must be available for these tables to grow together."""
        return num_blocks_to_grow(tables, self._tails)

    def record_lookup(self, num_tokens: int, num_hit_tokens: int) -> None:
        """Count a request that starts with so many tokens, of which some were cached."""
        self.lookup_tokens += num_tokens
        self.hit_tokens += num_hit_tokens

    @property
    def has_copies(self) -> bool:
        """Whether blocks that were given away still hold what is to be copied out of them."""
        return self.pool.has_copies

    def take_copies(self) -> tuple[KVCopy, ...]:
        """The copies that decisions since the last call need, in the order to make them: after all steps planned
        before, and before anything is written that is planned from now on."""
        return self.pool.take_copies()

    def take_events(self) -> list[KVEvent]:
        """What happened to the index since the last call, in order. When no reader took events for so long
        that catching up would cost more than starting anew, this is `cleared` and then everything that is indexed."""
        return self.pool.events.take(self.pool.indexed())

    def restart_events(self) -> None:
        """A reader of events has missed some: the next `take_events` is `cleared` and all that is indexed."""
        self.pool.events.restart()

    def check_integrity(self, tables: Collection[BlockTable] | None = None) -> None:
        """Raise IntegrityError unless every block is in exactly one state and all records agree. With all open
        tables, also check that reference counts and halves of blocks are exactly theirs."""
        self.pool.check_integrity(None if tables is None else [table.block_ids for table in tables])
        self.retention.check()
        if tables is not None:
            self._tails.check_integrity(table.tail for table in tables if table.tail is not None)
