"""Scales weights by the activations that they are multiplied with, before rounding: to four bits, after the idea of
AWQ, and to int8, after the idea of SmoothQuant.

AWQ: large inputs of a product matter more. Multiplying their columns of the weights by s, and dividing those inputs
by s at their origin, leaves the model's results unchanged and gives those columns finer steps. s is a power of the
mean size of each input; the search picks the power that changes the outputs on the calibration text the least. The
division goes into the norm before the product, or into the rows of the matrix before it.

SmoothQuant: a few inputs of a product are much larger than the others. A row of activations has one scale, so the
large inputs leave few steps for the others. Dividing each input by s and multiplying its column of the weights by s
moves some of the difficulty into the weights, whose columns are more even. s is (largest input) ** power / (largest
weight of the column) ** (1 - power), with a power that is found as for AWQ. The division goes to the same places as
for AWQ.

An inventory lists the tensors that a model loads, with their shapes, and which matrices are multiplied together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.kernels.interface import (
    DenseWeight,
    GroupQuantWeight,
    Ops,
    PackedExperts,
    PackedLinear,
    WeightData,
)
from penstock.kernels.reference import TorchLinear, TorchOps
from penstock.kernels.tensor_kv import to_codes
from penstock.models.config import ArchitectureConfig
from penstock.models.load import Checkpoint
from penstock.models.model import Model
from penstock.models.quantization.evaluation import WindowRunner
from penstock.models.quantization.layouts import round_to_groups
from penstock.models.weight_parts import Part, take_part
from penstock.models.weights import ExpertNames, OnProgress, WeightLoader, WeightSource

_HEAD = "lm_head"
_ROUTER_ENDS = (".gate", ".shared_expert_gate")


@dataclass(slots=True)
class Inventory:
    matrices: dict[str, tuple[int, int]] = field(default_factory=dict)  # by full name
    vectors: dict[str, int] = field(default_factory=dict)
    stacks: list[tuple[str, ...]] = field(default_factory=list)  # of names without `.weight`
    experts: list[str] = field(default_factory=list)  # likewise

    def quantizable(self) -> list[str]:
        """Return the full names of the matrices of layers. The head and routers are not quantized, as is usual."""
        stems = [stem for stack in self.stacks for stem in stack] + self.experts
        return [f"{stem}.weight" for stem in stems if stem != _HEAD and not stem.endswith(_ROUTER_ENDS)]


class ListingLoader(WeightLoader):
    """Loads a model and writes down what the model asks for, so that no list of names has to be kept for each
    architecture."""

    def __init__(self, source: WeightSource, ops: Ops, on_progress: OnProgress | None) -> None:
        super().__init__(source, ops, on_progress=on_progress)
        self.inventory = Inventory()

    def experts(
        self,
        names: Sequence[ExpertNames],
        intermediate_size: int,
        hidden_size: int,
        *,
        bias: bool = False,
        scales: Tensor | None = None,
    ) -> PackedExperts:
        self.inventory.experts += [stem for expert in names for stem in expert]
        return super().experts(names, intermediate_size, hidden_size, bias=bias, scales=scales)

    def _matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> WeightData:
        self.inventory.matrices[name] = (rows, columns)
        return super()._matrix(name, rows, columns, part)

    def _host_vector(self, name: str, size: int, part: range | None = None) -> Tensor:
        self.inventory.vectors[name] = size
        return super()._host_vector(name, size, part)


@dataclass(frozen=True, slots=True)
class Listed:
    model: Model
    inventory: Inventory
    stack_of: dict[int, tuple[str, ...]]


def load_listed(
    checkpoint: Checkpoint, ops: Ops, num_positions: int, on_progress: OnProgress | None = None
) -> Listed:
    loader = ListingLoader(checkpoint.source(), ops, on_progress)
    model = checkpoint.architecture(checkpoint.config, loader, num_positions)
    loader.inventory.stacks = [product.names for product in loader.products]
    return Listed(model, loader.inventory, {id(product.packed): product.names for product in loader.products})


_ROWS_PER_STACK = 192  # inputs kept to judge a scaling by
_NUM_POWERS = 16


@dataclass(slots=True)
class Inputs:
    """Statistics of the inputs of one stack of matrices."""

    total: Tensor  # float32 [in], sum of sizes
    largest: Tensor  # float32 [in]
    count: int = 0
    rows: list[Tensor] = field(default_factory=list)

    @property
    def mean_size(self) -> Tensor:
        return self.total / max(1, self.count)


class RecordingOps(TorchOps):
    """Plain torch that records the inputs of every product."""

    def __init__(self, dtype: torch.dtype, rows_per_call: int) -> None:
        super().__init__("cpu", dtype)
        self.names: dict[int, tuple[str, ...]] = {}
        self.inputs: dict[tuple[str, ...], Inputs] = {}
        self._rows_per_call = rows_per_call

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        names = self.names.get(id(weight))
        if names is not None:
            sizes = x.float().abs()
            seen = self.inputs.setdefault(names, Inputs(*torch.zeros(2, x.shape[1])))
            seen.total += sizes.sum(dim=0)
            seen.largest = torch.maximum(seen.largest, sizes.amax(dim=0))
            seen.count += len(x)
            step = max(1, len(x) // self._rows_per_call)
            seen.rows.append(x[step - 1 :: step].float())
        return super().linear(x, weight)


def record_inputs(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    pieces: Sequence[Sequence[int]],
    num_positions: int,
    on_window: Callable[[], None],
) -> dict[tuple[str, ...], Inputs]:
    ops = RecordingOps(dtype, max(1, _ROWS_PER_STACK // len(pieces)))
    listed = load_listed(checkpoint, ops, num_positions)
    ops.names = listed.stack_of
    runner = WindowRunner(listed.model, ops)
    for piece in pieces:
        runner.hidden(piece)
        on_window()
    return ops.inputs


@dataclass(slots=True)
class Scaling:
    """Factors by the full names of tensors."""

    columns: dict[str, Tensor] = field(default_factory=dict)  # a matrix's columns are multiplied
    rows: dict[str, Tensor] = field(default_factory=dict)  # a matrix's rows, or a vector, are divided


class ScaledSource:
    """A source with scaled weights of another source: the same model with other values. The model adds `norm_offset`
    to the norms that it reads."""

    def __init__(self, source: WeightSource, scaling: Scaling, norm_offset: float) -> None:
        self._source = source
        self._scaling = scaling
        self._norm_offset = norm_offset

    def names(self) -> frozenset[str]:
        return self._source.names()

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> WeightData:
        weight = self._scaled(name, self._source.matrix(name, rows, columns))
        return weight if part is None else take_part(weight, part)

    def vector(self, name: str, size: int, part: range | None = None) -> Tensor:
        values = self._source.vector(name, size)
        divisor = self._scaling.rows.get(name)
        if divisor is not None:
            offset = self._norm_offset if name.endswith("norm.weight") else 0.0
            values = (values + offset) / divisor - offset
        return values if part is None else values[part.start : part.stop]

    def _scaled(self, name: str, weight: WeightData) -> WeightData:
        by_column, by_row = self._scaling.columns.get(name), self._scaling.rows.get(name)
        if by_column is None and by_row is None:
            return weight
        values = dense_values(weight)
        if by_column is not None:
            values = values * by_column
        if by_row is not None:
            values = values / by_row.unsqueeze(1)
        return DenseWeight(values)


@dataclass(frozen=True, slots=True)
class Pair:
    """Matrices that share an input, and the tensors that can be divided by the factors of that input."""

    consumers: tuple[str, ...]  # without `.weight`
    producers: tuple[str, ...]  # full names


# Takes the weights that share an input, one below the other, and what was seen of that input.
FactorSearch: TypeAlias = Callable[[Tensor, Inputs], Tensor]


def search_scaling(
    source: WeightSource,
    checkpoint: Checkpoint,
    inventory: Inventory,
    inputs: dict[tuple[str, ...], Inputs],
    best_factors: FactorSearch,
    on_pair: Callable[[float], None],
) -> Scaling:
    """Ask `best_factors` for the factors of each pair, and report the share of pairs done to `on_pair`."""
    scaling = Scaling()
    pairs = scalable_pairs(checkpoint, inventory)
    for index, pair in enumerate(pairs):
        seen = inputs.get(pair.consumers)
        if seen is not None and seen.count:
            names = [f"{consumer}.weight" for consumer in pair.consumers]
            weights = [dense_values(source.matrix(name, *inventory.matrices[name])) for name in names]
            factors = best_factors(torch.cat(weights), seen)
            scaling.columns.update(dict.fromkeys(names, factors))
            scaling.rows.update(dict.fromkeys(pair.producers, factors))
        on_pair((index + 1) / len(pairs))
    return scaling


def dense_values(weight: WeightData) -> Tensor:
    return weight.values.float() if isinstance(weight, DenseWeight) else weight.dequantize()


def factors_for_int4(weight: Tensor, seen: Inputs, *, group: int) -> Tensor:
    """Return the factors of AWQ."""
    rows = torch.cat(seen.rows)
    size = seen.mean_size.clamp_min(1e-4 * float(seen.mean_size.max()) + 1e-12)
    best, least = torch.ones_like(size), float("inf")
    for step in range(_NUM_POWERS):
        factors = size ** (step / _NUM_POWERS)
        factors = factors / (factors.max() * factors.min()).sqrt()
        rounded = round_to_groups(weight * factors, group, 4, symmetric=False).dequantize() / factors
        error = float((rows @ (rounded - weight).T).square().mean())
        if error < least:
            best, least = factors, error
    return best


def scalable_pairs(checkpoint: Checkpoint, inventory: Inventory) -> list[Pair]:
    config = checkpoint.config
    mlp_norm = checkpoint.architecture.mlp_norm_name
    known = set(inventory.stacks)
    pairs = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        pairs += [
            Pair(tuple(f"{attention}.{part}_proj" for part in "qkv"), (f"{prefix}.input_layernorm.weight",)),
            Pair((f"{mlp}.gate_proj", f"{mlp}.up_proj"), (f"{prefix}.{mlp_norm}.weight",)),
            Pair((f"{mlp}.down_proj",), _with_bias(f"{mlp}.up_proj", inventory)),
        ]
        if _values_feed_output_one_to_one(config):
            pairs.append(Pair((f"{attention}.o_proj",), _with_bias(f"{attention}.v_proj", inventory)))
    return [pair for pair in pairs if pair.consumers in known]


def _values_feed_output_one_to_one(config: ArchitectureConfig) -> bool:
    """With fewer value heads than query heads, one row of V feeds several inputs of the output matrix."""
    return config.num_heads == config.num_kv_heads


def _with_bias(stem: str, inventory: Inventory) -> tuple[str, ...]:
    bias = f"{stem}.bias"
    return (f"{stem}.weight", bias) if bias in inventory.vectors else (f"{stem}.weight",)


_POWERS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
_SMALLEST = 1e-5


def factors_for_int8(weight: Tensor, seen: Inputs) -> Tensor:
    """Return the factors of SmoothQuant."""
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
    """Round values to int8 with a scale for each row, and back."""
    codes, scales = to_codes(values)
    return codes.float() * scales.unsqueeze(1)


class RoundedInputsOps(TorchOps):
    """Plain torch that rounds the inputs of products whose weights were made for int8 inputs, as CUDA does for many
    rows."""

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
