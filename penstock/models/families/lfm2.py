"""LFM2 and LFM3: most layers are gated short convolutions, and some are attention. LFM2-MoE has experts after its
first layers. LFM3 has attention with a window or without, whose heads have gates, and norms what a layer adds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops, PackedLinear
from penstock.models.config import ArchitectureConfig, ExpertsConfig, Fields, RecurrentConfig, extended
from penstock.models.experts import ExpertMLP, load_experts
from penstock.models.gguf_config import (
    SIGMOID,
    gguf_experts,
    has_tensor,
    hybrid_gguf_config,
    layers_with,
    metadata_fields,
)
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import (
    common_huggingface_config,
    layer_kinds,
    layers_of_kind,
    rope_parameters,
    ropes_by_layer_kind,
)
from penstock.models.layers import Attention, GatedMLP, LayerLoader, RMSNorm
from penstock.models.recurrent import (
    GatedConv,
    HybridDecoder,
    LayerCache,
    gated_conv_rows,
    load_gated_conv,
    recurrent_settings,
)
from penstock.models.weights import LinearPart

NAMES = {
    "embedding_norm": "norm",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "self_attn.out_proj": "self_attn.o_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
}
GGUF_NAMES = {
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
    "token_embd_norm": "model.norm",  # the norm behind the last layer, whatever its name says
    "exp_probs_b.bias": "mlp.expert_bias",
}

_LEAST_SUM = 1e-6  # of the weights of experts


class Lfm2(HybridDecoder):
    name = "lfm2"
    huggingface_names: ClassVar[tuple[str, ...]] = ("Lfm2ForCausalLM", "lfm2")
    gguf_names: ClassVar[tuple[str, ...]] = ("lfm2",)
    has_head_norms = True
    stored_names = NAMES
    gguf_stored_names = GGUF_NAMES
    cut = staticmethod(gated_conv_rows)
    gguf_cut = staticmethod(gated_conv_rows)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        mlp_size = _mlp_size(fields)
        fields = fields.changed(intermediate_size=mlp_size)
        config = common_huggingface_config(fields, cls.name, default_theta=1_000_000.0)
        kinds = layer_kinds(fields, config.num_layers, {"full_attention", "conv"})
        if kinds is None:
            attends = fields.token_ids("full_attn_idxs") or range(config.num_layers)
            kinds = tuple(
                "full_attention" if index in attends else "conv" for index in range(config.num_layers)
            )
        has_bias = fields.flag("conv_bias", False)
        return dataclasses.replace(
            config,
            norm_eps=fields.number("norm_eps", 1e-5),
            tie_embeddings=fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True)),
            recurrent=RecurrentConfig(
                layers=layers_of_kind(kinds, "conv"),
                conv_width=fields.integer("conv_L_cache", 3),
                conv_bias=has_bias,
                bias=has_bias,
            ),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return dataclasses.replace(
            hybrid_gguf_config(file, cls.name),
            recurrent=RecurrentConfig(
                layers=layers_with(file, "shortconv.conv.weight"),
                conv_width=metadata_fields(file).integer("shortconv.l_cache"),
                conv_bias=has_tensor(file, "shortconv.conv.bias"),
                bias=has_tensor(file, "shortconv.in_proj.bias"),
            ),
        )

    def load_mixer(self, load: LayerLoader) -> GatedConv:
        return load_gated_conv(load)


class Lfm2Moe(Lfm2):
    name = "lfm2_moe"
    huggingface_names = ("Lfm2MoeForCausalLM", "lfm2_moe")
    gguf_names = ("lfm2moe",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.changed(block_auto_adjust_ff_dim=False)
        num_dense = fields.raw("num_dense_layers")
        experts = ExpertsConfig(
            count=fields.integer("num_experts", 32),
            per_token=fields.integer("num_experts_per_tok", 4),
            intermediate_size=fields.integer("moe_intermediate_size"),
            normalizes=fields.switch("norm_topk_prob", True),
            dense_layers=frozenset(range(2 if num_dense is None else num_dense)),
            scoring="sigmoid",
            weight_scale=fields.number("routed_scaling_factor", 1.0),
            least_sum=_LEAST_SUM,
        )
        return dataclasses.replace(super().config_from_huggingface(fields), experts=experts)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = super().config_from_gguf(file)
        experts = gguf_experts(file, config, normalizes=True, usual_gating=SIGMOID)
        return dataclasses.replace(config, experts=dataclasses.replace(experts, least_sum=_LEAST_SUM))

    def load_mlp(self, load: LayerLoader) -> GatedMLP | ExpertMLP:
        if self.config.is_dense(load.index):
            return load.gated_mlp()
        has_bias = load.weights.has(f"{load.prefix}.mlp.expert_bias")
        return load_experts(load, selection_bias="expert_bias" if has_bias else None)


def _mlp_size(fields: Fields) -> int:
    """Return the width of MLPs, which files may state before it is adjusted."""
    size = fields.integer("block_ff_dim" if fields.has("block_ff_dim") else "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = fields.integer("block_multiple_of", 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


LFM3_NAMES = {
    "embedding_norm": "norm",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}
_KINDS = {"conv", "full_attention", "sliding_attention"}
_ROPES: dict[str, dict[str, Any]] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_theta": 10_000.0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm3Config(ArchitectureConfig):
    gates_heads: bool
    norms_added: bool  # what a layer adds


@dataclass(frozen=True, slots=True)
class GatedHeads:
    """Attention whose heads are multiplied by the sigmoid of a gate each."""

    inner: Attention
    gate: PackedLinear

    def __call__(self, ops: Ops, x: Tensor, cache: Any, batch: AttentionBatch) -> Tensor:
        layer = self.inner.layer
        made = ops.attend(ops.linear(x, self.inner.qkv), layer, cache, batch)
        gates = torch.sigmoid(ops.linear(x, self.gate)).unsqueeze(-1)
        gated = (made.unflatten(1, (layer.num_heads, layer.head_dim)) * gates).flatten(1)
        return ops.add_up(ops.linear(gated, self.inner.output))


@dataclass(frozen=True, slots=True)
class Lfm3Layer:
    norm: RMSNorm
    attention: Attention | GatedHeads | None
    mixer: GatedConv | None
    added_norm: RMSNorm | None
    mlp_norm: RMSNorm
    mlp: GatedMLP
    added_mlp_norm: RMSNorm | None


class Lfm3(HybridDecoder):
    name = "lfm3"
    huggingface_names = ("Lfm3ForCausalLM", "lfm3")
    attention_bias = False
    eps_setting = "norm_eps"
    stored_names = LFM3_NAMES
    cut = staticmethod(gated_conv_rows)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        ropes = rope_parameters(fields) or _ROPES
        fields = fields.changed(rope_parameters=ropes)
        rope, local_rope, plain = ropes_by_layer_kind(fields, 1_000_000.0, 10_000.0)
        config = super().config_from_huggingface(plain)
        kinds = layer_kinds(fields, config.num_layers, _KINDS) or tuple(
            map(_usual_kind, range(config.num_layers))
        )
        window = fields.integer("sliding_window", 256)
        has_bias = fields.flag("conv_bias", False)
        return extended(
            config,
            Lfm3Config,
            rope=rope,
            local_rope=local_rope,
            windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
            tie_embeddings=fields.flag("tie_word_embeddings", True),
            recurrent=RecurrentConfig(
                layers=layers_of_kind(kinds, "conv"),
                conv_width=fields.integer("conv_L_cache", 7),
                conv_bias=has_bias,
                bias=has_bias,
            ),
            gates_heads=fields.flag("use_attention_gate", True),
            norms_added=fields.flag("use_sandwich_norm", True),
        )

    def load_layer(self, load: LayerLoader) -> Lfm3Layer:
        config = load.config
        assert isinstance(config, Lfm3Config)
        is_conv = load.index in recurrent_settings(config).layers
        return Lfm3Layer(
            norm=load.rms_norm("input_layernorm"),
            attention=None if is_conv else _load_attention(load, gates_heads=config.gates_heads),
            mixer=load_gated_conv(load) if is_conv else None,
            added_norm=load.rms_norm("post_operator_norm") if config.norms_added else None,
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=load.gated_mlp(),
            added_mlp_norm=load.rms_norm("post_ffn_norm") if config.norms_added else None,
        )

    def run_layer(
        self, layer: Lfm3Layer, residual: Tensor, ops: Ops, cache: LayerCache, batch: AttentionBatch
    ) -> None:
        normed = layer.norm(ops, residual)
        if layer.attention is not None:
            _add(ops, residual, layer.attention(ops, normed, cache.kv, batch), layer.added_norm)
        elif layer.mixer is not None:
            _add(ops, residual, layer.mixer(ops, normed, cache.states, batch), layer.added_norm)
        _add(ops, residual, layer.mlp(ops, layer.mlp_norm(ops, residual)), layer.added_mlp_norm)


def _add(ops: Ops, residual: Tensor, made: Tensor, norm: RMSNorm | None) -> None:
    residual.add_(made if norm is None else norm(ops, made))


def _usual_kind(index: int) -> str:
    if index % 4 == 2:
        return "full_attention"
    return "sliding_attention" if index % 4 == 0 and index > 0 else "conv"


def _load_attention(load: LayerLoader, *, gates_heads: bool) -> Attention | GatedHeads:
    attention, config = load.attention(head_norms=True), load.config
    if not gates_heads:
        return attention
    names, rows = [f"{load.prefix}.self_attn.gate_proj"], LinearPart(rows=[load.heads.queries])
    return GatedHeads(
        attention, load.weights.linear(names, [config.num_heads], config.hidden_size, part=rows)
    )
