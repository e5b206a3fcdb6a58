"""Llama 4: attention within chunks with norms of queries and keys, some layers that know no positions and scale
queries by them, and experts whose input is weighted. Reads the text part of multimodal checkpoints."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, ExpertsConfig, Fields, NotNative
from penstock.models.decoder import BlockDecoder
from penstock.models.experts import ExpertMLP, load_experts
from penstock.models.gguf_config import metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.layers import Attention, GatedMLP, LayerLoader
from penstock.models.layout import StackedPart

_GATE_UP = ("mlp.experts.gate_up_proj", "")
_EXPERTS = {
    "gate_proj": StackedPart(*_GATE_UP, 0, 2, transposed=True),
    "up_proj": StackedPart(*_GATE_UP, 1, 2, transposed=True),
    "down_proj": StackedPart("mlp.experts.down_proj", "", transposed=True),
}
# Settings of the published models that GGUF files leave out.
_PERIOD = 4  # of layers without rope
_CHUNK = 8192
_TUNED_FROM, _TUNING = 8192.0, 0.1
_MAVERICK_EXPERTS = 128  # of the model without norms of queries and keys
_NAMES = {"feed_forward": "mlp", "router": "gate", "shared_expert": "shared_experts"}


@dataclass(frozen=True, slots=True)
class TunedAttention:
    """Attention whose queries are scaled by a factor for each position."""

    inner: Attention
    scales: Tensor  # float32 [positions]

    def __call__(self, ops: Ops, x: Tensor, cache: Any, batch: AttentionBatch) -> Tensor:
        layer = self.inner.layer
        qkv = ops.linear(x, self.inner.qkv)
        queries = qkv[:, : layer.num_heads * layer.head_dim]
        queries.copy_(queries * self.scales[batch.positions.long()].unsqueeze(1))
        return ops.add_up(ops.linear(ops.attend(qkv, layer, cache, batch), self.inner.output))


class Llama4(BlockDecoder):
    name = "llama4"
    huggingface_names = (
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
        "llama4_text",
        "llama4",
    )
    gguf_names = ("llama4",)
    attention_bias = False
    gguf_experts_normalize = False
    is_interleaved = True
    is_gguf_interleaved = True
    rotated_norms = "none"
    stored_names = _NAMES
    stacked_experts = _EXPERTS

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.changed(**(fields.raw("text_config") or {}))
        config = super().config_from_huggingface(fields)
        layers = range(config.num_layers)
        rotates = fields.raw("no_rope_layers")  # 1 for a layer with rope, in spite of the name
        if not rotates:
            interval = fields.integer("no_rope_layer_interval", _PERIOD)
            rotates = [(index + 1) % interval for index in layers]
        if not isinstance(rotates, list) or len(rotates) != config.num_layers:
            raise ModelLoadError(f"{fields.where} lists no_rope_layers that do not match its layers.")
        kinds = fields.raw("layer_types")
        usual = ["chunked_attention" if turns else "full_attention" for turns in rotates]
        if kinds is not None and list(kinds) != usual:
            raise NotNative(
                f"{fields.where} has layer_types that attend in chunks without rope, or see everything with "
                "rope, which no published Llama 4 has.",
                hint="Make layer_types agree with no_rope_layers.",
            )
        step = fields.integer("interleave_moe_layer_step", 1)
        mixtures = fields.raw("moe_layers") or list(range(step - 1, config.num_layers, step))
        inner = fields.integer("intermediate_size")
        return dataclasses.replace(
            config,
            intermediate_size=fields.integer("intermediate_size_mlp", inner),
            unrotated_layers=frozenset(index for index in layers if not rotates[index]),
            head_norms=fields.flag("use_qk_norm", True),
            attention_chunk=fields.integer("attention_chunk_size", _CHUNK),
            tuned_from=fields.number("floor_scale", _TUNED_FROM)
            if fields.flag("attn_temperature_tuning", True)
            else None,
            tuning=fields.number("attn_scale", _TUNING),
            experts=ExpertsConfig(
                count=fields.integer("num_local_experts"),
                per_token=fields.integer("num_experts_per_tok", 1),
                intermediate_size=inner,
                normalizes=False,
                scoring="sigmoid",
                dense_layers=frozenset(index for index in layers if index not in mixtures),
                shared_intermediate_size=inner,
            ),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config, fields = super().config_from_gguf(file), metadata_fields(file)
        experts = config.experts
        assert experts is not None
        return dataclasses.replace(
            config,
            unrotated_layers=frozenset(range(_PERIOD - 1, config.num_layers, _PERIOD)),
            head_norms=experts.count != _MAVERICK_EXPERTS,
            attention_chunk=fields.integer("attention.sliding_window", _CHUNK),
            tuned_from=fields.number("attention.temperature_length", _TUNED_FROM),
            tuning=fields.number("attention.temperature_scale", _TUNING),
            experts=dataclasses.replace(
                experts, scoring="sigmoid", shared_intermediate_size=experts.intermediate_size
            ),
        )

    def load_mlp(self, load: LayerLoader) -> GatedMLP | ExpertMLP:
        is_dense = self.config.is_dense(load.index)
        return load.gated_mlp() if is_dense else load_experts(load, weighs_input=True)

    def load_attention(self, load: LayerLoader) -> Attention | TunedAttention:
        config, attention = self.config, load.attention()
        if load.index in config.unrotated_layers:
            if config.tuned_from is None:
                return attention
            positions = torch.arange(self.max_model_len, device=load.weights.ops.device)
            scales = torch.log1p(torch.floor((positions + 1.0) / config.tuned_from)) * config.tuning + 1.0
            return TunedAttention(attention, scales)
        # Norms after the rotation, which does not change lengths, have no weights.
        ones = torch.ones(config.head_dim, device=load.weights.ops.device) if config.head_norms else None
        layer = dataclasses.replace(attention.layer, chunk=config.attention_chunk, q_norm=ones, k_norm=ones)
        return dataclasses.replace(attention, layer=layer)
