"""Which rank of a sender a rank reads from, and where in a block the KV heads lie: in every layout of a cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.core.kv_transfer import KVHeads, KVLayout, MemoryRegion
from penstock.engine.transfer.sources import KVMemory, TransferError, pieces, sources_of
from penstock.kernels.reference import TorchKVStore
from penstock.kernels.tensor_kv import TensorKVStore
from penstock.models.sharding import Shard

BLOCK_SIZE, HEAD_DIM, NUM_BLOCKS, NUM_LAYERS = 16, 8, 5, 2


class HeadMajor(TensorKVStore):
    """Blocks as the GPU's kernels keep them: [layers, blocks, G, block size, D]."""

    block_size = BLOCK_SIZE


Store = Callable[[int, torch.dtype], TensorKVStore]


def token_major(num_heads: int, dtype: torch.dtype) -> TensorKVStore:
    return TorchKVStore((NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, num_heads, HEAD_DIM), dtype, torch.device("cpu"))


def head_major(num_heads: int, dtype: torch.dtype) -> TensorKVStore:
    return HeadMajor((NUM_LAYERS, NUM_BLOCKS, num_heads, BLOCK_SIZE, HEAD_DIM), dtype, torch.device("cpu"))


def memory_of(store: TensorKVStore, shard: Shard, heads: range) -> KVMemory:
    layers = tuple(
        tuple(MemoryRegion(each.address, each.block_bytes, each.num_strips) for each in store.regions(layer))
        for layer in range(NUM_LAYERS)
    )
    return KVMemory(
        layers,
        NUM_BLOCKS,
        "m",
        kv_dtype="any",
        block_size=BLOCK_SIZE,
        heads=KVHeads(heads.start, heads.stop),
        rank=shard.tensor_rank,
        num_ranks=shard.tensor_size,
    )


def layout_of(ranks: Sequence[KVMemory]) -> KVLayout:
    layouts = [
        KVLayout(
            f"rank {rank}",
            b"",
            "DRAM",
            0,
            memory.model,
            memory.layers,
            kv_dtype=memory.kv_dtype,
            block_size=memory.block_size,
            heads=memory.heads,
        )
        for rank, memory in enumerate(ranks)
    ]
    return replace(layouts[0], others=tuple(layouts[1:]))


def copy(ours: KVMemory, peer: KVLayout, their_blocks: list[int], our_blocks: list[int]) -> None:
    """Do by hand what NIXL does, block by block."""
    layers = range(NUM_LAYERS)
    their_runs = np.array([(block, 1) for block in their_blocks])
    our_runs = np.array([(block, 1) for block in our_blocks])
    for source in sources_of(ours, peer):
        theirs = pieces(source.layout.layers, layers, their_runs, source.layout.heads, source.heads)
        here = pieces(ours.layers, layers, our_runs, ours.heads, source.heads)
        assert (theirs[1] == here[1]).all()
        for start, place, size in zip(theirs[0], here[0], here[1], strict=True):
            torch.frombuffer(_bytes_at(place, size), dtype=torch.uint8).copy_(
                torch.frombuffer(_bytes_at(start, size), dtype=torch.uint8)
            )


def _bytes_at(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * int(size)).from_address(int(address))).cast("B")


@given(
    store=st.sampled_from([token_major, head_major]),
    dtype=st.sampled_from([torch.float32, torch.int8]),
    kv_heads=st.integers(1, 6),
    ranks_there=st.integers(1, 4),
    ranks_here=st.integers(1, 4),
)
def test_every_rank_gets_exactly_its_heads(
    store: Store, dtype: torch.dtype, kv_heads: int, ranks_there: int, ranks_here: int
) -> None:
    """Also where heads are shared out unevenly, or several ranks have the same one."""
    axis = 3 if store is token_major else 2
    whole = store(kv_heads, dtype)
    for tensor in whole.tensors:
        tensor.copy_(torch.randint(-100, 100, tensor.shape))

    def rank_stores(num_ranks: int) -> list[tuple[TensorKVStore, Shard, range]]:
        shards = [Shard(rank, num_ranks) for rank in range(num_ranks)]
        heads = [shard.heads(kv_heads * 12, kv_heads).keys for shard in shards]
        return [(store(len(keys), dtype), shard, keys) for shard, keys in zip(shards, heads, strict=True)]

    senders, receivers = rank_stores(ranks_there), rank_stores(ranks_here)
    for rank_store, _, heads in senders:
        for tensor, of_all in zip(rank_store.tensors, whole.tensors, strict=True):
            tensor.copy_(of_all.narrow(axis, heads.start, len(heads)))
    peer = layout_of([memory_of(*each) for each in senders])
    their_blocks, our_blocks = [1, 2, 4], [3, 0, 1]
    for rank_store, shard, heads in receivers:
        copy(memory_of(rank_store, shard, heads), peer, their_blocks, our_blocks)
        for tensor, of_all in zip(rank_store.tensors, whole.tensors, strict=True):
            expected = of_all.narrow(axis, heads.start, len(heads))
            assert torch.equal(tensor[:, our_blocks], expected[:, their_blocks])
            assert not tensor[:, [2, 4]].any(), "other blocks stay as they are"


def test_blocks_of_another_kind_are_refused_in_a_sentence() -> None:
    ours = memory_of(token_major(2, torch.float32), Shard(), range(2))
    halves = [
        memory_of(token_major(1, torch.float32), Shard(rank, 2), range(rank, rank + 1)) for rank in range(2)
    ]
    peer = layout_of(halves)
    assert [(source.layout.agent_name, source.heads) for source in sources_of(ours, peer)] == [
        ("rank 0", KVHeads(0, 1)),
        ("rank 1", KVHeads(1, 2)),
    ]
    wide = layout_of([memory_of(token_major(2, torch.int8), Shard(), range(2))])
    for changed, words in (
        (replace(peer, model="other"), "its KV is of 'other', and ours of 'm'"),
        (replace(peer, kv_dtype="int8"), "its KV is stored as int8, and ours as any"),
        (replace(peer, block_size=32), "its blocks have 32 tokens, and ours 16"),
        (replace(peer, heads=None), "it has 2 ranks and this engine 1, and layers of this model differ"),
        (replace(peer, others=()), "none of its ranks has the KV head 1"),
        (wide, "its blocks have another layout"),
        (layout_of([memory_of(head_major(1, torch.float32), Shard(), range(2))]), "another layout"),
    ):
        with pytest.raises(TransferError, match=words):
            sources_of(ours, changed)
