"""LoRA adapters of an engine: which are loaded, which rows of a step they are for, and the model run with them.

At most `max_loras` are loaded. One that no live request uses makes room for another, the longest unused first. Knows
no queue: `adapter_queue` decides which requests may start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.adapter_files import adapter_digest
from penstock.core.errors import InvalidRequest, Overloaded
from penstock.core.plan import Chunk
from penstock.core.request import Adapter, Request
from penstock.engine.staging import Staging
from penstock.kernels.adapted import AdaptedOps, AdaptedRows, PackedDelta
from penstock.kernels.interface import AttentionBatch, DenseWeight, KVStore, Ops
from penstock.models.lora import LoRAWeights, adaptable_products, read_lora
from penstock.models.model import Model

RETRY_AFTER_S = 5.0  # when requests with other adapters may have ended


class LoRAModel:
    """A model and the adapters that are loaded for it, by digest. Costs nothing until a step has adapters in it."""

    def __init__(self, model: Model, ops: Ops, staging: Staging, *, max_loras: int, max_rank: int) -> None:
        self.max_loras = max_loras
        self.max_rank = max_rank
        self._products = adaptable_products(model.products)
        self._ops = ops
        self._staging = staging
        self._adapted_ops = AdaptedOps(ops, [product.packed for product in self._products])
        self._adapted_model = model.with_ops(self._adapted_ops)
        self._loaded: OrderedDict[str, Mapping[int, PackedDelta]] = OrderedDict()  # least recently used first
        self._digest_of: dict[str, str] = {}  # of live requests

    def __contains__(self, digest: str) -> bool:
        return digest in self._loaded

    def read(self, adapter: Adapter) -> LoRAWeights:
        """From disk, on any thread. Raises InvalidRequest for one that cannot be used, or is not what it was when
        it got its name: its KV would be taken for that of the other weights."""
        folder = Path(adapter.path)
        weights = read_lora(folder, self._products, self.max_rank)
        if adapter_digest(folder) != adapter.digest:
            raise InvalidRequest(
                f"The adapter {adapter.name!r} has changed on disk since it was added.", hint="Add it again."
            )
        return weights

    def make_room(self, in_use: frozenset[str]) -> bool:
        """Whether one more can be loaded, at the expense of one that is not in use."""
        if len(self._loaded) < self.max_loras:
            return True
        unused = next((digest for digest in self._loaded if digest not in in_use), None)
        if unused is None:
            return False
        del self._loaded[unused]
        return True

    def load(self, digest: str, weights: LoRAWeights) -> None:
        """Raises Overloaded where a GPU has no memory left for it."""
        try:
            self._loaded[digest] = {
                index: PackedDelta(
                    left=self._ops.pack_linear([DenseWeight(delta.left)]),
                    right=self._ops.pack_linear([DenseWeight(delta.right)]),
                )
                for index, delta in weights.deltas.items()
            }
        except torch.OutOfMemoryError as error:
            raise Overloaded(
                "The device has no memory left for this adapter.", retry_after_s=RETRY_AFTER_S
            ) from error

    def touch(self, digest: str) -> None:
        """A request begins to use it."""
        self._loaded.move_to_end(digest)

    def begin(self, request: Request) -> None:
        if request.adapter is not None:
            self._digest_of[request.id] = request.adapter.digest

    def end(self, request_id: str) -> None:
        self._digest_of.pop(request_id, None)

    def adapters_of(self, chunks: Sequence[Chunk]) -> list[str | None] | None:
        """The digest of each chunk's adapter; None when no chunk has one."""
        if not self._digest_of:
            return None
        digests = [self._digest_of.get(chunk.request_id) for chunk in chunks]
        return digests if any(digests) else None

    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv: KVStore,
        adapters: Sequence[str | None],
        query_starts: NDArray[np.int32],
    ) -> Tensor:
        """Like `Model.forward`. `adapters` has a digest, or None, for each request of the step, whose rows begin at
        `query_starts`."""
        rows_of: dict[str, list[NDArray[np.int64]]] = {}
        for index, digest in enumerate(adapters):
            if digest is not None:
                rows = np.arange(query_starts[index], query_starts[index + 1], dtype=np.int64)
                rows_of.setdefault(digest, []).append(rows)
        self._adapted_ops.use(
            [
                AdaptedRows(self._loaded[digest], self._staging.to_device(np.concatenate(rows)))
                for digest, rows in rows_of.items()
            ]
        )
        return self._adapted_model.forward(token_ids, batch, kv)
