"""Mixtures of experts that differ from Llama in a detail or two: GLM 4.5 and 4.6, MiniMax M2, Ernie 4.5, OLMoE,
Granite and Phi 3.5."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, ExpertsConfig, Fields, NotNative
from penstock.models.decoder import Decoder, PreNormDecoder
from penstock.models.experts import (
    GRANITE_EXPERTS,
    MIXTRAL_NAMES,
    ExpertMLP,
    expert_layout,
    load_experts,
    num_experts,
)
from penstock.models.families.granite import Granite
from penstock.models.families.llama import Llama
from penstock.models.gguf_config import SIGMOID, common_gguf_config, gguf_experts, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import gguf_layout
from penstock.models.huggingface_config import common_huggingface_config, layer_kinds
from penstock.models.layers import (
    Block,
    ChangedAttention,
    Clipped,
    GatedMLP,
    LayerLoader,
    Norm,
    load_layer_norm,
)
from penstock.models.layout import Layout, fused_rows, rotated_rows
from penstock.models.weights import WeightLoader

_SELECTION_BIAS = "gate.e_score_correction_bias"


class Glm4Moe(PreNormDecoder):
    """GLM 4.5 and 4.6: half of each head is rotated, and experts are chosen as in DeepSeek V3."""

    name = "glm4_moe"
    huggingface_names: ClassVar[tuple[str, ...]] = ("Glm4MoeForCausalLM", "glm4_moe")
    gguf_names: ClassVar[tuple[str, ...]] = ("glm4moe",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = Fields({"partial_rotary_factor": 0.5, **fields.values}, fields.where)
        config = common_huggingface_config(fields, cls.name)
        inner, shared = fields.integer("moe_intermediate_size"), fields.raw("n_shared_experts")
        experts = ExpertsConfig(
            count=fields.integer("n_routed_experts"),
            per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=inner,
            normalizes=fields.switch("norm_topk_prob", True),
            dense_layers=frozenset(range(fields.raw("first_k_dense_replace") or 0)),
            shared_intermediate_size=inner * fields.integer("n_shared_experts") if shared else None,
            scoring="sigmoid",
            num_groups=fields.integer("n_group", 1),
            kept_groups=fields.integer("topk_group", 1),
            groups_ranked_by=2,
            weight_scale=fields.number("routed_scaling_factor", 1.0),
        )
        return dataclasses.replace(
            config,
            qkv_bias=fields.flag("attention_bias", False),
            head_norms=fields.flag("use_qk_norm", False),
            experts=experts,
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = common_gguf_config(file, cls.name)
        return dataclasses.replace(
            config,
            head_norms="blk.0.attn_q_norm.weight" in file.tensors,
            # Files of some converters do not say how experts are chosen.
            experts=gguf_experts(file, config, normalizes=True, usual_gating=SIGMOID),
        )

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return expert_layout(config)

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        names = {"post_attention_norm": "post_attention_layernorm"}
        return gguf_layout(names, rows=rotated_rows(config), num_experts=num_experts(config))

    def load_mlp(self, load: LayerLoader) -> GatedMLP | ExpertMLP:
        assert self.config.experts is not None
        if load.index in self.config.experts.dense_layers:
            return load.gated_mlp()
        return load_experts(load, selection_bias=_SELECTION_BIAS)


class DeepseekMoe(Glm4Moe):
    """DeepSeek MoE of 2024, and the text model of DeepSeek-OCR 2: a softmax chooses experts, as in DeepSeek V2."""

    name = "deepseek"
    huggingface_names = ("DeepseekForCausalLM", "deepseek", "deepseek_ocr2_text")
    gguf_names: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        usual = {"partial_rotary_factor": 1.0, "norm_topk_prob": False, "num_experts_per_tok": 6}
        given = {key: value for key, value in fields.values.items() if value is not None}
        fields = Fields({**usual, **given}, fields.where)
        config = super().config_from_huggingface(fields)
        assert config.experts is not None
        kinds = layer_kinds(fields, config.num_layers, {"dense", "sparse"}, "mlp_layer_types")
        if fields.text("scoring_func", "softmax") != "softmax" or fields.integer("moe_layer_freq", 1) != 1:
            raise NotNative(f"{fields.where} has experts that no published DeepSeek MoE has.")
        dense = config.experts.dense_layers
        if kinds is not None:
            dense = frozenset(index for index, kind in enumerate(kinds) if kind == "dense")
        has_bias, grouped = config.qkv_bias, fields.text("topk_method", "greedy") == "group_limited_greedy"
        return dataclasses.replace(
            config,
            output_bias=has_bias,
            mlp_bias=fields.flag("mlp_bias", False),
            experts=dataclasses.replace(
                config.experts,
                scoring="softmax",
                dense_layers=dense,
                num_groups=config.experts.num_groups if grouped else 1,
                kept_groups=config.experts.kept_groups if grouped else 1,
                groups_ranked_by=1,
            ),
        )

    def load_mlp(self, load: LayerLoader) -> GatedMLP | ExpertMLP:
        assert self.config.experts is not None
        is_dense = load.index in self.config.experts.dense_layers
        return load.gated_mlp() if is_dense else load_experts(load)


class _Mixture(Decoder):
    """Layers in Llama's style whose attention or norms no backend runs in one call."""

    def load_layer(self, load: LayerLoader) -> Block:
        return Block(
            attention_norm=load.rms_norm("input_layernorm"),
            attention=ChangedAttention(load.attention(), load.wide_norms()),
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=load_experts(load),
        )

    def run_layer(self, layer: Block, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        residual.add_(layer.attention(ops, layer.attention_norm(ops, residual), cache, batch))
        residual.add_(layer.mlp(ops, layer.mlp_norm(ops, residual)))

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        rows = rotated_rows(config, head_norms=False)
        return gguf_layout(rows=rows, num_experts=num_experts(config))


class MiniMaxM2(_Mixture):
    """MiniMax M2: norms over all query heads and all key heads, and experts chosen by sigmoids with a bias."""

    name = "minimax_m2"
    huggingface_names = ("MiniMaxM2ForCausalLM", "minimax_m2")
    gguf_names = ("minimax-m2",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        if fields.has("rotary_dim"):
            share = fields.integer("rotary_dim") / fields.integer("head_dim")
            fields = Fields({**fields.values, "partial_rotary_factor": share}, fields.where)
        experts = ExpertsConfig(
            count=fields.integer("num_local_experts"),
            per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("intermediate_size"),
            normalizes=True,
            scoring="sigmoid",
        )
        return dataclasses.replace(common_huggingface_config(fields, cls.name), experts=experts)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = common_gguf_config(file, cls.name)
        return dataclasses.replace(config, experts=gguf_experts(file, config, normalizes=True))

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = {"block_sparse_moe.e_score_correction_bias": f"mlp.{_SELECTION_BIAS}", **MIXTRAL_NAMES}
        return expert_layout(config, names, rows=rotated_rows(config, head_norms=False, wide_norms=True))

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        rows = rotated_rows(config, head_norms=False, wide_norms=True)
        return gguf_layout(rows=rows, num_experts=num_experts(config))

    def load_layer(self, load: LayerLoader) -> Block:
        mlp = load_experts(load, selection_bias=_SELECTION_BIAS)
        return dataclasses.replace(super().load_layer(load), mlp=mlp)


class Olmoe(_Mixture):
    """OLMoE: norms over all query heads and all key heads, and maybe limits on queries, keys and values."""

    name = "olmoe"
    huggingface_names = ("OlmoeForCausalLM", "olmoe")
    gguf_names = ("olmoe",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        experts = ExpertsConfig(
            count=fields.integer("num_experts"),
            per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("intermediate_size"),
            normalizes=fields.switch("norm_topk_prob", False),
        )
        has_bias = fields.flag("attention_bias", False)
        return dataclasses.replace(
            common_huggingface_config(fields, cls.name),
            experts=experts,
            qkv_bias=has_bias,
            output_bias=has_bias,
            qkv_limit=fields.optional_number("clip_qkv"),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = common_gguf_config(file, cls.name)
        limit = metadata_fields(file).optional_number("attention.clamp_kqv")
        experts = gguf_experts(file, config, normalizes=False)
        return dataclasses.replace(config, experts=experts, qkv_limit=limit)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return expert_layout(config, rows={})

    def load_layer(self, load: LayerLoader) -> Block:
        layer, limit = super().load_layer(load), self.config.qkv_limit
        if limit is None:
            return layer
        assert isinstance(layer.attention, ChangedAttention)
        norms = layer.attention.change
        limited = ChangedAttention(layer.attention.inner, _Chained((norms, Clipped(limit))))
        return dataclasses.replace(layer, attention=limited)


@dataclasses.dataclass(frozen=True, slots=True)
class _Chained:
    steps: tuple[Norm, ...]

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(ops, x)
        return x


class Ernie45Moe(Llama):
    """Ernie 4.5 with experts: rotary pairs of neighbours, and a bias where experts are chosen."""

    name = "ernie4_5_moe"
    huggingface_names = ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe")
    gguf_names: ClassVar[tuple[str, ...]] = ("ernie4_5-moe",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        has_bias = fields.flag("use_bias", False)
        config = dataclasses.replace(
            super().config_from_huggingface(fields),
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=has_bias,
        )
        inner, shared = fields.integer("moe_intermediate_size"), fields.raw("moe_num_shared_experts")
        period, first = fields.integer("moe_layer_interval", 1), fields.raw("moe_layer_start_index") or 0
        last = fields.raw("moe_layer_end_index")
        last = config.num_layers - 1 if last in (None, -1) else last
        experts = ExpertsConfig(
            count=fields.integer("moe_num_experts"),
            per_token=fields.integer("moe_k"),
            intermediate_size=inner,
            normalizes=True,
            least_sum=fields.number("moe_norm_min", 1e-12),
            dense_layers=frozenset(
                index
                for index in range(config.num_layers)
                if (index + 1) % period or not first <= index <= last
            ),
            shared_intermediate_size=inner * fields.integer("moe_num_shared_experts") if shared else None,
        )
        tied = fields.flag("tie_word_embeddings", True)
        return dataclasses.replace(config, experts=experts, tie_embeddings=tied)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = common_gguf_config(file, cls.name)
        return dataclasses.replace(config, experts=gguf_experts(file, config, normalizes=True))

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = {"moe_statics.e_score_correction_bias": _SELECTION_BIAS}
        return expert_layout(config, names, rows=rotated_rows(config, interleaved=True))

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        rows = rotated_rows(config, interleaved=True)
        return gguf_layout(rows=rows, num_experts=num_experts(config))

    def load_mlp(self, load: LayerLoader) -> GatedMLP | ExpertMLP:
        assert self.config.experts is not None
        if load.index in self.config.experts.dense_layers:
            return load.gated_mlp()
        return load_experts(load, selection_bias=_SELECTION_BIAS)


class GraniteMoe(Granite):
    """Granite 3 with experts, in some models with one more for every token."""

    name = "granitemoe"
    huggingface_names = (
        "GraniteMoeForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "granitemoe",
        "granitemoeshared",
    )
    gguf_names = ("granitemoe",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        experts = ExpertsConfig(
            count=fields.integer("num_local_experts"),
            per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("intermediate_size"),
            normalizes=True,  # the softmax of the chosen logits
            shared_intermediate_size=_shared_size(fields),
        )
        return dataclasses.replace(super().config_from_huggingface(fields), experts=experts)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = super().config_from_gguf(file)
        return dataclasses.replace(config, experts=gguf_experts(file, config, normalizes=True))

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = {
            "shared_mlp.input_linear": "mlp.shared_experts.gate_up_proj",
            "shared_mlp.output_linear": "mlp.shared_experts.down_proj",
            "block_sparse_moe": "mlp",
            "router.layer": "gate",
        }
        layout = expert_layout(config, names, GRANITE_EXPERTS)
        shared = config.experts.shared_intermediate_size if config.experts is not None else None
        if shared is None:
            return layout
        halves = {f"mlp.shared_experts.{part}_proj": shared for part in ("gate", "up")}
        return dataclasses.replace(layout, cut=fused_rows("mlp.shared_experts.gate_up_proj", halves))

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        rows = rotated_rows(config, interleaved=True)
        return gguf_layout(rows=rows, num_experts=num_experts(config))

    def load_layer(self, load: LayerLoader) -> Block:
        return Block(
            attention_norm=load.rms_norm("input_layernorm"),
            attention=load.attention(),
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=load_experts(load),
        )


def _shared_size(fields: Fields) -> int | None:
    key = "shared_intermediate_size"
    return fields.integer(key) if fields.raw(key) else None


class PhiMoe(Decoder):
    """Phi 3.5 MoE: layer norms with biases, and two experts whose weights do not sum to 1."""

    name = "phimoe"
    huggingface_names = ("PhimoeForCausalLM", "PhiMoEForCausalLM", "phimoe")
    gguf_names = ("phimoe",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        has_bias = fields.flag("attention_bias", False)
        experts = ExpertsConfig(
            count=fields.integer("num_local_experts"),
            per_token=2,
            intermediate_size=fields.integer("intermediate_size"),
            normalizes=False,
            scoring="sparsemixer",
            jitter=fields.number("router_jitter_noise", 0.01),
        )
        config = dataclasses.replace(
            common_huggingface_config(fields, cls.name),
            qkv_bias=has_bias,
            output_bias=has_bias,
            head_bias=fields.flag("lm_head_bias", False),
            experts=experts,
        )
        if not fields.has("sliding_window"):
            return config
        return dataclasses.replace(config, windows=(fields.integer("sliding_window"),) * config.num_layers)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = common_gguf_config(file, cls.name)
        experts = gguf_experts(file, config, normalizes=False)
        experts = dataclasses.replace(experts, scoring="sparsemixer", jitter=0.01)
        return dataclasses.replace(config, experts=experts, head_bias="output.bias" in file.tensors)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return expert_layout(config, {**MIXTRAL_NAMES, "router": "gate"})

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_layout(num_experts=num_experts(config))

    def load_layer(self, load: LayerLoader) -> Block:
        return Block(
            attention_norm=load.layer_norm("input_layernorm"),
            attention=load.attention(),
            mlp_norm=load.layer_norm("post_attention_layernorm"),
            mlp=load_experts(load),
        )

    def load_final_norm(self, loader: WeightLoader) -> Norm:
        return load_layer_norm(loader, "model.norm", self.config)

    def run_layer(self, layer: Block, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        residual.add_(layer.attention(ops, layer.attention_norm(ops, residual), cache, batch))
        residual.add_(layer.mlp(ops, layer.mlp_norm(ops, residual)))
