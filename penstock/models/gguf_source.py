"""Reads weights from a GGUF file, and decodes GGUF's block formats exactly. Knows no architecture beyond a table of
names.

A block of 32 or 256 neighbours holds packed codes and packed scales. Each decoder takes raw blocks `uint8 [n, block
bytes]` and fills codes `uint8 [n, block size]` (two's complement where codes are signed), scales and offsets `float32
[n, groups]`.

The arithmetic of decoders is numpy's, on one thread: the pieces are so small that handing them to torch's threads
costs more than it saves, and much more when another process uses the cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import DenseWeight, GroupQuantWeight, WeightData
from penstock.models import gguf_codebooks as codebooks
from penstock.models.gguf_codebooks import Bytes, Floats, half
from penstock.models.gguf_file import BlockFormat, GGUFFile, TensorInfo
from penstock.models.layout import Layout, StackedPart, StoredRows
from penstock.models.weight_parts import Part, take_columns
from penstock.models.weights import Stacked

# Elements decoded at a time: temporaries then stay in the cache, and small beside the result.
_SLICE_ELEMENTS = 1 << 18

_BIT_SHIFTS = np.arange(8, dtype=np.uint8)
_PAIR_SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class BlockDecoder:
    """Decodes a block format: `decode(blocks, codes, scales, offsets)`. A format without offsets leaves those
    alone."""

    decode: Callable[[Bytes, Bytes, Floats, Floats], None]
    group: int
    bits: Literal[4, 8]
    has_offsets: bool
    is_float4: bool = False  # as in `GroupQuantWeight`


def decode_matrix(raw: Bytes, format: BlockFormat) -> GroupQuantWeight:
    """Decode a matrix. `raw` is uint8 [rows, bytes of a row], contiguous."""
    decoder = DECODERS[format.name]
    blocks = raw.reshape(-1, format.block_bytes)
    groups = format.block_size // decoder.group
    codes = np.empty((len(blocks), format.block_size), dtype=np.uint8)
    scales = np.empty((len(blocks), groups), dtype=np.float32)
    offsets = np.empty((len(blocks), groups if decoder.has_offsets else 0), dtype=np.float32)
    step = _SLICE_ELEMENTS // format.block_size
    # A damaged file may hold infinite scales; the sampler reports their result.
    with np.errstate(invalid="ignore"):
        for start in range(0, len(blocks), step):
            part = slice(start, start + step)
            decoder.decode(blocks[part], codes[part], scales[part], offsets[part])
    rows = raw.shape[0]
    return GroupQuantWeight(
        codes=torch.from_numpy(codes if decoder.bits == 4 else codes.view(np.int8)).view(rows, -1),
        scales=torch.from_numpy(scales).view(rows, -1),
        offsets=torch.from_numpy(offsets).view(rows, -1) if decoder.has_offsets else None,
        group=decoder.group,
        bits=decoder.bits,
        is_float4=decoder.is_float4,
    )


def _unpack_nibbles(packed: Bytes, codes: Bytes) -> None:
    """[n, w] → [n, 2w]: all low halves, then all high halves."""
    width = packed.shape[1]
    np.bitwise_and(packed, 0xF, out=codes[:, :width])
    np.right_shift(packed, 4, out=codes[:, width:])


def _unpack_crumbs(packed: Bytes, codes: Bytes) -> None:
    """[n, 64] of four 2-bit codes each → [n, 256]. A half block's 32 bytes hold its 4 × 32 codes, lowest bits
    first."""
    halves, by_shift = packed.reshape(-1, 2, 32), codes.reshape(-1, 2, 4, 32)
    for index in range(4):
        np.bitwise_and(halves >> (2 * index), 3, out=by_shift[:, :, index])


def _or_bits(packed: Bytes, codes: Bytes, place: int) -> None:
    """[n, 32] holds bit `place` of [n, 256] codes: bit i of byte j belongs to code 32 i + j."""
    by_bit = codes.reshape(-1, 8, 32)
    for index in range(8):
        by_bit[:, index] |= ((packed >> index) & 1) << place


def _or_fifth_bits(packed: Bytes, codes: Bytes) -> None:
    """uint8 [n, 4] is a little-endian number whose bit i belongs to code i."""
    codes |= (((packed[:, :, None] >> _BIT_SHIFTS) & 1) << 4).reshape(codes.shape)


def _q4_0(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    _unpack_nibbles(blocks[:, 2:], codes)
    scales[:] = half(blocks, 0)
    offsets[:] = scales * -8


def _q4_1(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    _unpack_nibbles(blocks[:, 4:], codes)
    scales[:] = half(blocks, 0)
    offsets[:] = half(blocks, 2)


def _q5_0(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    _unpack_nibbles(blocks[:, 6:], codes)
    _or_fifth_bits(blocks[:, 2:6], codes)
    codes -= 16
    scales[:] = half(blocks, 0)


def _q5_1(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    _unpack_nibbles(blocks[:, 8:], codes)
    _or_fifth_bits(blocks[:, 4:8], codes)
    scales[:] = half(blocks, 0)
    offsets[:] = half(blocks, 2)


def _q8_0(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    codes[:] = blocks[:, 2:]
    scales[:] = half(blocks, 0)


def _q2_k(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    _unpack_crumbs(blocks[:, 16:80], codes)
    np.multiply(blocks[:, :16] & 0xF, half(blocks, 80), out=scales)
    np.multiply(blocks[:, :16] >> 4, -half(blocks, 82), out=offsets)


def _q3_k(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    _unpack_crumbs(blocks[:, 32:96], codes)
    _or_bits(blocks[:, :32], codes, 2)
    six_bits = np.empty((len(blocks), 16), dtype=np.uint8)
    _unpack_nibbles(blocks[:, 96:104], six_bits)
    six_bits |= (((blocks[:, None, 104:108] >> _PAIR_SHIFTS[:, None]) & 3) << 4).reshape(-1, 16)
    np.multiply(six_bits.view(np.int8) - 32, half(blocks, 108), out=scales)
    offsets[:] = scales * -4


def _k_scales(blocks: Bytes, scales: Floats, offsets: Floats) -> None:
    """Two float16 and twelve bytes: eight 6-bit scales and eight 6-bit minimums."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    factor, minimum_factor = half(blocks, 0), -half(blocks, 2)
    np.multiply(first & 0x3F, factor, out=scales[:, :4])
    np.multiply((third & 0xF) | (first >> 6 << 4), factor, out=scales[:, 4:])
    np.multiply(second & 0x3F, minimum_factor, out=offsets[:, :4])
    np.multiply((third >> 4) | (second >> 6 << 4), minimum_factor, out=offsets[:, 4:])


