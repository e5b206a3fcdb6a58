"""The weights of a layer's experts on the GPU, in the form in which they come: eight bits (int8, float8), four bits
(int4, float4), or the compute type.

weight[e, n, k] = (number × scale + offset) × row scale, with a number of eight or four bits, a scale and maybe an
offset for each `group` neighbours of a row, and maybe a scale for the row. Codes are kept in chunks of inputs,
[E, K / chunk, N, chunk], so that the codes that a program reads at a time lie side by side. Byte j of a chunk of four
bits holds the codes of its inputs j (low bits) and j + chunk / 2 (high bits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import DenseWeight, Float8Weight, GroupQuantWeight, WeightData
from penstock.kernels.triton.targets import current

# The forms of a number.
DENSE, INT8, FLOAT8, INT4, FLOAT4 = map(tl.constexpr, range(5))
# The forms of scales: none, numbers, or exponents of two with a bias of 127.
NO_SCALES, NUMBERS, EXPONENTS = map(tl.constexpr, range(3))
SMALLEST_CHUNK, LARGEST_CHUNK = 16, 128
SMALLEST_FLOAT8_CHUNK = 32  # float8 inputs that a tensor core multiplies at once
INT4_ZERO = 8  # is subtracted from codes of four bits, so that offsets are small


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """The same matrix of all experts."""

    codes: Tensor  # [E, K / chunk, N, bytes of a chunk]; dense: [E, N, K] in the compute type
    form: int  # DENSE to FLOAT4
    outputs: int
    width: int
    scales: Tensor | None = None  # [E, K / group, N], numbers or (uint8) exponents
    offsets: Tensor | None = None  # [E, K / group, N]
    row_scales: Tensor | None = None  # float32 [E, N]
    order: Tensor | None = None  # int32 [E, K]: the input of each column, where that is another one
    group: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(table.nbytes for table in self.tables())

    def tables(self) -> list[Tensor]:
        """Return the tensors, each of which has a row for each expert."""
        tables = self.codes, self.scales, self.offsets, self.row_scales, self.order
        return [table for table in tables if table is not None]

    @property
    def chunk(self) -> int:
        """Return the inputs whose codes lie side by side."""
        return self.codes.shape[3] * (2 if self.form in (INT4.value, FLOAT4.value) else 1)

    def rounds_inputs(self, dtype: torch.dtype) -> bool:
        """Return whether inputs of this type are rounded to float8 too, and both go through float8 tensor cores."""
        is_fitting = self.form == FLOAT8.value and self.chunk >= SMALLEST_FLOAT8_CHUNK
        return is_fitting and current().has_float8 and dtype != torch.float32

    @property
    def scale_form(self) -> int:
        if self.scales is None:
            return NO_SCALES.value
        return EXPONENTS.value if self.scales.dtype == torch.uint8 else NUMBERS.value

    @property
    def readable_codes(self) -> Tensor:
        """Return the codes as this GPU's kernels read them."""
        is_bytes = self.form == FLOAT8.value and not current().has_float8
        return self.codes.view(torch.uint8) if is_bytes else self.codes


def pack_matrix(
    parts: Sequence[WeightData], dtype: torch.dtype, device: torch.device, row_order: Tensor | None = None
) -> ExpertStack:
    """Pack the matrices of one expert, stacked along their outputs. Matrices of different kinds become dense. With
    `row_order`, each part's outputs are put into this order."""
    packed = [_pack(part, dtype, device, row_order) for part in parts]
    if any(each.offsets is not None for each in packed):
        packed = [_with_offsets(each) for each in packed]
    if len({_kind(each) for each in packed}) > 1 or not _same_order(packed):
        packed = [_dense(part, dtype, device, row_order) for part in parts]
    first = packed[0]
    outputs = sum(each.outputs for each in packed)
    if first.form == DENSE.value:
        codes = torch.cat([each.codes for each in packed], dim=1)
        return replace(first, codes=codes, outputs=outputs)

    def joined(name: str, dim: int) -> Tensor | None:
        tables = [getattr(each, name) for each in packed]
        return None if tables[0] is None else torch.cat(tables, dim=dim)

    codes = torch.cat([each.codes.view(torch.uint8) for each in packed], dim=2).view(first.codes.dtype)
    return replace(
        first,
        codes=codes,
        outputs=outputs,
        scales=joined("scales", 2),
        offsets=joined("offsets", 2),
        row_scales=joined("row_scales", 1),
    )


