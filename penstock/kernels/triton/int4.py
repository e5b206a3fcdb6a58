"""Weights of four bits, kept packed in memory: their layout, and how they are unpacked for products of many rows.
`int4_row` and `int4_few` multiply them as they are.

weight[n, k] = code × scale + offset, with a scale and an offset for each `group` neighbours of a row. Byte j of a
group holds the codes of its columns j (low bits) and j + group / 2 (high bits), so that a load of bytes meets two
plain loads of the input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import GroupQuantWeight
from penstock.kernels.triton.device import cdiv, next_power_of_2
from penstock.kernels.triton.overlap import launch_options, wait_for_previous

SMALLEST_GROUP = 32  # half of it is the least that a tensor core multiplies at once


@dataclass(frozen=True, slots=True)
class Int4Linear:
    codes: Tensor  # uint8 [out, in / 2]
    # [out, in / group, 2] in the compute type: scale and offset, which are always needed together.
    factors: Tensor
    group: int
    bias: Tensor | None

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * 2

    @property
    def pairs(self) -> Tensor:
        """[out, in / group], a word for both factors: loads of them need no rearranging."""
        word = torch.int64 if self.factors.dtype == torch.float32 else torch.int32
        return self.factors.view(word).squeeze(2)

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.factors.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def rows(self, index: Tensor) -> Int4Linear:
        return Int4Linear(self.codes[index], self.factors[index], self.group, None)


def pack(
    parts: list[GroupQuantWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Int4Linear:
    """Pack stacked parts. All parts have four bits and the same group."""
    group = parts[0].group
    codes = torch.cat([part.codes for part in parts]).to(device)
    outputs, width = codes.shape
    halves = codes.view(outputs, width // group, 2, group // 2)
    packed = (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(outputs, width // 2)
    scales = torch.cat([part.scales for part in parts])
    offsets = torch.cat(
        [part.offsets if part.offsets is not None else torch.zeros_like(part.scales) for part in parts]
    )
    return Int4Linear(
        packed.contiguous(),
        torch.stack((scales, offsets), dim=2).to(device, dtype),
        group,
        None if bias is None else bias.to(device, dtype),
    )


@triton.jit
def load_factors(pairs, at, type: tl.constexpr):
    """Scales and offsets of the groups `at`, as float32. One word holds both, of this type."""
    both = tl.load(pairs + at)
    if type == tl.bfloat16:
        scale = (both << 16).to(tl.float32, bitcast=True)
        offset = ((both >> 16) << 16).to(tl.float32, bitcast=True)
    elif type == tl.float16:
        scale = both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        offset = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        scale = both.to(tl.int32).to(tl.float32, bitcast=True)
        offset = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return scale, offset


@triton.jit
def _unpack_kernel(codes, pairs, out, K, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    output = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = tl.arange(0, GROUP // 2)
    inside = (group * GROUP < K)[:, None]
    wait_for_previous()
    at = output * (K // 2) + group[:, None] * (GROUP // 2) + columns[None, :]
    packed = tl.load(codes + at, mask=inside, other=0)
    own_group = tl.minimum(group, K // GROUP - 1)
    scale, offset = load_factors(pairs, (output * (K // GROUP) + own_group)[:, None], out.dtype.element_ty)
    low = (packed & 15).to(tl.float32) * scale + offset
    high = (packed >> 4).to(tl.float32) * scale + offset
    target = out + output * K + group[:, None] * GROUP + columns[None, :]
    tl.store(target, low.to(out.dtype.element_ty), mask=inside)
    tl.store(target + GROUP // 2, high.to(out.dtype.element_ty), mask=inside)


def unpack(weight: Int4Linear, dtype: torch.dtype) -> Tensor:
    """Return the dense matrix [out, in]. Unpacking pays off for products of many rows."""
    outputs, width = weight.out_features, weight.in_features
    out = torch.empty(outputs, width, dtype=weight.factors.dtype, device=weight.codes.device)
    groups = max(1, min(16, next_power_of_2(width // weight.group)))
    _unpack_kernel[(outputs, cdiv(width // weight.group, groups))](
        weight.codes, weight.pairs, out, width, GROUP=weight.group, GROUPS=groups, num_warps=4,
        **launch_options(),
    )  # fmt: skip
    return out.to(dtype)
