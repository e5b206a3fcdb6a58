"""Defines sources of weights, and loads them for a model. Knows no file formats and no architectures.

Names are those of Hugging Face checkpoints of text models (`model.layers.0.self_attn.q_proj.weight`); a source
that stores others translates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.core.engine_config import Quantization
from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import (
    DenseWeight,
    ExpertWeights,
    GroupQuantWeight,
    Ops,
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    WeightData,
)
from penstock.models.rounding import quantize
from penstock.models.sharding import WHOLE, Shard
from penstock.models.weight_parts import Part, multiplied

OnProgress = Callable[[str, float], None]


class WeightSource(Protocol):
    """Tensors by name, read one at a time when asked for. A tensor that is missing, or not of the shape the model
    expects, is a ModelLoadError. The sizes given are those of the whole tensor, also where a part of it is taken."""

    @property
    def bytes_read(self) -> int:
        """Return the bytes of the files that were read so far."""
        ...

    def names(self) -> frozenset[str]: ...

    def matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> WeightData: ...

    def vector(self, name: str, size: int, part: range | None = None) -> Tensor:
        """float32 [size] on the host."""
        ...


@dataclass(frozen=True, slots=True)
class Stacked:
    """The position of a matrix in a tensor that holds `count` matrices of the same shape."""

    name: str
    index: int
    count: int
    transposed: bool = False  # whether matrices are stored [in, out]


@runtime_checkable
class StackedSource(Protocol):
    """Sources of files that may hold several matrices in one tensor."""

    def stacked_matrix(self, place: Stacked, rows: int, columns: int, part: Part) -> WeightData:
        """Return a part of one of the matrices, each of which is [rows, columns] for the model."""
        ...


@runtime_checkable
class IndexSource(Protocol):
    """Sources of files that may hold tables of whole numbers."""

    def indices(self, name: str, rows: int, columns: int) -> Tensor:
        """int64 [rows, columns] on the host."""
        ...


class ExpertNames(NamedTuple):
    """The names of the three matrices of one expert in a checkpoint. An expert without a gate has two: its gate is
    the matrix `up` once more, which doubles that matrix in memory."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class LinearPart:
    """A rank's part of stacked matrices: some rows of each, or some columns of all. Ranks that took columns add up
    their results, so only the first rank adds the bias."""

    rows: Sequence[range] | None = None
    columns: range | None = None


@dataclass(frozen=True, slots=True)
class AdaptedPlace:
    """The matrix that adapters change in order to change a matrix of the model: its name in the family's checkpoints,
    its rows, and the row of it for each row of the model's matrix."""

    name: str
    rows: int
    order: Tensor | None = None  # int64; None for the same rows


