"""Ling 3: Kimi Linear whose decays are bounded, whose attention over latents has positions and a gate for each head,
and whose decays and gates come from one product each."""

from __future__ import annotations

import dataclasses

import torch

from penstock.core.errors import ModelLoadError
from penstock.models.config import ArchitectureConfig, Fields, RecurrentConfig
from penstock.models.experts import expert_layout, load_experts
from penstock.models.families.deepseek import (
    SELECTION_BIAS,
    latent_config,
    latent_rows,
    load_latent_attention,
)
from penstock.models.families.kimi_linear import SETTINGS, KimiLayer, KimiLinear, load_delta
from penstock.models.huggingface_config import layer_kinds
from penstock.models.layers import LayerLoader
from penstock.models.layout import Layout, StoredRows
from penstock.models.recurrent import recurrent_settings

_QUERY = "delta_q"  # of delta nets, which have the name of other queries in files, and another order of rows
_NAMES = {
    "word_embeddings": "embed_tokens",
    "attention": "self_attn",
    "dense": "o_proj",
    "expert_bias": "e_score_correction_bias",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BailingConfig(ArchitectureConfig):
    least_decay: float | None  # its logarithm


class BailingHybrid(KimiLinear):
    name = "bailing_hybrid"
    huggingface_names = ("BailingHybridForCausalLM", "bailing_hybrid")
    gguf_names = ()
    config: BailingConfig

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields.require_silu()
        renamed = fields.renamed(SETTINGS)
        base = latent_config(renamed, cls.name, scoring="sigmoid", normalizes=True, ranked_by=2, grouped=True)
        kinds = layer_kinds(fields, base.num_layers, {"linear_attention", "full_attention"})
        period = fields.integer("layer_group_size", 6)
        # Transformers writes a second name for the size of these heads, as it overwrites the first.
        width = fields.integer("linear_head_dim", fields.integer("head_dim", 128))
        settings = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
        settings["recurrent"] = RecurrentConfig(
            layers=frozenset(
                index
                for index in range(base.num_layers)
                if ((index + 1) % period if kinds is None else kinds[index] == "linear_attention")
            ),
            conv_width=fields.integer("short_conv_kernel_size", 4),
            num_heads=base.num_heads,
            head_dim=width,
            state_size=width,
        )
        lower = fields.raw("kda_lower_bound")
        if not isinstance(lower, int | float | None) or (lower is not None and not -80 < lower < 0):
            raise ModelLoadError(
                f"{fields.where} has kda_lower_bound {lower!r}, which is no logarithm of a decay."
            )
        least = (-5.0 if lower is None else float(lower)) if fields.flag("kda_safe_gate", True) else None
        return BailingConfig(**settings, least_decay=least)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        settings = recurrent_settings(config)
        size = settings.num_heads * settings.head_dim
        cut = {f"self_attn.{_QUERY}_proj": StoredRows("self_attn.q_proj", size, torch.arange(size))}
        usual = expert_layout(config, _NAMES, rows=latent_rows(config))
        return dataclasses.replace(usual, cut={**usual.cut, **cut}, has_usual_adapters=True)

    def load_layer(self, load: LayerLoader) -> KimiLayer:
        is_delta = load.index in recurrent_settings(load.config).layers
        experts = load.config.experts
        is_dense = experts is None or load.index in experts.dense_layers
        return KimiLayer(
            norm=load.rms_norm("input_layernorm"),
            attention=None if is_delta else load_latent_attention(load, is_gated=True),
            mixer=load_delta(load, query=_QUERY, is_narrow=False, lower=self.config.least_decay)
            if is_delta
            else None,
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=load.gated_mlp() if is_dense else load_experts(load, selection_bias=SELECTION_BIAS),
        )
