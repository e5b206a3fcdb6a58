"""Llama's layers under names of their makers, whose folders bring Python code that is not needed: InternLM 2 and 3,
EXAONE 3 and MiniCPM."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.core.errors import ModelLoadError
from penstock.models.config import ArchitectureConfig, Fields
from penstock.models.families.granite import Granite
from penstock.models.families.llama import Llama
from penstock.models.gguf_config import longrope_of, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import gguf_layout
from penstock.models.huggingface_config import common_huggingface_config
from penstock.models.layout import Layout, grouped_qkv, rotated_rows


class InternLM3(Llama):
    """InternLM 3: biases of queries, keys and values are a setting of their own."""

    name = "internlm3"
    huggingface_names = ("InternLM3ForCausalLM", "internlm3")
    gguf_names = ()

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        has_bias = fields.flag("bias", False)
        return dataclasses.replace(
            common_huggingface_config(fields, cls.name),
            qkv_bias=fields.flag("qkv_bias", has_bias),
            output_bias=has_bias,
            mlp_bias=has_bias,
        )


class InternLM2(Llama):
    """InternLM 2 and 2.5: queries, keys and values are one matrix, grouped by key head."""

    name = "internlm2"
    huggingface_names = ("InternLM2ForCausalLM", "internlm2")
    gguf_names = ("internlm2",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        has_bias = fields.flag("bias", False)
        return dataclasses.replace(
            common_huggingface_config(fields, cls.name), qkv_bias=has_bias, output_bias=has_bias
        )

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = {
            "tok_embeddings": "embed_tokens",
            "attention.wqkv": "self_attn.qkv_proj",
            "attention.wo": "self_attn.o_proj",
            "feed_forward.w1": "mlp.gate_proj",
            "feed_forward.w2": "mlp.down_proj",
            "feed_forward.w3": "mlp.up_proj",
            "attention_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "output": "lm_head",
        }
        return Layout(names=names, cut=grouped_qkv(config))


class Exaone(Llama):
    """EXAONE 3, 3.5 and Deep: GPT-2's names."""

    name = "exaone"
    huggingface_names = ("ExaoneForCausalLM", "exaone")
    gguf_names = ("exaone",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        names = {
            "num_hidden_layers": "num_layers",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        }
        return common_huggingface_config(fields.renamed(names), cls.name)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = {
            "wte": "embed_tokens",
            "h": "layers",
            "ln_f": "norm",
            "ln_1": "input_layernorm",
            "ln_2": "post_attention_layernorm",
            "attn.attention": "self_attn",
            "self_attn.out_proj": "self_attn.o_proj",
            "mlp.c_fc_0": "mlp.gate_proj",
            "mlp.c_fc_1": "mlp.up_proj",
            "mlp.c_proj": "mlp.down_proj",
        }
        return Layout(base="transformer", names=names)

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_layout(rows=rotated_rows(config))


class MiniCPM(Granite):
    """MiniCPM 1, 2 and 4, dense: factors as in Granite. The head is the embedding, unless the file says otherwise."""

    name = "minicpm"
    huggingface_names = ("MiniCPMForCausalLM", "minicpm")
    gguf_names = ("minicpm",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        if fields.raw("num_experts") or fields.raw("sparse_config"):
            raise ModelLoadError(
                f"{fields.where} describes a MiniCPM with experts or sparse attention, of which only the dense ones "
                "are supported.",
                hint="Run the model in another server, and name that server with --external.",
            )
        config = Llama.config_from_huggingface(
            Fields({"tie_word_embeddings": True, **fields.values}, fields.where)
        )
        return dataclasses.replace(
            config,
            architecture=cls.name,
            embedding_scale=fields.number("scale_emb", 1.0),
            residual_scale=fields.number("scale_depth", 1.0) / config.num_layers**0.5,
            logit_scale=fields.number("dim_model_base", config.hidden_size) / config.hidden_size,
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        """Read the settings. Older files leave out the factors of the first models."""
        config, fields = super().config_from_gguf(file), metadata_fields(file)
        usual = {
            "embedding_scale": 12.0,
            "residual_scale": 1.4 / config.num_layers**0.5,
            "logit_scale": 256 / config.hidden_size,
        }
        left_out: dict[str, Any] = {key: value for key, value in usual.items() if not fields.has(key)}
        rope = config.rope
        if rope.scaling is None and "rope_factors_long.weight" in file.tensors:
            rope = dataclasses.replace(rope, scaling=longrope_of(fields))
        return dataclasses.replace(config, rope=rope, **left_out)
