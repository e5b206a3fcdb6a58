"""Matrix products with weights in float8 (e4m3) and a scale for each output.

Few rows read the weights as they are and compute in the input's type; many rows are rounded to float8 themselves,
each with a scale of its own, and go through Hopper's float8 tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import Float8Weight
from penstock.kernels.triton.overlap import wait_for_previous

LARGEST = tl.constexpr(448.0)


@dataclass(frozen=True, slots=True)
class Float8Linear:
    weight: Tensor  # float8_e4m3fn [out, in]
    scales: Tensor  # float32 [out]
    bias: Tensor | None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes + (self.bias.nbytes if self.bias is not None else 0)


def pack(
    parts: list[Float8Weight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Float8Linear:
    return Float8Linear(
        torch.cat([part.values.to(device) for part in parts]),
        torch.cat([part.scales.to(device) for part in parts]),
        None if bias is None else bias.to(device, dtype),
    )


@triton.jit
def _round_kernel(x, out, scales, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    wait_for_previous()
    values = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-12) / LARGEST
    tl.store(scales + row, scale)
    tl.store(out + row * width + columns, (values / scale).to(out.dtype.element_ty), mask=inside)


def many_rows(x: Tensor, weight: Float8Linear, out_dtype: torch.dtype) -> Tensor:
    rows, width = x.shape
    rounded = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _round_kernel[(rows,)](x, rounded, scales, width, BLOCK=block, num_warps=8, launch_pdl=True)
    bias = None if weight.bias is None else weight.bias.to(out_dtype)
    made = torch._scaled_mm(
        rounded,
        weight.weight.t(),
        scale_a=scales,
        scale_b=weight.scales.view(1, -1),
        out_dtype=torch.bfloat16,
    )
    made = made.to(out_dtype)
    return made if bias is None else made + bias