@dataclass(frozen=True, slots=True)
class NamedProduct:
    """Matrices of a checkpoint that were stacked, in this order, into one product."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    packed: PackedLinear
    places: tuple[
        AdaptedPlace, ...
    ] = ()  # one for each matrix; none where adapters use the same names and rows
    part: LinearPart = LinearPart()  # that this rank has

    @property
    def own_rows(self) -> Sequence[range]:
        return self.part.rows if self.part.rows is not None else [range(height) for height in self.rows]

    @property
    def own_columns(self) -> range:
        return self.part.columns if self.part.columns is not None else range(self.columns)

    def adapted_places(self) -> tuple[AdaptedPlace, ...]:
        return self.places or tuple(map(AdaptedPlace, self.names, self.rows))


class WeightLoader:
    """Packs a source's weights for a backend, one layer at a time, and counts parameters and bytes."""

    def __init__(
        self,
        source: WeightSource,
        ops: Ops,
        *,
        quantization: Quantization | None = None,
        shard: Shard = WHOLE,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.ops = ops
        self.shard = shard
        self.num_parameters = 0
        self.weight_bytes = 0
        self.experts_read_bytes = 0  # of experts, in the form in which they come to the backend
        self.experts_kept_bytes = 0  # of experts, in the form in which the backend keeps them
        self.products: list[NamedProduct] = []
        self._source = source
        self._names = source.names()
        self._quantization = quantization
        self._on_progress = on_progress
        self._num_loaded = 0
        self._read: set[str] = set()  # names of tensors
        self._denied: dict[str, int] = {}  # biases that products do not have by the settings, and their sizes

    def has(self, name: str) -> bool:
        return name in self._names

    def vector(self, name: str, size: int, *, plus: float = 0.0) -> Tensor:
        """float32 on the backend's device, for norms."""
        values = self._host_vector(name, size)
        self.weight_bytes += values.nbytes
        return (values + plus).to(self.ops.device)

    def table(self, name: str, rows: int, columns: int) -> Tensor:
        """float32 [rows, columns] on the backend's device, for embeddings that are looked up as they are."""
        weight = self._matrix(name, rows, columns)
        values = weight.values.float() if isinstance(weight, DenseWeight) else weight.dequantize()
        self.weight_bytes += values.nbytes
        return values.to(self.ops.device)

    def indices(self, name: str, rows: int, columns: int, limit: int) -> Tensor:
        """int64 [rows, columns] on the backend's device: whole numbers from 0 to below the limit. A source without
        such tables gives each row its own number and those after it."""
        if not isinstance(self._source, IndexSource) or not self._names:
            found = (torch.arange(rows).unsqueeze(1) + torch.arange(columns)) % limit
        else:
            self._read.add(name)
            found = self._source.indices(name, rows, columns)
        if rows and not 0 <= int(found.min()) <= int(found.max()) < limit:
            raise ModelLoadError(f"{name} has numbers outside of 0 to {limit - 1}.")
        self.weight_bytes += found.nbytes
        return found.to(self.ops.device)

    def dense(self, name: str, rows: int, columns: int, own: range) -> Tensor:
        """Return the rows `own` of a matrix in the compute type, on the backend's device, for products that are not
        packed."""
        weight = self._matrix(name, rows, columns, Part(own, range(columns)))
        dtype = self.ops.dtype
        values = weight.values.to(dtype) if isinstance(weight, DenseWeight) else weight.dequantize(dtype)
        self.weight_bytes += values.nbytes
        return values.to(self.ops.device)

    def linear(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        columns: int,
        *,
        bias: bool = False,
        part: LinearPart | None = None,
        without_bias: Sequence[str] = (),
    ) -> PackedLinear:
        """Load the matrices `{name}.weight`, stacked, with the vectors `{name}.bias` if `bias` is set. The matrices
        `without_bias` have none."""
        part = part or LinearPart()
        taken_rows = part.rows if part.rows is not None else [range(height) for height in rows]
        taken_columns = part.columns if part.columns is not None else range(columns)
        parts = [
            self._quantized(f"{name}.weight", height, columns, Part(taken, taken_columns))
            for name, height, taken in zip(names, rows, taken_rows, strict=True)
        ]
        biases = None
        adds_bias = len(taken_columns) == columns or self.shard.tensor_rank == 0
        if not bias:
            self._denied |= dict(zip((f"{name}.bias" for name in names), rows, strict=True))
        if bias and adds_bias:
            biases = torch.cat(
                [
                    torch.zeros(len(taken))
                    if name in without_bias
                    else self._host_vector(f"{name}.bias", height, taken)
                    for name, height, taken in zip(names, rows, taken_rows, strict=True)
                ]
            )
        packed = self.ops.pack_linear(parts, biases)
        self.weight_bytes += packed.num_bytes
        self.products.append(NamedProduct(tuple(names), tuple(rows), columns, packed, part=part))
        return packed

    def refuse_unread_biases(self) -> None:
        """Refuse biases of products that have none by the settings. Some tools store zeros for every product."""
        for stored, height in self._denied.items():
            is_unread = stored in self._names and stored not in self._read
            if is_unread and bool(self._source.vector(stored, height, None).any()):
                raise ModelLoadError(
                    f"The checkpoint has {stored}, and by its settings the model has no such bias.",
                    hint="Correct config.json (attention_bias, mlp_bias or the like).",
                )

    def experts(
        self,
        names: Sequence[ExpertNames],
        intermediate_size: int,
        hidden_size: int,
        *,
        bias: bool = False,
        scales: Tensor | None = None,
    ) -> PackedExperts:
        """Load this rank's part of the experts of a layer; `names` are all of them. With `bias`, each matrix has a
        bias. `scales`, one for each expert, multiply what the experts make."""
        inner = self.shard.expert_inner(intermediate_size)
        own = self.shard.experts(len(names))
        num_bytes = 0

        def read() -> Iterator[ExpertWeights]:
            nonlocal num_bytes
            for number in own:
                weights = self._expert(names[number], inner, intermediate_size, hidden_size, bias=bias)
                num_bytes += sum(part.num_bytes for part in (weights.gate, weights.up, weights.down))
                if scales is not None:
                    weights = replace(weights, down=multiplied(weights.down, float(scales[number])))
                yield weights

        packed = self.ops.pack_experts(read())
        per_expert = len(set(names[0])) * intermediate_size * hidden_size
        if bias:
            per_expert += 2 * intermediate_size + hidden_size
        self.num_parameters += (len(names) - len(own)) * per_expert
        self.weight_bytes += packed.num_bytes
        self.experts_read_bytes += num_bytes
        self.experts_kept_bytes += packed.num_bytes
        return packed

    def _expert(
        self, names: ExpertNames, inner: range, intermediate_size: int, hidden_size: int, *, bias: bool
    ) -> ExpertWeights:
        into, out_of = Part(inner, range(hidden_size)), Part(range(hidden_size), inner)
        gate_up_bias = down_bias = None
        if bias:
            gate_up_bias = torch.cat(
                [
                    self._host_vector(f"{name}.bias", intermediate_size, inner)
                    for name in (names.gate, names.up)
                ]
            )
            down_bias = self._host_vector(f"{names.down}.bias", hidden_size)
            # Ranks with slices of an expert add up their results.
            if len(inner) < intermediate_size and self.shard.tensor_rank > 0:
                down_bias = torch.zeros_like(down_bias)
        up = self._quantized(f"{names.up}.weight", intermediate_size, hidden_size, into)
        gate = up
        if names.gate != names.up:
            gate = self._quantized(f"{names.gate}.weight", intermediate_size, hidden_size, into)
        return ExpertWeights(
            gate=gate,
            up=up,
            down=self._quantized(f"{names.down}.weight", hidden_size, intermediate_size, out_of),
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
        )

    def embedding_and_head(
        self, vocab_size: int, hidden_size: int, *, tied: bool, head_bias: bool = False
    ) -> tuple[PackedEmbedding | None, PackedLinear | None]:
        """Load the embedding and the head. In a pipeline, the first stage has the embedding and the last stage the
        head."""
        is_first, is_last = self.shard.is_first_stage, self.shard.is_last_stage
        rows = self.shard.vocabulary(vocab_size)
        table: PackedEmbedding | None = None
        head: PackedLinear | None = None
        if is_first or (tied and is_last):
            part = Part(rows, range(hidden_size))
            weight = self._matrix("model.embed_tokens.weight", vocab_size, hidden_size, part)
            if tied and is_last:
                bias = self._host_vector("lm_head.bias", vocab_size, rows) if head_bias else None
                head = self.ops.pack_linear([weight], bias)
            table = self.ops.pack_embedding(weight, tied=head) if is_first else None
            self.weight_bytes += sum(packed.num_bytes for packed in (head, table) if packed is not None)
            if not is_first:
                self.num_parameters -= vocab_size * hidden_size  # the first stage counts them
        if is_last and not tied:
            part_of_head = LinearPart(rows=[rows])
            head = self.linear(["lm_head"], [vocab_size], hidden_size, bias=head_bias, part=part_of_head)
        return table, head

    def embedding(self, name: str, rows: int, columns: int, used_rows: int) -> PackedEmbedding:
        """Load a further embedding of the first `used_rows` tokens, or this rank's part of them."""
        part = Part(self.shard.vocabulary(used_rows), range(columns))
        packed = self.ops.pack_embedding(self._matrix(name, rows, columns, part))
        self.weight_bytes += packed.num_bytes
        return packed

    def _quantized(self, name: str, rows: int, columns: int, part: Part) -> WeightData:
        """Return a matrix in the type that was asked for."""
        matrix = self._matrix(name, rows, columns, part)
        if self._quantization is not None and isinstance(matrix, DenseWeight):
            return quantize(matrix, self._quantization)
        return matrix

    def _matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> WeightData:
        if part is not None and (len(part.rows), len(part.columns)) == (rows, columns):
            part = None
        self._read.add(name)
        with _named(f"{name} of {rows} × {columns} numbers"):
            weight = self._source.matrix(name, rows, columns, part)
        if not isinstance(weight, DenseWeight):
            refuse_infinite(f"the scales of {name}", weight.scales)
            if isinstance(weight, GroupQuantWeight) and weight.offsets is not None:
                refuse_infinite(f"the zero points of {name}", weight.offsets)
        self._count(rows * columns)
        return weight

    def _host_vector(self, name: str, size: int, part: range | None = None) -> Tensor:
        self._read.add(name)
        with _named(f"{name} of {size} numbers"):
            values = self._source.vector(name, size, part if part is not None and len(part) < size else None)
        refuse_infinite(name, values)
        self._count(size)
        return values

    def _count(self, num_parameters: int) -> None:
        self.num_parameters += num_parameters
        self._num_loaded += 1
        if self._on_progress is not None:
            # A checkpoint may hold tensors that the model does not use, and lack tensors that the model has.
            num_expected = max(1, len(self._names) // self.shard.num_stages)
            self._on_progress("Loading weights", min(1.0, self._num_loaded / num_expected))


def refuse_infinite(what: str, values: Tensor) -> None:
    """Tensors on the meta device have no numbers."""
    if not values.is_meta and not bool(torch.isfinite(values.float()).all()):
        raise ModelLoadError(f"Some of {what} are not finite numbers.", hint="Fetch the file again.")


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Refuse tensors that do not fit together, by name, whatever operation finds that out."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ModelLoadError(f"{what} cannot be read: {reason}.", hint="Fetch the file again.") from error
