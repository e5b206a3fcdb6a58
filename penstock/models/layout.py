"""Describes how the checkpoints of a family store its tensors, and reads them as the model wants them. Knows no file
format.

A model asks for tensors by one set of names (`model.layers.0.self_attn.q_proj.weight`), whole, and with rotated pairs
half a head apart. A family may use other names, store several matrices as one, in any order of rows, or transposed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import DenseWeight, WeightData
from penstock.models.config import ArchitectureConfig
from penstock.models.rope import pair_order
from penstock.models.weight_parts import Part, pick_columns, pick_rows
from penstock.models.weights import (
    AdaptedPlace,
    IndexSource,
    NamedProduct,
    Stacked,
    StackedSource,
    WeightSource,
)

_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")
_EXPERT = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.(\d+)\.(\w+)\.(weight|bias)")


# Norms whose weights are stored in the order of heads: the same weights for all heads, those of all heads side by
# side, or none.
RotatedNorms = Literal["heads", "wide", "none"]


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a stored tensor, which has `total` rows. `name` is the tensor's name within a layer."""

    name: str
    total: int
    order: Tensor  # int64: the stored row of each row that the model reads


@dataclass(frozen=True, slots=True)
class StackedPart:
    """A matrix of experts, stored in one tensor for all experts, maybe with the rows of another matrix: the part is
    number `index` of `of`, one below the other or row by row in turn."""

    weight: str  # the tensors' names within a layer
    bias: str
    index: int = 0
    of: int = 1
    interleaved: bool = False
    transposed: bool = False

    def rows(self, size: int) -> Tensor:
        """Return the stored row of each of the matrix's rows."""
        if self.interleaved:
            return torch.arange(self.index, self.of * size, self.of)
        return torch.arange(self.index * size, (self.index + 1) * size)


@dataclass(frozen=True, slots=True)
class Layout:
    """The differences of a family's checkpoints from the usual names and order.

    `base` is the part of names in front of everything but the head. `names` gives the usual name for a stored one,
    both as parts between dots. `cut` gives, by the name within a layer, the rows of a tensor in a larger one; a
    checkpoint may hold the tensor by itself as well. `rows` gives the order of a tensor's own rows, and `columns` the
    stored column of each column that the model reads."""

    base: str = "model"
    names: Mapping[str, str] = field(default_factory=dict)
    cut: Mapping[str, StoredRows] = field(default_factory=dict)
    rows: Mapping[str, StoredRows] = field(default_factory=dict)
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()  # names within a layer of matrices that are stored [in, out]
    experts: Mapping[str, StackedPart] = field(default_factory=dict)  # by the usual name, such as "gate_proj"
    fused_experts: Mapping[str, StackedPart] = field(
        default_factory=dict
    )  # in checkpoints without those of `experts`
    num_experts: int = 0
    changed: Mapping[str, Callable[[Tensor], Tensor]] = field(
        default_factory=dict
    )  # by the name within a layer of a dense tensor: what the model reads, made of what is stored
    old_base: str = "model"  # as `base`, in older checkpoints
    has_usual_adapters: bool = False  # adapters have the usual names, though checkpoints have others

    @property
    def is_usual(self) -> bool:
        changed = self.names or self.cut or self.rows or self.transposed or self.experts
        return self.base == "model" and not changed

    @property
    def is_writable(self) -> bool:
        """Return whether other names are all that differs in folders that hold each matrix by itself."""
        stacked = any(
            part.transposed or not part.weight.startswith("mlp.experts.") for part in self.experts.values()
        )
        return not (self.cut or self.rows or self.transposed or stacked)

    def usual_name(self, stored: str) -> str:
        name = "." + stored.removeprefix(f"{self.base}.").removeprefix(f"{self.old_base}.") + "."
        for own, usual in self.names.items():
            name = name.replace(f".{own}.", f".{usual}.")
        name = name.strip(".")
        return name if name.startswith(("lm_head.", "model.")) else f"model.{name}"

    def stored_name(self, usual: str) -> str:
        """Return the name that folders of this family have for a module."""
        name = f".{usual}."
        for own, other in reversed(list(self.names.items())):
            name = name.replace(f".{other}.", f".{own}.")
        name = name.strip(".")
        return name.replace("model.", f"{self.base}.", 1) if name.startswith("model.") else name

    def with_places(self, product: NamedProduct) -> NamedProduct:
        """Return a product with the matrices that adapters for this family change."""
        if self.is_usual:
            return product
        return replace(product, places=tuple(map(self._place, product.names, product.rows)))

    def _place(self, name: str, size: int) -> AdaptedPlace:
        match = _LAYER.fullmatch(name)
        cut, rows = (table.get(match[2]) if match else None for table in (self.cut, self.rows))
        order = None if rows is None else rows.order
        if match is None or cut is None:
            return AdaptedPlace(self._adapted_name(name), size, order)
        fused = self._adapted_name(match[1] + cut.name)
        return AdaptedPlace(fused, cut.total, cut.order if order is None else cut.order[order])

    def _adapted_name(self, usual: str) -> str:
        return usual if self.has_usual_adapters else self.stored_name(usual)


