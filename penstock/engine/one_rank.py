"""The setup of an engine that runs in one process. `engine/parallel` has the setup of one rank among several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.engine.batch import BatchRows
from penstock.engine.executor import ModelExecutor
from penstock.engine.grammar import GrammarCompiler
from penstock.engine.sampler import Sampler
from penstock.kernels.interface import Ops
from penstock.models.lora import Shapes
from penstock.models.model import Model
from penstock.models.sharding import WHOLE, Shard
from penstock.models.weights import NamedProduct


class OneRank:
    """The setup of an engine that runs in one process: the whole model, and no other rank."""

    shard: Shard = WHOLE
    is_alone = True
    records_graphs = True

    def ops(self, ops: Ops) -> Ops:
        return ops

    def model(self, model: Model, ops: Ops) -> Model:
        return model

    def agreed(self, number: int) -> int:
        """Return the smallest of the ranks' values."""
        return number

    def shapes_elsewhere(self, products: Sequence[NamedProduct]) -> Shapes:
        """Return the shapes of the matrices of other stages that adapters may change. `products` are those of this
        stage."""
        return {}

    def sampler(self, *settings: Any) -> Sampler:
        return Sampler(*settings)

    def connect(self, executor: ModelExecutor, rows: BatchRows, compiler: GrammarCompiler | None) -> None:
        """Take the executor, for plans that come from another rank."""
