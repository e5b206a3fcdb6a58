"""Checks the invariants that tie free list, index and reference counts together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from penstock.core.hashing import BlockHash
from penstock.kvcache.block import Block, BlockState, IntegrityError


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