def rotated_rows(
    config: ArchitectureConfig, *, interleaved: bool = False, norms: RotatedNorms = "heads"
) -> dict[str, StoredRows]:
    """Return the rows of queries, keys and their norms such that rotated pairs are half a head apart."""
    head_dim = config.head_dim
    rotary_dim = config.rope.rotary_dim or head_dim
    if rotary_dim == head_dim and not interleaved:
        return {}
    order = pair_order(head_dim, rotary_dim, interleaved=interleaved)
    of_heads = [f"self_attn.{part}_norm" for part in "qk"] if norms == "heads" else []
    rows = {name: StoredRows(name, head_dim, order) for name in of_heads}
    for part, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
        name, size = f"self_attn.{part}_proj", heads * head_dim
        rows[name] = StoredRows(name, size, by_head(torch.arange(size), order))
        if norms == "wide":
            norm = f"self_attn.{part}_norm"
            rows[norm] = StoredRows(norm, size, rows[name].order)
    return rows


def by_head(rows: Tensor, order: Tensor) -> Tensor:
    """Reorder rows within each head."""
    return rows.view(-1, len(order))[:, order].flatten()


def fused_rows(name: str, parts: Mapping[str, int]) -> dict[str, StoredRows]:
    """Return the rows of matrices that are stored one below the other, with this many rows each."""
    total, start, rows = sum(parts.values()), 0, {}
    for part, size in parts.items():
        rows[part] = StoredRows(name, total, torch.arange(start, start + size))
        start += size
    return rows


_FUSED_QKV = "self_attn.qkv_proj"


def fused_qkv(config: ArchitectureConfig) -> dict[str, StoredRows]:
    """Return the rows of queries, keys and values in one matrix, in this order."""
    keys = config.num_kv_heads * config.head_dim
    sizes = {"q": config.num_heads * config.head_dim, "k": keys, "v": keys}
    return fused_rows(_FUSED_QKV, {f"self_attn.{part}_proj": size for part, size in sizes.items()})


def grouped_qkv(config: ArchitectureConfig) -> dict[str, StoredRows]:
    """Return the rows of queries, keys and values in one matrix that holds, for each key-value head, the heads of its
    queries, the key and the value."""
    groups, width = config.num_kv_heads, config.num_heads // config.num_kv_heads
    total = groups * (width + 2) * config.head_dim
    heads = torch.arange(total).view(groups, width + 2, config.head_dim)
    parts = {"q": heads[:, :width], "k": heads[:, width], "v": heads[:, width + 1]}
    return {
        f"self_attn.{part}_proj": StoredRows(_FUSED_QKV, total, rows.flatten())
        for part, rows in parts.items()
    }


def fused_gate_up(intermediate_size: int, name: str = "mlp.gate_up_proj") -> dict[str, StoredRows]:
    return fused_rows(name, {"mlp.gate_proj": intermediate_size, "mlp.up_proj": intermediate_size})


