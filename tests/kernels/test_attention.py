"""Paged attention: agreement with the definition, and the same bits however the work is cut."""

from __future__ import annotations

import ctypes
import dataclasses
import functools

import pytest
import torch

from penstock.kernels.interface import AttentionLayer
from penstock.kernels.library import Library
from penstock.kernels.native import NativeOps
from penstock.kernels.native_storage import NativeKVStore
from penstock.kernels.reference import TorchOps
from tests.kernels.attention_case import (
    BLOCK_SIZE,
    Sequence,
    make_batch,
    make_layer,
    make_sequences,
    run_all,
    run_step,
)

LAYERS = {
    "grouped": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "one-to-one": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16},
    "many-heads": {"num_heads": 20, "num_kv_heads": 1, "head_dim": 32},
    "wide": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 256},
    "tiny": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
    "odd": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 80},
    "window": {"window": 40},
    "softcap": {"softcap": 5.0},
    "norms": {"head_norms": True},
    "sinks": {"sinks": True, "window": 60},
    "chunks": {"chunk": 48},
    "all": {"window": 100, "softcap": 20.0, "head_norms": True, "sinks": True},
}
LENGTHS = [1, 15, 16, 17, 100, 230]
Case = tuple[AttentionLayer, list[Sequence]]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.04}


