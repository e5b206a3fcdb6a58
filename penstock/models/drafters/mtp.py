"""The layer for multi-token prediction that some checkpoints have after their last layer, as a head that drafts.

DeepSeek V3, GLM 4.5 and their relatives store it as one more layer, with `enorm`, `hnorm`, `eh_proj` and
`shared_head`; MiMo under names of its own, which its layout translates. The layer is the family's own decoder layer.
Its input at position t is the hidden state of position t, after the final norm, and the token of position t + 1. Of
several layers only the first is read, and drafts every further token too.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock.core.engine_config import Quantization
from penstock.core.errors import ConfigError
from penstock.kernels.interface import AttentionBatch, KVStore, Ops
from penstock.models.decoder import Decoder
from penstock.models.drafters.heads import Target
from penstock.models.layers import LayerLoader, RMSNorm, RopeTables
from penstock.models.weights import WeightLoader

_HIDDEN_FIRST = frozenset({"mimo"})  # eh_proj reads the hidden state, then the embedding
_PASSES_NORMED = frozenset({"mimo"})  # the next token is drafted from the output after the norm


class MtpHead:
    """A checkpoint's own layer for multi-token prediction."""

    num_layers = 1
    taps: tuple[int, ...] = ()

    def __init__(
        self, target: Target, num_positions: int, quantization: Quantization | None, *, is_random: bool
    ) -> None:
        model = target.model
        if not isinstance(model, Decoder) or not model.config.num_mtp_layers:
            raise ConfigError(
                "This checkpoint has no layer for multi-token prediction, which --speculate heads=mtp needs.",
                hint="Use --speculate auto, draft=MODEL, or heads=FOLDER with heads that were trained for the model.",
            )
        index, size = model.config.num_layers, model.config.hidden_size
        config = replace(model.config, windows=(*model.config.windows, None))
        loader = WeightLoader(target.source, target.ops, quantization=quantization)
        load = LayerLoader(config, loader, RopeTables(config, loader, num_positions), index)
        if not is_random and not loader.has(f"{load.prefix}.enorm.weight"):
            raise ConfigError(
                f"The weights have no layer {index} for multi-token prediction under a known name.",
                hint="Fetch the checkpoint as its makers publish it, or leave --speculate out.",
            )
        self.num_kv_heads, self.head_dim = model.num_kv_heads, model.head_dim
        self.records_graphs = model.records_graphs
        self._ops: Ops = target.ops
        self._target, self._model = target, model
        self._embedding_norm, self._hidden_norm = load.rms_norm("enorm"), load.rms_norm("hnorm")
        self._joined = loader.linear([f"{load.prefix}.eh_proj"], [size], 2 * size)
        self._layer = model.load_layer(load)
        self._norm: RMSNorm = load.rms_norm("shared_head.norm")
        self._hidden_first = config.architecture in _HIDDEN_FIRST
        self._passes_normed = config.architecture in _PASSES_NORMED
        self.weight_bytes = loader.weight_bytes

    def features(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, token_ids: Tensor, features: Tensor, batch: AttentionBatch, kv: KVStore) -> Tensor:
        """Compute int32 [T] and [T, hidden] → [T, hidden], as an EAGLE head does."""
        ops = self._ops
        embedded = self._embedding_norm(ops, self._model.embed(token_ids))
        normed = self._hidden_norm(ops, features)
        both = [normed, embedded] if self._hidden_first else [embedded, normed]
        residual = ops.linear(torch.cat(both, dim=1), self._joined)
        self._model.run_layer(self._layer, residual, ops, kv.layer(0), batch)
        return self._norm(ops, residual) if self._passes_normed else residual

    def argmax(self, features: Tensor) -> Tensor:
        rows = features if self._passes_normed else self._norm(self._ops, features)
        return self._target.argmax(rows)
