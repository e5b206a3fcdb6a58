"""Qwen 2 and 2.5, with a bias on queries, keys and values; Qwen 3, with norms on queries and keys; and both with a
mixture of experts, of which Qwen 2 MoE has one more expert for every token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from penstock.models.config import ArchitectureConfig, ExpertsConfig, Fields
from penstock.models.decoder import PreNormDecoder
from penstock.models.experts import SHARED_NAMES
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import layer_windows
from penstock.models.layout import Layout


class Qwen2(PreNormDecoder):
    name = "qwen2"
    huggingface_names = ("Qwen2ForCausalLM", "qwen2")
    gguf_names: ClassVar[tuple[str, ...]] = ("qwen2", "qwen2vl")  # of the second, the text part

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields)
        return _windows(fields, dataclasses.replace(config, qkv_bias=True))

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return dataclasses.replace(super().config_from_gguf(file), qkv_bias=True)


class MiMo(Qwen2):
    """Xiaomi's MiMo 7B: Qwen 2, and a layer for multi-token prediction."""

    name = "mimo"
    huggingface_names = ("MiMoForCausalLM", "mimo")
    gguf_names = ()

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = {
            "mtp_layers.0": f"layers.{config.num_layers}",
            "token_layernorm": "enorm",
            "hidden_layernorm": "hnorm",
            "input_proj": "eh_proj",
            "final_layernorm": "shared_head.norm",
        }
        return Layout(names=names)


class Qwen3(PreNormDecoder):
    name = "qwen3"
    huggingface_names = ("Qwen3ForCausalLM", "qwen3")
    gguf_names: ClassVar[tuple[str, ...]] = ("qwen3", "qwen3vl")  # of the second, the text part
    attention_bias = False
    has_head_norms = True

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        return _windows(fields, super().config_from_huggingface(fields))


class _Mixture(PreNormDecoder):
    """A decoder with experts in most layers."""

    is_shared_gated = True
    stored_names = SHARED_NAMES
    gguf_stored_names: ClassVar[Mapping[str, str]] = {"ffn_gate_inp_shexp": "mlp.shared_experts_gate"}


class Qwen3MoE(_Mixture, Qwen3):
    name = "qwen3_moe"
    huggingface_names = ("Qwen3MoeForCausalLM", "qwen3_moe")
    gguf_names = ("qwen3moe", "qwen3vlmoe")
    gguf_experts_normalize = True

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        # Windows, if there are any, are those of all layers.
        config = super().config_from_huggingface(fields.changed(layer_types=None, max_window_layers=0))
        return dataclasses.replace(config, experts=qwen_experts(fields, config.num_layers))


class Qwen2MoE(_Mixture, Qwen2):
    name = "qwen2_moe"
    huggingface_names = ("Qwen2MoeForCausalLM", "qwen2_moe")
    gguf_names = ("qwen2moe",)
    gguf_experts_normalize = False

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields)
        experts = dataclasses.replace(
            qwen_experts(fields, config.num_layers),
            shared_intermediate_size=fields.integer("shared_expert_intermediate_size"),
        )
        return dataclasses.replace(config, qkv_bias=fields.flag("qkv_bias", True), experts=experts)


def qwen_experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    period = fields.integer("decoder_sparse_step", 1)
    listed = fields.token_ids("mlp_only_layers")
    return ExpertsConfig(
        # Newer files use Mixtral's name.
        count=fields.integer("num_experts" if fields.has("num_experts") else "num_local_experts"),
        per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalizes=fields.flag("norm_topk_prob", False),
        dense_layers=frozenset(
            index for index in range(num_layers) if index in listed or (index + 1) % period
        ),
    )


def _windows(fields: Fields, config: ArchitectureConfig) -> ArchitectureConfig:
    """Apply Qwen's rule: windows only when `use_sliding_window` is set, and not in the first `max_window_layers`."""
    if not fields.flag("use_sliding_window", False) or not fields.has("sliding_window"):
        return config
    window = fields.integer("sliding_window")
    windows = layer_windows(fields, config.num_layers, window)
    if windows is None:
        first = 0 if fields.raw("max_window_layers") == 0 else fields.integer("max_window_layers", 28)
        windows = tuple(window if index >= first else None for index in range(config.num_layers))
    return dataclasses.replace(config, windows=windows)