def stack(experts: list[ExpertStack], dtype: torch.dtype) -> ExpertStack:
    """Put experts together. Experts of different kinds become dense."""
    has_offsets = any(each.offsets is not None for each in experts)
    experts = [_with_offsets(each) if has_offsets else each for each in experts]
    if len({_kind(each) for each in experts}) > 1:
        experts = [_as_dense(each, dtype) for each in experts]

    def joined(name: str) -> Tensor | None:
        tables = [getattr(each, name) for each in experts]
        if tables[0] is None:
            return None
        kept = tables[0].dtype
        whole = tables[0].new_empty(len(tables), *tables[0].shape[1:])
        for index, table in enumerate(tables):
            whole[index] = table[0]
            experts[index] = replace(experts[index], **{name: table[:0]})  # lets the memory go
        return whole.view(kept)

    first = experts[0]
    tables: dict[str, Any] = {
        name: joined(name) for name in ("codes", "scales", "offsets", "row_scales", "order")
    }
    return replace(first, **tables)


def _with_offsets(packed: ExpertStack) -> ExpertStack:
    """Return the same weights with offsets, of zero where there were none."""
    if packed.offsets is not None or packed.scale_form != NUMBERS.value:
        return packed
    assert packed.scales is not None
    return replace(packed, offsets=torch.zeros_like(packed.scales))


def _kind(packed: ExpertStack) -> tuple[object, ...]:
    """Return the kind of a matrix. Matrices of one kind can be stacked."""
    optional = packed.scales, packed.offsets, packed.row_scales, packed.order
    return (
        packed.form,
        packed.scale_form,
        packed.group,
        packed.codes.shape[-1],
        *(each is None for each in optional),
    )


def _same_order(packed: list[ExpertStack]) -> bool:
    first = packed[0].order
    return first is None or all(each.order is not None and torch.equal(each.order, first) for each in packed)


def _dense(
    part: WeightData, dtype: torch.dtype, device: torch.device, row_order: Tensor | None
) -> ExpertStack:
    values = part.values.to(device, dtype) if isinstance(part, DenseWeight) else part.dequantize(dtype)
    if row_order is not None:
        values = values[row_order.to(values.device)]
    return ExpertStack(values.to(device)[None], DENSE.value, *part.shape)


