"""KV blocks copied to host memory and back: every bit, of every layer, and of no other block."""

from __future__ import annotations

import ctypes

import pytest
import torch

from penstock.kernels.interface import HalvesBlocks, KVStore
from penstock.kernels.library import Library
from penstock.kernels.native import NativeOps
from penstock.kernels.reference import TorchOps
from penstock.kernels.tensor_kv import TensorKVStore

NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 3, 5, 16, 2, 8


def native_bytes(store: KVStore) -> list[list[bytes]]:
    """What each block holds in each layer, as [block][layer]."""
    size = store.block_bytes // NUM_LAYERS
    return [
        [ctypes.string_at(store.layer(index).address + block * size, size) for index in range(NUM_LAYERS)]
        for block in range(NUM_BLOCKS)
    ]


def torch_bytes(store: TensorKVStore) -> list[list[bytes]]:
    return [
        [
            b"".join(tensor[index, block].view(torch.uint8).numpy().tobytes() for tensor in store.tensors)
            for index in range(NUM_LAYERS)
        ]
        for block in range(NUM_BLOCKS)
    ]


def fill_native(store: KVStore) -> None:
    size = NUM_BLOCKS * store.block_bytes
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    ctypes.memmove(store.layer(0).address, data.data_ptr(), size)


def fill_torch(store: TensorKVStore) -> None:
    for tensor in store.tensors:
        tensor.copy_(torch.randn(tensor.shape) * 50)


@pytest.mark.parametrize("backend", ["native", "torch", "int8"])
def test_blocks_come_back_bit_for_bit(native: NativeOps, exact: TorchOps, backend: str) -> None:
    torch.manual_seed(1)
    if backend == "int8":
        exact = TorchOps("cpu", torch.float32, torch.int8)
    ops, fill, read = (
        (native, fill_native, native_bytes) if backend == "native" else (exact, fill_torch, torch_bytes)
    )
    store = ops.allocate_kv(NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    num_entries = 2 * NUM_LAYERS * BLOCK_SIZE * NUM_KV_HEADS
    if backend == "native":
        assert store.block_bytes >= num_entries * HEAD_DIM * ops.dtype.itemsize
    else:
        scale_bytes = 4 if backend == "int8" else 0
        assert store.block_bytes == num_entries * (HEAD_DIM * ops.kv_dtype.itemsize + scale_bytes)
    store.reserve_host(2)
    fill(store)
    first = read(store)
    store.copy_to_host([3], [1])
    store.copy_to_host([0], [0])
    fill(store)
    second = read(store)
    store.copy_from_host([1], [2])
    store.copy_from_host([0], [4])
    assert read(store) == [second[0], second[1], first[3], second[3], first[0]]


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_half_a_block_is_copied_and_nothing_else(library: Library, kv_dtype: torch.dtype | None) -> None:
    torch.manual_seed(1)
    ops = NativeOps(library, torch.bfloat16, kv_dtype)
    store = ops.allocate_kv(NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    assert isinstance(store, HalvesBlocks)
    fill_native(store)
    before = native_bytes(store)
    store.copy_half(1, 0, 3)
    after = native_bytes(store)
    assert [*after[:3], after[4]] == [*before[:3], before[4]]
    for source, old, new in zip(before[1], before[3], after[3], strict=True):
        changed = [at for at in range(len(old)) if new[at] != old[at]]
        assert all(new[at] == source[at] for at in changed)
        assert 0.45 * len(old) < len(changed) <= 0.5 * len(old)  # a byte may have been the same
