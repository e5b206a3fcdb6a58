"""Memory of the compiled CPU library between calls: packed matrices and KV caches. Knows how weights are handed to
the library; only the library knows the layouts (cpu/linear.h, cpu/attention.h). Computes nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from ctypes import byref, c_int64, c_uint8, c_void_p, memmove, string_at
from itertools import count
from threading import Thread

import torch
from torch import Tensor

from penstock.kernels.interface import DenseWeight, Float8Weight, GroupQuantWeight, KVRegion, WeightData
from penstock.kernels.library import Library

# Numbers shared with cpu/linear.h.
FORMAT_FLOAT32, FORMAT_BFLOAT16, FORMAT_INT8, FORMAT_INT4 = range(4)
LARGEST_GROUP = 32


TOKENS_PER_UNIT = 16
MAX_HEAD_DIM = 256


class NativeLinear:
    """Owns a packed matrix of the library, and with it the memory."""

    def __init__(self, library: Library, in_features: int) -> None:
        self.in_features = in_features
        self.out_features = 0
        self.num_bytes = 0
        # The input that each column of the matrix takes; None: column j takes input j.
        self.input_order: Tensor | None = None
        self.handle = library.linear_create(in_features)
        self._library = library
        weakref.finalize(self, library.linear_free, self.handle)

    def add(self, parts: Sequence[WeightData], dtype: torch.dtype, *, narrows_float8: bool = False) -> None:
        """Stack matrices, as exact as the compute type is. With `narrows_float8`, float8 weights times their scales
        are rounded to bfloat16, which takes half the memory of float32."""
        for part in parts:
            if isinstance(part, Float8Weight):  # no CPU multiplies float8
                self._check_inputs(part)
                part = DenseWeight(part.dequantize(torch.bfloat16 if narrows_float8 else dtype))
            self._add_part(part, dtype)

    def add_integers(self, parts: Sequence[GroupQuantWeight]) -> None:
        """Stack quantized matrices, as exact as they come, to be multiplied with 16-bit activations."""
        for part in parts:
            self._check_inputs(part)
            self._add_quantized(part, integer=True)

    def _add_part(self, weight: WeightData, dtype: torch.dtype) -> None:
        self._check_inputs(weight)
        if isinstance(weight, DenseWeight):
            # In float32 mode bfloat16 weights stay as they are: widening loses nothing and doubles the traffic.
            narrow = torch.bfloat16 in (dtype, weight.values.dtype)
            values = weight.values.to(torch.bfloat16 if narrow else torch.float32).contiguous()
            self._add(FORMAT_BFLOAT16 if narrow else FORMAT_FLOAT32, values, None, None, 0)
        else:
            assert isinstance(weight, GroupQuantWeight)
            self._add_quantized(weight)

    def set_bias(self, bias: Tensor) -> None:
        values = bias.to(torch.float32).contiguous()
        self._library.linear_set_bias(self.handle, values.data_ptr())
        self.num_bytes += values.nbytes

    def memory(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the kind and the bytes of each stacked matrix, and of the bias. Writing to the bytes changes the
        matrix; they are valid as long as the matrix is kept."""
        address, kind = c_void_p(), c_int64()
        for index in count():
            num_bytes = self._library.linear_memory(self.handle, index, byref(address), byref(kind))
            if not num_bytes:
                break
            assert address.value is not None
            held = (c_uint8 * num_bytes).from_address(address.value)
            yield f"{kind.value}: {num_bytes}", torch.frombuffer(held, dtype=torch.uint8)
        if self.input_order is not None:
            yield "input order", self.input_order.view(torch.uint8)

    def _add_quantized(self, weight: GroupQuantWeight, integer: bool = False) -> None:
        if weight.group > LARGEST_GROUP:
            weight = weight.regrouped(LARGEST_GROUP)
        if weight.group not in (16, LARGEST_GROUP):
            raise ValueError(f"groups of {weight.group} are not supported, only of 16 and {LARGEST_GROUP}")
        scales, offsets = weight.scales.contiguous(), weight.offsets
        tables = [scales] if offsets is None else [scales, offsets.contiguous()]
        halves = [table.half() for table in tables]
        if all(torch.equal(half.float(), table) for half, table in zip(halves, tables, strict=True)):
            tables = halves
        code_format = FORMAT_INT4 if weight.bits == 4 else FORMAT_INT8
        self._add(
            code_format,
            weight.codes.contiguous(),
            tables[0],
            tables[1] if len(tables) > 1 else None,
            weight.group,
            integer,
        )

    def _add(
        self,
        code_format: int,
        values: Tensor,
        scales: Tensor | None,
        offsets: Tensor | None,
        group: int,
        integer: bool = False,
    ) -> None:
        num_bytes = self._library.linear_add(
            self.handle,
            code_format,
            values.shape[0],
            values.data_ptr(),
            None if scales is None else scales.data_ptr(),
            None if offsets is None else offsets.data_ptr(),
            scales is not None and scales.dtype == torch.float16,
            group,
            integer,
        )
        self._grow(values.shape, num_bytes)

    def _check_inputs(self, weight: WeightData) -> None:
        if weight.shape[1] != self.in_features:
            raise ValueError(f"stacked matrices take {self.in_features} and {weight.shape[1]} inputs")

    def _grow(self, shape: Sequence[int], num_bytes: int) -> None:
        if num_bytes == 0:
            raise MemoryError(f"no memory for a packed matrix of {shape[0]} × {shape[1]}")
        self.out_features += shape[0]
        self.num_bytes += num_bytes