class LayoutSource:
    """Reads tensors of a source that a layout describes, under their usual names."""

    def __init__(self, source: WeightSource, layout: Layout) -> None:
        self._source = source
        self._layout = layout
        self._stored = {layout.usual_name(name): name for name in source.names()}
        # A quantized matrix may be stored without a tensor "weight".
        self._stems = {
            usual.rpartition(".")[0]: name.rpartition(".")[0] for usual, name in self._stored.items()
        }
        self._names = frozenset(self._stored) | self._cut_names() | self._expert_names()

    def _cut_names(self) -> set[str]:
        """Return the names of matrices that are stored as part of others."""
        parts_of: dict[str, list[str]] = {}
        for part, rows in self._layout.cut.items():
            parts_of.setdefault(rows.name, []).append(part)
        cut = set()
        for name in self._stored:
            stem, _, kind = name.rpartition(".")
            if match := _LAYER.fullmatch(stem):
                cut |= {f"{match[1]}{part}.{kind}" for part in parts_of.get(match[2], ())}
        return cut

    def _expert_names(self) -> set[str]:
        """Return the names of experts that are stored together."""
        return {
            f"{match[1]}mlp.experts.{number}.{part}.weight"
            for name in self._stored
            if (match := _LAYER.fullmatch(name))
            for experts in (self._layout.experts, self._layout.fused_experts)
            for part, place in experts.items()
            if match[2] in (place.weight, f"{place.weight}_blocks")
            for number in range(self._layout.num_experts)
        }

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def names(self) -> frozenset[str]:
        return self._names

    def matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> WeightData:
        wanted = part or Part(range(rows), range(columns))
        stacked = self._stacked(name, rows)
        if stacked is not None:
            return self._of_stack(*stacked, columns, wanted)
        change = self._change(name)
        if change is not None:
            found = self._source.matrix(self._stored_name(name), rows, columns, part)
            return DenseWeight(change(_dense(found)))
        place = self._place(name, rows)
        if place is None:
            return self._oriented(name, rows, columns, part)
        stored_name, total, order = place
        order = order[wanted.rows.start : wanted.rows.stop]
        window = range(int(order.min()), int(order.max()) + 1)
        found = self._oriented(stored_name, total, columns, Part(window, wanted.columns))
        return found if _is_plain(order) else pick_rows(found, order - window.start)

    def _stacked(self, name: str, size: int) -> tuple[Stacked, int, Tensor] | None:
        """Return where an expert's matrix or bias lies: the tensor, the rows that it has of the expert, and those of
        the matrix. None for a tensor that is stored as it is."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return None
        for experts in (self._layout.experts, self._layout.fused_experts):
            found = experts.get(match[3])
            if found is None:
                continue
            stored = match[1] + (found.weight if match[4] == "weight" else found.bias)
            blocks = f"{stored}_blocks"  # of MXFP4
            own_name = self._stored.get(stored)
            if blocks in self._stored:
                own_name = self._stored[blocks].removesuffix("_blocks")
            if own_name is not None:
                place = Stacked(own_name, int(match[2]), self._layout.num_experts, found.transposed)
                return place, found.of * size, found.rows(size)
        return None

    def _of_stack(self, place: Stacked, total: int, order: Tensor, columns: int, wanted: Part) -> WeightData:
        assert isinstance(self._source, StackedSource)
        order = order[wanted.rows.start : wanted.rows.stop]
        window = range(int(order[0]), int(order[-1]) + 1)
        found = self._source.stacked_matrix(place, total, columns, Part(window, wanted.columns))
        return found if len(window) == len(order) else pick_rows(found, order - window.start)

    def indices(self, name: str, rows: int, columns: int) -> Tensor:
        if not isinstance(self._source, IndexSource):
            raise ModelLoadError(f"{name} is a table of whole numbers, which these files do not hold.")
        return self._source.indices(self._stored_name(name), rows, columns)

    def vector(self, name: str, size: int, part: range | None = None) -> Tensor:
        stacked = self._stacked(name, size)
        if stacked is not None:
            where, total, order = stacked
            row = Part(range(where.index, where.index + 1), range(total))
            found = self._source.matrix(where.name, where.count, total, row)
            assert isinstance(found, DenseWeight)
            return found.values[0].float()[order if part is None else order[part.start : part.stop]]
        change = self._change(name)
        if change is not None:
            return change(self._source.vector(self._stored_name(name), size, part))
        place = self._place(name, size)
        if place is None:
            return self._source.vector(self._stored_name(name), size, part)
        stored_name, total, order = place
        whole = self._source.vector(self._stored_name(stored_name), total)
        return whole[order if part is None else order[part.start : part.stop]]

    def _change(self, name: str) -> Callable[[Tensor], Tensor] | None:
        match = _LAYER.fullmatch(name)
        return self._layout.changed.get(match[2]) if match else None

    def _stored_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        return self._stored.get(name) or f"{self._stems.get(stem, stem)}.{kind}"

    def _place(self, name: str, size: int) -> tuple[str, int, Tensor] | None:
        """Return the stored tensor's name and size and the rows in it; None for a tensor that is stored as it is."""
        stem, _, kind = name.rpartition(".")
        match = _LAYER.fullmatch(stem)
        if match is None:
            return None
        cut, rows = self._layout.cut.get(match[2]), self._layout.rows.get(match[2])
        if rows is not None and len(rows.order) != size:
            rows = None
        if cut is not None and len(cut.order) == size and name not in self._stored:
            order = cut.order if rows is None else cut.order[rows.order]
            return f"{match[1]}{cut.name}.{kind}", cut.total, order
        return None if rows is None else (name, size, rows.order)

    def _oriented(self, name: str, rows: int, columns: int, part: Part | None) -> WeightData:
        stored = self._stored_name(name)
        match = _LAYER.fullmatch(name.rpartition(".")[0])
        order = self._layout.columns.get(match[2]) if match else None
        if order is not None:
            wanted = part or Part(range(rows), range(columns))
            found = self._source.matrix(stored, rows, columns, Part(wanted.rows, range(columns)))
            return pick_columns(found, order[wanted.columns.start : wanted.columns.stop])
        if match is None or match[2] not in self._layout.transposed:
            return self._source.matrix(stored, rows, columns, part)
        turned = None if part is None else Part(part.columns, part.rows)
        return DenseWeight(_dense(self._source.matrix(stored, columns, rows, turned)).T.contiguous())


def _is_plain(order: Tensor) -> bool:
    return bool((order[1:] - order[:-1] == 1).all())


def _dense(weight: WeightData) -> Tensor:
    return weight.values if isinstance(weight, DenseWeight) else weight.dequantize()
