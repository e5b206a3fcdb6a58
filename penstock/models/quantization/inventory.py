"""Lists the tensors that a model loads, with their shapes, and which matrices are multiplied together.

Found out by loading the model once, so that no list of names has to be kept for each architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from penstock.kernels.interface import Ops, PackedExperts, PackedLinear, WeightData
from penstock.models.load import Checkpoint
from penstock.models.model import Model
from penstock.models.weights import ExpertNames, LinearPart, OnProgress, Part, WeightLoader, WeightSource

_HEAD = "lm_head"
_ROUTER_ENDS = (".gate", ".shared_expert_gate")


@dataclass(slots=True)
class Inventory:
    matrices: dict[str, tuple[int, int]] = field(default_factory=dict)  # by full name
    vectors: dict[str, int] = field(default_factory=dict)
    stacks: list[tuple[str, ...]] = field(default_factory=list)  # of names without `.weight`
    experts: list[str] = field(default_factory=list)  # likewise

    def quantizable(self) -> list[str]:
        """Full names of the matrices of layers; head and routers stay as they are, as is usual."""
        stems = [stem for stack in self.stacks for stem in stack] + self.experts
        return [f"{stem}.weight" for stem in stems if stem != _HEAD and not stem.endswith(_ROUTER_ENDS)]


class ListingSource:
    """Hands on what another source has, and writes down what was asked for."""

    def __init__(self, source: WeightSource, inventory: Inventory) -> None:
        self._source = source
        self._inventory = inventory

    def names(self) -> frozenset[str]:
        return self._source.names()

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> WeightData:
        self._inventory.matrices[name] = (rows, columns)
        return self._source.matrix(name, rows, columns, part)

    def vector(self, name: str, size: int, part: range | None = None) -> Tensor:
        self._inventory.vectors[name] = size
        return self._source.vector(name, size, part)


class ListingLoader(WeightLoader):
    """Knows under which names each packed matrix was loaded."""

    def __init__(
        self, source: WeightSource, ops: Ops, inventory: Inventory, on_progress: OnProgress | None
    ) -> None:
        super().__init__(ListingSource(source, inventory), ops, on_progress=on_progress)
        self._inventory = inventory
        self.stack_of: dict[int, tuple[str, ...]] = {}  # by the id of the packed matrix

    def linear(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        columns: int,
        *,
        bias: bool = False,
        part: LinearPart | None = None,
    ) -> PackedLinear:
        packed = super().linear(names, rows, columns, bias=bias, part=part)
        self._inventory.stacks.append(tuple(names))
        self.stack_of[id(packed)] = tuple(names)
        return packed

    def experts(
        self, names: Sequence[ExpertNames], intermediate_size: int, hidden_size: int
    ) -> PackedExperts:
        self._inventory.experts += [stem for expert in names for stem in expert]
        return super().experts(names, intermediate_size, hidden_size)


@dataclass(frozen=True, slots=True)
class Listed:
    model: Model
    inventory: Inventory
    stack_of: dict[int, tuple[str, ...]]


def load_listed(
    checkpoint: Checkpoint, ops: Ops, num_positions: int, on_progress: OnProgress | None = None
) -> Listed:
    inventory = Inventory()
    loader = ListingLoader(checkpoint.source(), ops, inventory, on_progress)
    model = checkpoint.architecture(checkpoint.config, loader, num_positions)
    return Listed(model, inventory, loader.stack_of)