class NativeEmbedding:
    def __init__(self, table: NativeLinear, shared: bool) -> None:
        self.table = table
        self.num_bytes = 0 if shared else table.num_bytes


def check_kv_shape(block_size: int, head_dim: int) -> None:
    """Refuse blocks and heads that the library's cache layout (cpu/attention.h) has no place for."""
    if block_size % TOKENS_PER_UNIT != 0:
        raise ValueError(f"blocks hold a multiple of {TOKENS_PER_UNIT} tokens, not {block_size}")
    if head_dim > MAX_HEAD_DIM or head_dim % 2 != 0:
        raise ValueError(f"a head has an even size of at most {MAX_HEAD_DIM}, not {head_dim}")


class NativeKVLayer:
    __slots__ = ("address", "block_size", "store")

    def __init__(self, store: NativeKVStore, address: int) -> None:
        self.store = store  # keeps the memory alive
        self.address = address
        self.block_size = store.block_size


class NativeKVStore:
    """Memory for all layers, [layer][block], and for slots, [slot][layer].

    The system hands out memory page by page as it is first used, and clears each page. In a virtual machine that may
    take a third as long as computing what is written to it, so a thread uses all pages while the engine starts. Slots
    are rarer, and wait for their use."""

    def __init__(
        self,
        library: Library,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        layer_block_bytes: int,
        shape: tuple[int, bool, int, int],
    ) -> None:
        """`shape`: what the library calls the type, whether that is rounded to eight bits, KV heads, head size."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = num_layers * layer_block_bytes
        self.num_bytes = num_blocks * self.block_bytes
        self._library = library
        self._num_layers = num_layers
        self._layer_block_bytes = layer_block_bytes
        self._shape = shape
        self.layer_bytes = num_blocks * layer_block_bytes
        self.address = self._allocate(self.num_bytes)
        Thread(target=library.touch_pages, args=(self.address, self.num_bytes), daemon=True).start()
        self._slots_address = 0

    def layer(self, index: int) -> NativeKVLayer:
        return NativeKVLayer(self, self.address + index * self.layer_bytes)

    def regions(self, layer: int) -> tuple[KVRegion, ...]:
        address = self.address + layer * self.layer_bytes
        num_units = self.block_size // TOKENS_PER_UNIT
        return (KVRegion(address, self._layer_block_bytes, self.num_blocks, num_units),)

    def reserve_host(self, num_slots: int) -> None:
        self._slots_address = self._allocate(num_slots * self.block_bytes)

    def copy_to_host(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        for slot, block_id in zip(slots, block_ids, strict=True):
            for in_slot, in_block in self._pieces(slot, block_id):
                memmove(in_slot, in_block, self._layer_block_bytes)

    def copy_from_host(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        for slot, block_id in zip(slots, block_ids, strict=True):
            for in_slot, in_block in self._pieces(slot, block_id):
                memmove(in_block, in_slot, self._layer_block_bytes)

    def read_host(self, slot: int) -> bytes:
        return string_at(self._slots_address + slot * self.block_bytes, self.block_bytes)

    def write_block(self, block_id: int, contents: bytes) -> None:
        for at in range(self._num_layers):
            in_block = self.address + at * self.layer_bytes + block_id * self._layer_block_bytes
            start = at * self._layer_block_bytes
            memmove(in_block, contents[start : start + self._layer_block_bytes], self._layer_block_bytes)

    def copy_half(self, block_id: int, offset: int, to_block_id: int) -> None:
        from_slot, to_slot = block_id * self.block_size + offset, to_block_id * self.block_size
        self._library.copy_half(
            *self._shape, self.address, self._num_layers, self.layer_bytes, from_slot, to_slot
        )

    def _pieces(self, slot: int, block_id: int) -> Iterator[tuple[int, int]]:
        """Yield where each layer's part of a block lies, in the slot and in the store."""
        in_slot = self._slots_address + slot * self.block_bytes
        in_block = self.address + block_id * self._layer_block_bytes
        for layer in range(self._num_layers):
            yield in_slot + layer * self._layer_block_bytes, in_block + layer * self.layer_bytes

    def _allocate(self, num_bytes: int) -> int:
        address: int | None = self._library.allocate_pages(num_bytes)
        if address is None:
            raise MemoryError(f"no memory for a KV cache of {num_bytes} bytes")
        weakref.finalize(self, self._library.free_pages, address, num_bytes)
        return address
