"""Manages KV blocks that move between engines, outside of any plan. Knows no other engine and no bytes.

An import reserves blocks for KV of another engine. No request reads these blocks until they are filled; then they are
cached like any other prefix. An export keeps blocks unchanged while another engine reads them, even if their request
ends. The caller that begins either must finish it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.core.hashing import BlockHash, chain_hashes, root_hash
from penstock.core.request import Request
from penstock.kvcache.cache import KVCache
from penstock.kvcache.table import BlockTable
from penstock.scheduler.admission import Headroom


@dataclass(frozen=True, slots=True)
class BlockImport:
    """The leading full blocks of a request: first the blocks that were cached here, then the blocks to be filled."""

    number: int
    parent: BlockHash  # of the first block to be filled
    hashes: tuple[BlockHash, ...]  # of the blocks to be filled
    num_found: int  # blocks that were cached here
    block_ids: tuple[int, ...]  # to be filled


@dataclass(frozen=True, slots=True)
class BlockExport:
    number: int
    block_ids: tuple[int, ...]


class BlockExchange:
    def __init__(self, cache: KVCache, headroom: Headroom, on_room: Callable[[], None]) -> None:
        """`on_room` is called when blocks may have been freed."""
        self._cache = cache
        self._headroom = headroom
        self._on_room = on_room
        self._imports: dict[int, BlockImport] = {}
        self._tables: dict[int, BlockTable] = {}  # by number of the import or export
        self._num_begun = 0
        self._is_turned_away = False

    @property
    def lacks_copies(self) -> bool:
        """Return whether an import waits for copies of blocks that had to make room."""
        return self._is_turned_away and self._cache.has_copies

    def __len__(self) -> int:
        """Return the number of imports and exports that have not finished."""
        return len(self._tables)

    def num_missing(self, request: Request) -> int:
        """Count the leading full blocks of a request that are not cached here. The block of its last token does not
        count."""
        hashes = self._hashes(request)
        return len(hashes) - self._cache.match_on_device(hashes)

    def begin_import(self, request: Request) -> BlockImport | None:
        """Make room for the missing blocks of a request. Returns None when running requests need the room, or no
        block is missing."""
        cache = self._cache
        hashes = self._hashes(request)
        num_found = cache.match_on_device(hashes)
        table = cache.open_table(hashes[:num_found])
        num_new = len(hashes) - num_found
        has_room = num_new and num_new <= cache.num_available - self._headroom.needed()
        if has_room:
            table.fill(len(hashes) * cache.block_size)
        # The next plan may have to copy the former contents of new blocks: nothing may be written before.
        if not has_room or cache.has_copies:
            table.close()
            self._is_turned_away = cache.has_copies
            return None
        parent = hashes[num_found - 1] if num_found else root_hash(request.prefix_salt)
        block_ids = tuple(table.block_ids[num_found:])
        begun = BlockImport(self._begin(table), parent, tuple(hashes[num_found:]), num_found, block_ids)
        self._imports[begun.number] = begun
        return begun

    def finish_import(self, number: int, num_filled: int) -> None:
        """End an import of which the first `num_filled` blocks are filled. Nothing writes to its blocks any more."""
        begun = self._imports.pop(number)
        parent = begun.parent
        for block_id, block_hash in zip(begun.block_ids[:num_filled], begun.hashes[:num_filled], strict=True):
            self._cache.publish(block_id, block_hash, parent)
            parent = block_hash
        self._finish(number)

    def begin_export(self, block_ids: tuple[int, ...]) -> BlockExport:
        """Keep these blocks of a running request until the export ends."""
        return BlockExport(self._begin(self._cache.share_blocks(block_ids)), block_ids)

    def export_prefix(self, request: Request) -> BlockExport:
        """Keep the leading full blocks of a request that are cached here. There may be none."""
        hashes = self._hashes(request)
        table = self._cache.open_table(hashes[: self._cache.match_on_device(hashes)])
        return BlockExport(self._begin(table), tuple(table.block_ids))

    def finish_export(self, number: int) -> None:
        """End an export: the other engine has read its blocks."""
        self._finish(number)

    def tables(self) -> Iterator[BlockTable]:
        """Return the tables of all imports and exports, for `KVCache.check_integrity`."""
        return iter(self._tables.values())

    def _begin(self, table: BlockTable) -> int:
        self._num_begun += 1
        self._tables[self._num_begun] = table
        return self._num_begun

    def _finish(self, number: int) -> None:
        self._tables.pop(number).close()
        self._on_room()

    def _hashes(self, request: Request) -> list[BlockHash]:
        tokens = (*request.key_token_ids, *request.output_token_ids)
        return chain_hashes(root_hash(request.prefix_salt), tokens[:-1], self._cache.block_size)
