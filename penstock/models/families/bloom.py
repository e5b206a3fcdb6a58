"""Families with ALiBi positions: Bloom, whose embedding has a norm, and MPT, whose norms have no bias."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.models.alibi import alibi_slopes
from penstock.models.config import ArchitectureConfig, Fields, NotNative
from penstock.models.families.gpt import GPT, NEOX_MODULES, with_biases
from penstock.models.gguf_config import metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.layers import load_norm
from penstock.models.layout import fused_qkv, grouped_qkv
from penstock.models.weights import WeightLoader

_NAMES = {
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "seq_length",
}
_MPT_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}


def _with_slopes(config: ArchitectureConfig, max_bias: float = 8.0) -> ArchitectureConfig:
    layers = frozenset(range(config.num_layers))
    return dataclasses.replace(
        config, slopes=alibi_slopes(config.num_heads, max_bias), unrotated_layers=layers
    )


class Bloom(GPT):
    name = "bloom"
    huggingface_names = ("BloomForCausalLM", "bloom")
    gguf_names = ("bloom",)
    gguf_activation = "gelu_tanh"
    stored_base = "transformer"
    stored_names: ClassVar[Mapping[str, str]] = {
        "word_embeddings": "embed_tokens",
        "word_embeddings_layernorm": "embed_norm",
        "h": "layers",
        "ln_f": "norm",
        "self_attention": "self_attn",
        **NEOX_MODULES,
    }
    gguf_stored_names: ClassVar[Mapping[str, str]] = {"token_embd_norm": "model.embed_norm"}
    cut = staticmethod(grouped_qkv)
    gguf_cut = staticmethod(fused_qkv)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.renamed({"hidden_size": "n_embed"}).renamed(_NAMES)
        if fields.flag("apply_residual_connection_post_layernorm", False):
            raise NotNative(
                f"{fields.where} adds to normed states, which no published Bloom does.",
                hint="Set apply_residual_connection_post_layernorm to false if the file is wrong.",
            )
        fields = fields.with_usual(
            tie_word_embeddings=True,
            hidden_act="gelu_pytorch_tanh",
            intermediate_size=4 * fields.integer("hidden_size"),
        )
        return _with_slopes(with_biases(super().config_from_huggingface(fields)))

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return _with_slopes(with_biases(super().config_from_gguf(file)))

    def __init__(self, config: ArchitectureConfig, loader: WeightLoader, max_model_len: int) -> None:
        super().__init__(config, loader, max_model_len)
        if self.shard.is_first_stage:
            self._embedding_norm = load_norm(loader, "model.embed_norm", config, "layer")
            self.num_parameters, self.weight_bytes = loader.num_parameters, loader.weight_bytes

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embedding_norm(self._ops, super().embed(token_ids))


class Mpt(GPT):
    name = "mpt"
    huggingface_names = ("MptForCausalLM", "MPTForCausalLM", "mpt")
    gguf_names = ("mpt",)
    norm_kind = "layer without bias"
    stored_base = "transformer"
    stored_names: ClassVar[Mapping[str, str]] = {
        "wte": "embed_tokens",
        "blocks": "layers",
        "norm_1": "input_layernorm",
        "norm_2": "post_attention_layernorm",
        "norm_f": "norm",
        "attn.Wqkv": "self_attn.qkv_proj",
        "attn.out_proj": "self_attn.o_proj",
        "ffn": "mlp",
    }
    cut = staticmethod(fused_qkv)
    gguf_cut = staticmethod(fused_qkv)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.renamed(_MPT_NAMES)
        attention = Fields(fields.raw("attn_config") or {}, f"attn_config of {fields.where}")
        for key, usual in {"alibi": True, "qk_ln": False, "prefix_lm": False}.items():
            if attention.flag(key, usual) != usual:
                raise ModelLoadError(
                    f"{attention.where} has {key} = {not usual}, which is supported neither here nor by transformers."
                )
        inner = int(fields.number("expansion_ratio", 4)) * fields.integer("hidden_size")
        fields = fields.with_usual(tie_word_embeddings=True, intermediate_size=inner, hidden_act="gelu")
        config = super().config_from_huggingface(fields)
        config = dataclasses.replace(
            config,
            attention_scale=attention.number("softmax_scale", config.attention_scale),
            qkv_limit=attention.optional_number("clip_qkv"),
        )
        return _with_slopes(config, attention.number("alibi_bias_max", 8.0))

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        fields = metadata_fields(file)
        limit = fields.raw("attention.clamp_kqv") or None
        config = dataclasses.replace(super().config_from_gguf(file), qkv_limit=limit)
        return _with_slopes(config, fields.number("attention.max_alibi_bias"))