def _pack(
    part: WeightData, dtype: torch.dtype, device: torch.device, row_order: Tensor | None
) -> ExpertStack:
    outputs, width = part.shape
    group = width
    if not isinstance(part, DenseWeight) and part.group is not None:
        group = part.group
    chunk = min(group & -group, LARGEST_CHUNK)
    is_four_bits = isinstance(part, GroupQuantWeight) and (part.bits == 4 or part.is_float4)
    if is_four_bits:
        chunk = max(chunk, 2 * SMALLEST_CHUNK)  # its halves may have different scales
    if isinstance(part, DenseWeight) or chunk < SMALLEST_CHUNK or width % chunk:
        return _dense(part, dtype, device, row_order)
    order = None
    offsets: Tensor | None = None
    if isinstance(part, Float8Weight):
        form, codes = FLOAT8.value, part.values.to(device).view(torch.uint8)
        scales = part.scales.to(device).view(outputs, -1)
    else:
        form, codes, scales = INT8.value, part.codes.to(device).view(torch.uint8), part.scales.to(device)
        offsets = None if part.offsets is None else part.offsets.to(device)
        if part.input_order is not None:
            order = part.input_order.to(device, torch.int32)[None]
        if is_four_bits:
            form = FLOAT4.value if part.is_float4 else INT4.value
    if form == INT4.value:
        offsets = (0.0 if offsets is None else offsets) + INT4_ZERO * scales
        offsets = offsets if offsets.is_meta or bool(offsets.any()) else None
    elif form == FLOAT4.value:
        codes, scales = _float4_codes(codes.view(torch.int8)), scales * 2
    if row_order is not None:
        rows = row_order.to(device)
        codes, scales = codes[rows], scales[rows]
        offsets = None if offsets is None else offsets[rows]
    tables = _tables(scales.float(), offsets, form, dtype)
    codes = codes.view(outputs, width // chunk, chunk).transpose(0, 1)
    if is_four_bits:
        codes = codes[:, :, : chunk // 2] | codes[:, :, chunk // 2 :] << 4
    kept = {INT8.value: torch.int8, FLOAT8.value: torch.float8_e4m3fn}.get(form, torch.uint8)
    codes = codes.contiguous().view(kept)[None]
    return ExpertStack(codes, form, outputs, width, *tables, order=order, group=group)


def _tables(
    scales: Tensor, offsets: Tensor | None, form: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return scales, offsets and row scales as they are kept. Scales and offsets of several groups have 16 bits each
    and are at most 1, with a power of two for the row; in models that compute in float32, they have 32 bits."""
    if scales.shape[1] == 1 and offsets is None:
        return None, None, scales.t().contiguous()
    if form == FLOAT4.value and offsets is None:
        mantissas, exponents = torch.frexp(scales)
        if scales.is_meta or bool((mantissas == 0.5).logical_or(scales == 0).all()):
            kept = torch.where(scales == 0, 0, exponents + 126).clamp(0, 254).to(torch.uint8)
            return kept.t().contiguous()[None], None, None
    if dtype == torch.float32:
        kept_offsets = None if offsets is None else offsets.t().contiguous()[None]
        return scales.t().contiguous()[None], kept_offsets, None
    largest = scales.abs().amax(dim=1, keepdim=True)
    if offsets is not None:
        largest = torch.maximum(largest, offsets.abs().amax(dim=1, keepdim=True))
    unit = torch.exp2(torch.frexp(largest.clamp_min(1e-30))[1].float())

    def narrow(table: Tensor) -> Tensor:
        return (table / unit).t().to(torch.float16).contiguous()[None]

    return narrow(scales), None if offsets is None else narrow(offsets), unit.t().contiguous()


# The four-bit floats (e2m1) whose doubles are 0, 1, 2, 3, 4, 6, 8 and 12.
_FLOAT4_OF = torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.uint8)


def _float4_codes(doubles: Tensor) -> Tensor:
    """Return the bits of four-bit floats, given twice their values."""
    signs = (doubles < 0).to(torch.uint8) << 3
    return _FLOAT4_OF.to(doubles.device)[doubles.abs().long()] | signs


def _as_dense(packed: ExpertStack, dtype: torch.dtype) -> ExpertStack:
    """Unpack the matrix of one expert."""
    if packed.form == DENSE.value:
        return packed
    values = unpacked(packed)[0].to(dtype)
    return ExpertStack(values[None], DENSE.value, packed.outputs, packed.width)


def unpacked(packed: ExpertStack) -> Tensor:
    """Return the matrices in float32 [E, N, K]."""
    experts, _, outputs, _ = packed.codes.shape
    codes = packed.codes
    if packed.form in (INT4.value, FLOAT4.value):
        codes = torch.cat((codes & 15, codes >> 4), dim=3)
    numbers = codes.float()
    if packed.form == INT4.value:
        numbers = numbers - INT4_ZERO
    elif packed.form == FLOAT4.value:
        halves = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], device=codes.device) / 2
        numbers = torch.cat((halves, -halves))[codes.long()]
    values = numbers.transpose(1, 2).reshape(experts, outputs, -1)

    def spread(table: Tensor) -> Tensor:
        return table.transpose(1, 2).repeat_interleave(packed.group, dim=2)

    if packed.scales is not None:
        scales = packed.scales.float()
        if packed.scales.dtype == torch.uint8:
            scales = torch.where(scales == 0, 0, torch.exp2(scales - 127))
        values = values * spread(scales)
    if packed.offsets is not None:
        values = values + spread(packed.offsets.float())
    if packed.row_scales is not None:
        values = values * packed.row_scales.unsqueeze(2)
    if packed.order is not None:
        places = packed.order.long().unsqueeze(1).expand_as(values)
        values = torch.empty_like(values).scatter_(2, places, values)
    return values
