"""Smoothing before weights and activations are both rounded to int8, after the idea of SmoothQuant.

A few inputs of a product are much larger than the others, and a row of activations has one scale, so those few leave
the others hardly any steps. Dividing each input by s and multiplying its column of the weights by s moves some of the
difficulty into the weights, whose columns are more even. s is the largest size of the input to a power, over that of
the column to the rest of 1; the power is the one that, on the calibration text, leaves the outputs nearest to what
they were. Where the division goes is as in `awq`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.interface import GroupQuantWeight, WeightData
from penstock.kernels.reference import TorchLinear, TorchOps
from penstock.kernels.tensor_kv import to_codes
from penstock.models.load import Checkpoint
from penstock.models.quantization.awq import Inputs, Scaling, dense_values, scalable_pairs
from penstock.models.quantization.inventory import Inventory
from penstock.models.weights import WeightSource

_POWERS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
_SMALLEST = 1e-5


def search_smoothing(
    source: WeightSource,
    checkpoint: Checkpoint,
    inventory: Inventory,
    inputs: dict[tuple[str, ...], Inputs],
    on_pair: Callable[[float], None],
) -> Scaling:
    scaling = Scaling()
    pairs = scalable_pairs(checkpoint, inventory)
    for index, pair in enumerate(pairs):
        seen = inputs.get(pair.consumers)
        if seen is not None and seen.count:
            names = [f"{consumer}.weight" for consumer in pair.consumers]
            weights = [dense_values(source.matrix(name, *inventory.matrices[name])) for name in names]
            factors = _best_factors(torch.cat(weights), seen)
            scaling.columns.update(dict.fromkeys(names, factors))
            scaling.rows.update(dict.fromkeys(pair.producers, factors))
        on_pair((index + 1) / len(pairs))
    return scaling


def _best_factors(weight: Tensor, seen: Inputs) -> Tensor:
    rows = torch.cat(seen.rows)
    wanted = rows @ weight.T
    input_sizes = seen.largest.clamp_min(_SMALLEST)
    column_sizes = weight.abs().amax(dim=0).clamp_min(_SMALLEST)
    candidates = [torch.ones_like(input_sizes)]
    candidates += [
        (input_sizes**power / column_sizes ** (1 - power)).clamp_min(_SMALLEST) for power in _POWERS
    ]

    def error(factors: Tensor) -> float:
        made = _rounded(rows / factors) @ _rounded(weight * factors).T
        return float((made - wanted).square().sum())

    return min(candidates, key=error)


def _rounded(values: Tensor) -> Tensor:
    """What int8 with a scale for each row makes of them."""
    codes, scales = to_codes(values)
    return codes.float() * scales.unsqueeze(1)


class RoundedInputsOps(TorchOps):
    """Plain torch that rounds the inputs of products whose weights were made for it, as CUDA does for many rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__("cpu", dtype)
        self._rounding: set[int] = set()  # ids of packed weights, which live as long as the model

    def pack_linear(self, parts: Sequence[WeightData], bias: Tensor | None = None) -> TorchLinear:
        packed = super().pack_linear(parts, bias)
        if all(isinstance(part, GroupQuantWeight) and part.rounds_inputs for part in parts):
            self._rounding.add(id(packed))
        return packed

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        return super().linear(_rounded(x).to(x.dtype) if id(weight) in self._rounding else x, weight)
