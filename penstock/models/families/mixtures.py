"""Mixtures of experts that differ from Llama in a detail or two: GLM 4.5 and 4.6, MiniMax M2, Ernie 4.5, OLMoE,
Granite and Phi 3.5."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from penstock.kernels.interface import Ops
from penstock.models.config import ArchitectureConfig, ExpertsConfig, Fields, NotNative
from penstock.models.decoder import BlockDecoder, PreNormDecoder
from penstock.models.experts import (
    GRANITE_EXPERTS,
    MIXTRAL_NAMES,
)
from penstock.models.families.llama import Ernie45, Granite
from penstock.models.gguf_config import SIGMOID, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import grouped_experts, mixtral_experts
from penstock.models.layers import (
    ChangedAttention,
    Clipped,
    LayerLoader,
    WideNorms,
)
from penstock.models.layout import StoredRows, fused_rows

_SELECTION_BIAS = "gate.e_score_correction_bias"


class Glm4Moe(PreNormDecoder):
    """GLM 4.5 and 4.6: half of each head is rotated, and experts are chosen as in DeepSeek V3."""

    name = "glm4_moe"
    huggingface_names: ClassVar[tuple[str, ...]] = ("Glm4MoeForCausalLM", "glm4_moe")
    gguf_names: ClassVar[tuple[str, ...]] = ("glm4moe",)
    gguf_experts_normalize = True
    gguf_gating = SIGMOID  # files of some converters do not say
    selection_bias: ClassVar[str | None] = _SELECTION_BIAS
    gguf_stored_names: ClassVar[Mapping[str, str]] = {"post_attention_norm": "post_attention_layernorm"}

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields.with_usual(partial_rotary_factor=0.5))
        return dataclasses.replace(
            config,
            qkv_bias=fields.flag("attention_bias", False),
            head_norms=fields.flag("use_qk_norm", False),
            experts=grouped_experts(fields, config.num_layers),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        has_norms = "blk.0.attn_q_norm.weight" in file.tensors
        return dataclasses.replace(super().config_from_gguf(file), head_norms=has_norms)


class DeepseekMoe(Glm4Moe):
    """DeepSeek MoE of 2024, and the text model of DeepSeek-OCR 2: a softmax chooses experts, as in DeepSeek V2."""

    name = "deepseek"
    huggingface_names = ("DeepseekForCausalLM", "deepseek", "deepseek_ocr2_text")
    gguf_names: ClassVar[tuple[str, ...]] = ()
    mlp_bias = False
    selection_bias = None

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.with_usual_for_nulls(
            partial_rotary_factor=1.0, norm_topk_prob=False, num_experts_per_tok=6
        )
        if fields.text("scoring_func", "softmax") != "softmax" or fields.integer("moe_layer_freq", 1) != 1:
            raise NotNative(f"{fields.where} has experts that no published DeepSeek MoE has.")
        config = super().config_from_huggingface(fields)
        grouped = fields.text("topk_method", "greedy") == "group_limited_greedy"
        experts = grouped_experts(fields, config.num_layers, scoring="softmax", grouped=grouped, ranked_by=1)
        return dataclasses.replace(config, output_bias=config.qkv_bias, experts=experts)


class MiniMaxM2(BlockDecoder):
    """MiniMax M2: norms over all query heads and all key heads, and experts chosen by sigmoids with a bias."""

    name = "minimax_m2"
    huggingface_names = ("MiniMaxM2ForCausalLM", "minimax_m2")
    gguf_names = ("minimax-m2",)
    gguf_experts_normalize = True
    selection_bias = _SELECTION_BIAS
    rotated_norms = "wide"
    stored_names: ClassVar[Mapping[str, str]] = {
        "block_sparse_moe.e_score_correction_bias": f"mlp.{_SELECTION_BIAS}",
        **MIXTRAL_NAMES,
    }

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        if fields.has("rotary_dim"):
            share = fields.integer("rotary_dim") / fields.integer("head_dim")
            fields = fields.changed(partial_rotary_factor=share)
        experts = dataclasses.replace(mixtral_experts(fields), scoring="sigmoid")
        return dataclasses.replace(super().config_from_huggingface(fields), experts=experts)

    def load_attention(self, load: LayerLoader) -> ChangedAttention:
        return ChangedAttention(load.attention(), load.wide_norms())


class Olmoe(BlockDecoder):
    """OLMoE: norms over all query heads and all key heads, and maybe limits on queries, keys and values."""

    name = "olmoe"
    huggingface_names = ("OlmoeForCausalLM", "olmoe")
    gguf_names = ("olmoe",)
    attention_bias = False
    gguf_experts_normalize = False
    rotated_norms = "wide"

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        experts = ExpertsConfig(
            count=fields.integer("num_experts"),
            per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("intermediate_size"),
            normalizes=fields.switch("norm_topk_prob", False),
        )
        limit = fields.optional_number("clip_qkv")
        return dataclasses.replace(super().config_from_huggingface(fields), experts=experts, qkv_limit=limit)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        limit = metadata_fields(file).optional_number("attention.clamp_kqv")
        return dataclasses.replace(super().config_from_gguf(file), qkv_limit=limit)

    def load_attention(self, load: LayerLoader) -> ChangedAttention:
        norms, limit = load.wide_norms(), self.config.qkv_limit
        return ChangedAttention(load.attention(), norms if limit is None else _Clipped(norms, Clipped(limit)))


@dataclasses.dataclass(frozen=True, slots=True)
class _Clipped:
    norms: WideNorms
    limit: Clipped

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        return self.limit(ops, self.norms(ops, x))


class Ernie45Moe(Ernie45):
    """Ernie 4.5 with experts, and a bias where experts are chosen."""

    name = "ernie4_5_moe"
    huggingface_names = ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe")
    gguf_names = ("ernie4_5-moe",)
    gguf_experts_normalize = True
    selection_bias = _SELECTION_BIAS
    stored_names: ClassVar[Mapping[str, str]] = {"moe_statics.e_score_correction_bias": _SELECTION_BIAS}

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields)
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
        return dataclasses.replace(config, experts=experts)


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
    gguf_experts_normalize = True
    stacked_experts = GRANITE_EXPERTS
    stored_names: ClassVar[Mapping[str, str]] = {
        "shared_mlp.input_linear": "mlp.shared_experts.gate_up_proj",
        "shared_mlp.output_linear": "mlp.shared_experts.down_proj",
        "block_sparse_moe": "mlp",
        "router.layer": "gate",
    }

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        key = "shared_intermediate_size"
        shared = fields.integer(key) if fields.raw(key) else None
        experts = dataclasses.replace(mixtral_experts(fields), shared_intermediate_size=shared)
        return dataclasses.replace(super().config_from_huggingface(fields), experts=experts)

    @staticmethod
    def cut(config: ArchitectureConfig) -> dict[str, StoredRows]:
        shared = config.experts.shared_intermediate_size if config.experts is not None else None
        if shared is None:
            return {}
        halves = {f"mlp.shared_experts.{part}_proj": shared for part in ("gate", "up")}
        return fused_rows("mlp.shared_experts.gate_up_proj", halves)


class PhiMoe(BlockDecoder):
    """Phi 3.5 MoE: layer norms with biases, and two experts whose weights do not sum to 1."""

    name = "phimoe"
    huggingface_names = ("PhimoeForCausalLM", "PhiMoEForCausalLM", "phimoe")
    gguf_names = ("phimoe",)
    attention_bias = False
    norm_kind = "layer"
    gguf_experts_normalize = False
    stored_names: ClassVar[Mapping[str, str]] = {**MIXTRAL_NAMES, "router": "gate"}

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        experts = dataclasses.replace(
            mixtral_experts(fields.changed(num_experts_per_tok=2)),
            normalizes=False,
            scoring="sparsemixer",
            jitter=fields.number("router_jitter_noise", 0.01),
        )
        config = super().config_from_huggingface(fields)
        return dataclasses.replace(
            config,
            head_bias=fields.flag("lm_head_bias", False),
            experts=experts,
            windows=(fields.optional_integer("sliding_window"),) * config.num_layers,
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = super().config_from_gguf(file)
        assert config.experts is not None
        experts = dataclasses.replace(config.experts, scoring="sparsemixer", jitter=0.01)
        return dataclasses.replace(config, experts=experts, head_bias="output.bias" in file.tensors)