def num_blocks_for(lengths: list[int]) -> int:
    return sum(-(-length // BLOCK_SIZE) for length in lengths) + 3


def poisoned_cache(ops: NativeOps, num_blocks: int, layer: AttentionLayer) -> NativeKVStore:
    """Two layers of a cache in which every byte is that of a NaN."""
    store = ops.allocate_kv(2, num_blocks, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim)
    ctypes.memset(store.layer(0).address, 0xFF, store.num_bytes)
    return store


@functools.cache
def defined(name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> tuple[Case, list[torch.Tensor]]:
    """A layer of LAYERS with sequences, and what the definition makes of them: the same for all instruction sets."""
    torch.manual_seed(0)
    layer = make_layer(**LAYERS[name])
    num_blocks = num_blocks_for(LENGTHS)
    sequences = make_sequences(LENGTHS, layer, num_blocks, dtype)
    inputs = [sequence.qkv for sequence in sequences]
    for sequence in sequences:
        sequence.qkv = sequence.qkv.float()
    definition = TorchOps("cpu", torch.float32, kv_dtype)
    store = definition.allocate_kv(1, num_blocks, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim)
    run_all(definition, layer, store.layer(0), sequences, chunk=64)
    expected = [sequence.output for sequence in sequences]
    for sequence, qkv in zip(sequences, inputs, strict=True):
        sequence.qkv = qkv
    return (layer, sequences), expected


def check_against_definition(
    native: NativeOps, name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, close: dict[str, float]
) -> None:
    (layer, sequences), expected = defined(name, dtype, kv_dtype)
    cache = poisoned_cache(native, num_blocks_for(LENGTHS), layer).layer(1)
    run_all(native, layer, cache, sequences, chunk=64)
    for sequence, output in zip(sequences, expected, strict=True):
        torch.testing.assert_close(sequence.output.float(), output, **close)


@pytest.mark.parametrize("name", LAYERS)
def test_agrees_with_the_definition(native: NativeOps, name: str, dtype: torch.dtype) -> None:
    check_against_definition(native, name, dtype, None, tolerance(dtype))


@pytest.fixture
def native_int8(library: Library, isa: str, dtype: torch.dtype) -> NativeOps:
    """With keys and values in eight bits."""
    return NativeOps(library, dtype, torch.int8)


@pytest.mark.parametrize("name", LAYERS)
def test_eight_bits_agree_with_their_definition(
    native_int8: NativeOps, name: str, dtype: torch.dtype
) -> None:
    # A number halfway between two codes may be rounded either way.
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.float32 else tolerance(dtype)
    check_against_definition(native_int8, name, dtype, torch.int8, close)


def test_eight_bits_take_half_the_memory_of_bfloat16(library: Library) -> None:
    whole, half = (
        NativeOps(library, torch.bfloat16, kv_dtype).allocate_kv(1, 1, BLOCK_SIZE, 3, 64).num_bytes
        for kv_dtype in (None, torch.int8)
    )
    scales = 2 * 3 * BLOCK_SIZE * 4
    assert half == whole // 2 + scales


@pytest.mark.parametrize("spoiled", [float("nan"), float("inf")])
@pytest.mark.parametrize("is_key", [True, False])
def test_what_is_no_number_stays_none_in_eight_bits(
    native_int8: NativeOps, dtype: torch.dtype, spoiled: float, is_key: bool
) -> None:
    layer = make_layer(num_heads=2, num_kv_heads=1, head_dim=32)
    sick, healthy = make_sequences([20, 20], layer, num_blocks_for([20, 20]), dtype)
    sick.qkv[5, 2 * 32 + (0 if is_key else 32) + 7] = spoiled
    cache = native_int8.allocate_kv(1, num_blocks_for([20, 20]), BLOCK_SIZE, 1, 32).layer(0)
    run_step(native_int8, layer, cache, [(sick, 20), (healthy, 20)])
    assert sick.output[5:].isnan().any(dim=1).all()
    assert healthy.output.isfinite().all()


def test_no_other_type_of_cache(library: Library) -> None:
    with pytest.raises(ValueError, match=r"or int8, not torch\.float16"):
        NativeOps(library, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("shape", [LAYERS["grouped"], LAYERS["many-heads"], LAYERS["all"]])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_cutting_a_prompt_changes_no_bit(
    library: Library, isa: str, shape: dict, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    native = NativeOps(library, dtype, kv_dtype)
    layer = make_layer(**shape)
    lengths = [150, 37]
    num_blocks = num_blocks_for(lengths)
    sequences = make_sequences(lengths, layer, num_blocks, dtype)
    whole: list[torch.Tensor] = []
    for chunk in (150, 64, 33, 7, 1):
        run_all(native, layer, poisoned_cache(native, num_blocks, layer).layer(0), sequences, chunk)
        outputs = [sequence.output for sequence in sequences]
        whole = whole or outputs
        for found, expected in zip(outputs, whole, strict=True):
            assert torch.equal(found, expected), f"chunks of {chunk}"


@pytest.mark.parametrize(("window", "kv_dtype"), [(None, None), (700, None), (700, torch.int8)])
def test_long_contexts_are_split_the_same_way_for_all(
    library: Library, isa: str, dtype: torch.dtype, window: int | None, kv_dtype: torch.dtype | None
) -> None:
    """Decoding alone shares splits between threads, decoding in a crowd does not. In a prefill several tiles of rows
    go through the splits together."""
    native = NativeOps(library, dtype, kv_dtype)
    layer = make_layer(num_heads=3, num_kv_heads=1, head_dim=32, window=window)
    length = 1300
    lengths = [length] + [20] * 12
    num_blocks = num_blocks_for(lengths)
    long, *crowd = make_sequences(lengths, layer, num_blocks, dtype)
    cache = poisoned_cache(native, num_blocks, layer).layer(0)
    run_step(native, layer, cache, [(long, length)])
    expected = long.output[-1]

    long.computed = length - 1
    run_step(native, layer, cache, [(long, 1)])
    assert torch.equal(long.outputs[-1][0], expected)
    long.computed = length - 1
    run_step(native, layer, cache, [*((other, 20) for other in crowd), (long, 1)])
    assert torch.equal(long.outputs[-1][0], expected)

    threads = library.num_threads()
    library.set_num_threads(1)
    try:
        long.computed = length - 1
        run_step(native, layer, cache, [(long, 1)])
    finally:
        library.set_num_threads(threads)
    assert torch.equal(long.outputs[-1][0], expected)


def test_long_context_agrees_with_the_definition(
    native: NativeOps, exact: TorchOps, dtype: torch.dtype
) -> None:
    layer = make_layer(num_heads=4, num_kv_heads=2, head_dim=16)
    num_blocks = num_blocks_for([1200])
    (sequence,) = make_sequences([1200], layer, num_blocks, dtype)
    run_all(native, layer, poisoned_cache(native, num_blocks, layer).layer(0), [sequence], chunk=1200)
    found = sequence.output
    sequence.qkv = sequence.qkv.float()
    store = exact.allocate_kv(1, num_blocks, BLOCK_SIZE, 2, 16)
    run_all(exact, layer, store.layer(0), [sequence], chunk=1200)
    torch.testing.assert_close(found.float(), sequence.output, **tolerance(dtype))


@pytest.mark.parametrize("name", ["grouped", "many-heads", "wide", "odd", "all"])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("chunk", [64, 1])
def test_two_requests_in_a_block_are_as_if_alone_in_it(
    library: Library, isa: str, name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, chunk: int
) -> None:
    native = NativeOps(library, dtype, kv_dtype)
    layer = make_layer(**LAYERS[name])
    lengths = [1, 8, 17, 24, 19, 38, 3, 518 if chunk > 1 else 39]
    num_blocks = num_blocks_for(lengths)
    sequences = make_sequences(lengths, layer, num_blocks, dtype)
    run_all(native, layer, poisoned_cache(native, num_blocks, layer).layer(0), sequences, chunk)
    alone = [sequence.output for sequence in sequences]

    for first, second in zip(sequences[::2], sequences[1::2], strict=True):
        second.blocks[-1] = first.blocks[-1]
        second.tail_offset = BLOCK_SIZE // 2
    run_all(native, layer, poisoned_cache(native, num_blocks, layer).layer(0), sequences, chunk)
    for sequence, output in zip(sequences, alone, strict=True):
        assert torch.equal(sequence.output, output)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_who_outgrows_half_a_block_goes_on_in_another(
    library: Library, isa: str, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    native = NativeOps(library, dtype, kv_dtype)
    layer = make_layer(**LAYERS["grouped"])
    lengths = [60, 60]
    num_blocks = num_blocks_for(lengths)
    first, second = sequences = make_sequences(lengths, layer, num_blocks, dtype)
    run_all(native, layer, poisoned_cache(native, num_blocks, layer).layer(1), sequences, chunk=1)
    alone = [sequence.output for sequence in sequences]

    store = poisoned_cache(native, num_blocks, layer)
    for sequence in sequences:
        sequence.computed, sequence.outputs = 0, []
    own_block = second.blocks.pop()
    second.blocks.append(first.blocks[-1])
    second.tail_offset = BLOCK_SIZE // 2
    run_step(native, layer, store.layer(1), [(first, 56), (second, 56)])
    store.copy_half(second.blocks[-1], second.tail_offset, own_block)
    second.blocks[-1], second.tail_offset = own_block, 0
    for _ in range(4):
        run_step(native, layer, store.layer(1), [(first, 1), (second, 1)])
    for sequence, output in zip(sequences, alone, strict=True):
        assert torch.equal(sequence.output, output)


def test_blocks_may_hold_several_units(library: Library) -> None:
    ops = NativeOps(library, torch.float32)
    layer = make_layer()
    (sequence,) = make_sequences([60], layer, 8, torch.float32)
    run_all(ops, layer, ops.allocate_kv(1, 8, BLOCK_SIZE, 2, 32).layer(0), [sequence], chunk=60)
    # The third block of 64 tokens is where blocks 12 to 15 of 16 tokens would be.
    batch = dataclasses.replace(
        make_batch([([12, 13, 14, 15], 0, 60)]), block_tables=torch.tensor([[3]], dtype=torch.int32)
    )
    found = ops.attend(sequence.qkv, layer, ops.allocate_kv(1, 4, 64, 2, 32).layer(0), batch)
    assert torch.equal(found, sequence.output)


def test_unsuitable_shapes_are_refused(library: Library) -> None:
    ops = NativeOps(library, torch.float32)
    with pytest.raises(ValueError, match="multiple of 16"):
        ops.allocate_kv(1, 4, 8, 2, 32)
    with pytest.raises(ValueError, match="even size"):
        ops.allocate_kv(1, 4, 16, 2, 33)


@pytest.mark.parametrize(("shared_len", "kv_dtype"), [(512, None), (1040, None), (1040, torch.int8)])
def test_requests_with_a_common_prefix_are_as_if_alone(
    library: Library, isa: str, dtype: torch.dtype, shared_len: int, kv_dtype: torch.dtype | None
) -> None:
    """Enough of them for several tiles, one of which ends within a request; strangers before, between and after."""
    native = NativeOps(library, dtype, kv_dtype)
    layer = make_layer(**LAYERS["grouped"])
    lengths = [700, shared_len + 3, *[shared_len + 20 + 40 * i for i in range(7)], 600, shared_len + 1, 30]
    num_blocks = num_blocks_for(lengths)
    sequences = make_sequences(lengths, layer, num_blocks, dtype)
    cache = native.allocate_kv(1, num_blocks, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim).layer(0)
    origin = sequences[2]
    run_step(native, layer, cache, [(origin, origin.qkv.shape[0] - 1)])
    for sharer in [sequences[1], *sequences[3:9], sequences[10]]:
        sharer.qkv[:shared_len] = origin.qkv[:shared_len]
        sharer.blocks[: shared_len // BLOCK_SIZE] = origin.blocks[: shared_len // BLOCK_SIZE]
        sharer.computed = shared_len  # by the origin, into blocks that are the sharer's too
    for sequence in sequences:
        if rest := sequence.qkv.shape[0] - 1 - sequence.computed:
            run_step(native, layer, cache, [(sequence, rest)])
    for sequence in sequences:
        run_step(native, layer, cache, [(sequence, 1)])
        sequence.computed -= 1
    run_step(native, layer, cache, [(sequence, 1) for sequence in sequences])
    for sequence in sequences:
        *_, alone, together = sequence.outputs
        assert torch.equal(alone, together)
