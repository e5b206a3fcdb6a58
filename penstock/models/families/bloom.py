"""Families with ALiBi positions: Bloom, whose embedding has a norm, and MPT, whose norms have no bias."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.models.alibi import alibi_slopes, load_attention
from penstock.models.config import ArchitectureConfig, Fields, NotNative
from penstock.models.families.gpt import GPT, with_biases
from penstock.models.gguf_config import common_gguf_config, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import gguf_layout
from penstock.models.huggingface_config import common_huggingface_config
from penstock.models.layers import Block, LayerLoader, Norm, load_layer_norm
from penstock.models.layout import Layout, fused_qkv, grouped_qkv
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

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.renamed({"hidden_size": "n_embed"}).renamed(_NAMES)
        if fields.flag("apply_residual_connection_post_layernorm", False):
            raise NotNative(
                f"{fields.where} adds to normed states, which no published Bloom does.",
                hint="Set apply_residual_connection_post_layernorm to false if the file is wrong.",
            )
        inner = 4 * fields.integer("hidden_size")
        defaults = {
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": inner,
        }
        config = common_huggingface_config(
            Fields({**defaults, **fields.values}, fields.where), cls.name, gated=False
        )
        config = dataclasses.replace(config, norm_eps=fields.number("layer_norm_epsilon", 1e-5))
        return _with_slopes(with_biases(config))

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = dataclasses.replace(common_gguf_config(file, cls.name), plain_activation="gelu_tanh")
        return _with_slopes(with_biases(config))

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = {
            "word_embeddings": "embed_tokens",
            "word_embeddings_layernorm": "embed_norm",
            "h": "layers",
            "ln_f": "norm",
            "self_attention.query_key_value": "self_attn.qkv_proj",
            "self_attention.dense": "self_attn.o_proj",
            "mlp.dense_h_to_4h": "mlp.up_proj",
            "mlp.dense_4h_to_h": "mlp.down_proj",
        }
        return Layout("transformer", names, grouped_qkv(config))

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_layout({"token_embd_norm": "model.embed_norm"}, cut=fused_qkv(config))

    def __init__(self, config: ArchitectureConfig, loader: WeightLoader, max_model_len: int) -> None:
        super().__init__(config, loader, max_model_len)
        if self.shard.is_first_stage:
            self._embedding_norm = load_layer_norm(loader, "model.embed_norm", config)
            self.num_parameters, self.weight_bytes = loader.num_parameters, loader.weight_bytes

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embedding_norm(self._ops, super().embed(token_ids))


class Mpt(GPT):
    name = "mpt"
    huggingface_names = ("MptForCausalLM", "MPTForCausalLM", "mpt")
    gguf_names = ("mpt",)

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
        plain = {"tie_word_embeddings": True, "intermediate_size": inner, "hidden_act": "gelu"}
        config = common_huggingface_config(
            Fields({**plain, **fields.values}, fields.where), cls.name, gated=False
        )
        config = dataclasses.replace(
            config,
            norm_eps=fields.number("layer_norm_epsilon", 1e-5),
            attention_scale=attention.number("softmax_scale", config.attention_scale),
            qkv_limit=attention.optional_number("clip_qkv"),
        )
        return _with_slopes(config, attention.number("alibi_bias_max", 8.0))

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        fields = metadata_fields(file)
        limit = fields.raw("attention.clamp_kqv") or None
        config = dataclasses.replace(common_gguf_config(file, cls.name), qkv_limit=limit)
        return _with_slopes(config, fields.number("attention.max_alibi_bias"))

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = {
            "wte": "embed_tokens",
            "blocks": "layers",
            "norm_1": "input_layernorm",
            "norm_2": "post_attention_layernorm",
            "norm_f": "norm",
            "attn.Wqkv": "self_attn.qkv_proj",
            "attn.out_proj": "self_attn.o_proj",
            "ffn": "mlp",
        }
        return Layout("transformer", names, fused_qkv(config))

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_layout(cut=fused_qkv(config))

    def load_layer(self, load: LayerLoader) -> Block:
        return Block(
            attention_norm=load.layer_norm("input_layernorm", bias=False),
            attention=load_attention(load),
            mlp_norm=load.layer_norm("post_attention_layernorm", bias=False),
            mlp=load.plain_mlp(),
        )

    def load_final_norm(self, loader: WeightLoader) -> Norm:
        return load_layer_norm(loader, "model.norm", self.config, bias=False)