def _unpack_k_nibbles(packed: Bytes, codes: Bytes) -> None:
    """[n, 128] → [n, 256]: each 32 bytes hold 32 codes in their low halves and the next 32 in their high ones."""
    quarters, by_half = packed.reshape(-1, 4, 32), codes.reshape(-1, 4, 2, 32)
    np.bitwise_and(quarters, 0xF, out=by_half[:, :, 0])
    np.right_shift(quarters, 4, out=by_half[:, :, 1])


def _q4_k(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    _unpack_k_nibbles(blocks[:, 16:], codes)
    _k_scales(blocks, scales, offsets)


def _q5_k(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    _unpack_k_nibbles(blocks[:, 48:], codes)
    _or_bits(blocks[:, 16:48], codes, 4)
    _k_scales(blocks, scales, offsets)


def _q6_k(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    _unpack_crumbs(blocks[:, 128:192], codes)
    codes <<= 4
    halves, by_half = blocks[:, :128].reshape(-1, 2, 64), codes.reshape(-1, 2, 2, 64)
    by_half[:, :, 0] |= halves & 0xF
    by_half[:, :, 1] |= halves >> 4
    codes -= 32
    np.multiply(blocks[:, 192:208].view(np.int8), half(blocks, 208), out=scales)


DECODERS = {
    "Q4_0": BlockDecoder(_q4_0, 32, 4, True),
    "Q4_1": BlockDecoder(_q4_1, 32, 4, True),
    "Q5_0": BlockDecoder(_q5_0, 32, 8, False),
    "Q5_1": BlockDecoder(_q5_1, 32, 8, True),
    "Q8_0": BlockDecoder(_q8_0, 32, 8, False),
    "Q2_K": BlockDecoder(_q2_k, 16, 4, True),
    "Q3_K": BlockDecoder(_q3_k, 16, 4, True),
    "Q4_K": BlockDecoder(_q4_k, 32, 4, True),
    "Q5_K": BlockDecoder(_q5_k, 32, 8, True),
    "Q6_K": BlockDecoder(_q6_k, 16, 8, False),
    "IQ1_S": BlockDecoder(codebooks.iq1_s, 32, 8, False),
    "IQ1_M": BlockDecoder(codebooks.iq1_m, 16, 8, False),
    "IQ2_XXS": BlockDecoder(codebooks.iq2_xxs, 32, 8, False),
    "IQ2_XS": BlockDecoder(codebooks.iq2_xs, 16, 8, False),
    "IQ2_S": BlockDecoder(codebooks.iq2_s, 16, 8, False),
    "IQ3_XXS": BlockDecoder(codebooks.iq3_xxs, 32, 8, False),
    "IQ3_S": BlockDecoder(codebooks.iq3_s, 32, 8, False),
    "IQ4_NL": BlockDecoder(codebooks.iq4_nl, 32, 8, False),
    "IQ4_XS": BlockDecoder(codebooks.iq4_xs, 32, 8, False),
    "TQ1_0": BlockDecoder(codebooks.tq1_0, 256, 4, True),
    "TQ2_0": BlockDecoder(codebooks.tq2_0, 256, 4, True),
    "MXFP4": BlockDecoder(codebooks.mxfp4, 32, 8, False, is_float4=True),
    "NVFP4": BlockDecoder(codebooks.nvfp4, 16, 8, False, is_float4=True),
}


_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Names of tensors and the usual names for them, both as parts between dots.
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "model.rope_divisors",
    "rope_factors_short": "model.rope_divisors_short",
    "rope_factors_long": "model.rope_divisors_long",
    "blk": "model.layers",
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.all_experts.gate_proj",
    "ffn_gate_up_exps": "mlp.all_experts.gate_up_proj",
    "ffn_up_exps": "mlp.all_experts.up_proj",
    "ffn_down_exps": "mlp.all_experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
}


def gguf_layout(
    names: Mapping[str, str] | None = None,
    *,
    cut: Mapping[str, StoredRows] | None = None,
    rows: Mapping[str, StoredRows] | None = None,
    columns: Mapping[str, Tensor] | None = None,
    num_experts: int = 0,
    changed: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
) -> Layout:
    """Return the layout of GGUF files, in which a family has some `names`, and the order of some `rows`, of its own,
    and tensors that are stored as one or in another form."""
    experts, fused, both = {}, {}, "mlp.all_experts.gate_up_proj"
    for index, part in enumerate(("gate_proj", "up_proj", "down_proj")):
        name = f"mlp.all_experts.{part}"
        experts[part] = StackedPart(f"{name}.weight", f"{name}.bias")
        if part != "down_proj":
            fused[part] = StackedPart(f"{both}.weight", f"{both}.bias", index, 2)
    own = names or {}
    return Layout(
        # A family's own names first: they may have a general name as their part.
        names={**own, **{name: usual for name, usual in _NAMES.items() if name not in own}},
        cut=cut or {},
        rows=rows or {},
        columns=columns or {},
        experts=experts,
        fused_experts=fused,
        num_experts=num_experts,
        changed=changed or {},
    )


class GGUFSource:
    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._parts = [np.frombuffer(buffer, dtype=np.uint8) for buffer in file.buffers]
        self.bytes_read = 0

    def names(self) -> frozenset[str]:
        return frozenset(self._file.tensors)

    def matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> WeightData:
        wanted = part or Part(range(rows), range(columns))
        return self._read(self._find(name, (rows, columns)), wanted)

    def stacked_matrix(self, place: Stacked, rows: int, columns: int, part: Part) -> WeightData:
        tensor = self._find(place.name, (place.count, rows, columns))
        first = place.index * rows  # as one matrix of all rows
        span = range(first + part.rows.start, first + part.rows.stop)
        return self._read(replace(tensor, shape=(place.count * rows, columns)), Part(span, part.columns))

    def _read(self, tensor: TensorInfo, wanted: Part) -> WeightData:
        # Whole blocks are read and decoded; numbers beyond the columns are dropped afterwards.
        size, num_bytes = tensor.format.block_size, tensor.format.block_bytes
        first, last = wanted.columns.start // size, -(-wanted.columns.stop // size)
        raw = self._raw_rows(tensor, wanted.rows)[:, first * num_bytes : last * num_bytes]
        raw = np.ascontiguousarray(raw)
        self.bytes_read += raw.nbytes
        if tensor.format.name in _DENSE:
            return DenseWeight(torch.from_numpy(raw).view(_DENSE[tensor.format.name]))
        in_blocks = range(wanted.columns.start - first * size, wanted.columns.stop - first * size)
        return take_columns(decode_matrix(raw, tensor.format), in_blocks)

    def vector(self, name: str, size: int, part: range | None = None) -> Tensor:
        tensor = self._find(name, (size,))
        if tensor.format.name not in _DENSE:
            raise ModelLoadError(
                f"{self._file.path.name} has {tensor.name} in {tensor.format.name}, not as floats."
            )
        raw = self._raw_rows(tensor, part or range(size))
        self.bytes_read += raw.nbytes
        values = torch.from_numpy(raw).view(_DENSE[tensor.format.name])
        return values.flatten().to(torch.float32, copy=True)

    def _find(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        if name not in self._file.tensors:
            raise ModelLoadError(f"{self._file.path.name} has no tensor for {name}.")
        tensor = self._file.tensors[name]
        rows = math.prod(tensor.shape[:-1])
        is_matrix = len(shape) == 2 != len(tensor.shape) and (rows, tensor.shape[-1]) == shape
        is_vector = len(shape) == 1 != len(tensor.shape) and math.prod(tensor.shape) == shape[0]
        if is_matrix or is_vector:
            # A matrix of one row, several matrices one below the other, or a vector with axes of size 1.
            tensor = replace(tensor, shape=shape)
        if tensor.shape != shape:
            raise ModelLoadError(
                f"{self._file.path.name} has {tensor.name} of shape {list(tensor.shape)} "
                f"where its metadata asks for {list(shape)}."
            )
        return tensor

    def _raw_rows(self, tensor: TensorInfo, rows: range) -> NDArray[np.uint8]:
        """Return uint8 [rows, bytes of a row], a view into the file. A vector's elements count as its rows."""
        raw = self._parts[tensor.part][tensor.offset : tensor.offset + tensor.num_bytes].reshape(
            tensor.shape[0], -1
        )
        return raw[rows.start : rows.stop]
