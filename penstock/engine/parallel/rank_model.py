"""One rank's part of a model, seen as a model: in a pipeline, activations come from one stage and go to the next.

Ranks compute in step, so none may skip or repeat a pass because it lacks memory: that ends the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.core.errors import EngineUnavailable
from penstock.engine.parallel.mesh import Mesh
from penstock.kernels.interface import AttentionBatch, KVStore, Ops
from penstock.models.model import Model, StagedModel
from penstock.models.weights import NamedProduct


class RankModel:
    """What `forward` and `logits` return is of use on the last stage alone; there, `logits` on the first rank."""

    def __init__(self, model: StagedModel, mesh: Mesh, ops: Ops) -> None:
        self.config = model.config
        self.num_layers = model.num_layers
        self.num_kv_heads = model.num_kv_heads
        self.head_dim = model.head_dim
        self.max_model_len = model.max_model_len
        self.products: Sequence[NamedProduct] = model.products
        # Every rank of a stage counts the parameters that the stage has a part of.
        counted = model.num_parameters if mesh.shard.tensor_rank == 0 else 0
        self.num_parameters, self.weight_bytes = mesh.totals(counted, model.weight_bytes)
        self._model = model
        self._shard = mesh.shard
        self._link = mesh.stages
        self._device = ops.device
        self._dtype = ops.dtype

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: KVStore) -> Tensor:
        with _no_second_try():
            if self._shard.is_first_stage:
                residual = self._model.embed(token_ids)
            else:
                shape = (token_ids.shape[0], self.config.hidden_size)
                residual = self._link.receive_into(torch.empty(shape, dtype=self._dtype, device=self._device))
            self._model.run_layers(residual, batch, kv)
            if self._shard.is_last_stage:
                return self._model.normed(residual)
            self._link.send(residual)
            return residual

    def logits(self, hidden_rows: Tensor) -> Tensor:
        with _no_second_try():
            return self._model.logits(hidden_rows) if self._shard.is_last_stage else hidden_rows

    def argmax(self, hidden_rows: Tensor) -> Tensor | None:
        return None  # ranks have parts of the logits

    def with_ops(self, ops: Ops) -> Model:
        return self._model.with_ops(ops)

    def with_distinct_layers(self) -> Model:
        return self._model.with_distinct_layers()


@contextmanager
def _no_second_try() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineUnavailable(
            "There was not enough memory for a step.",
            hint="Lower --max-num-batched-tokens or --gpu-memory-utilization.",
        ) from error
