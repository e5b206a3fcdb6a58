"""GPT-J and CodeGen: attention and MLP read the same normed residual, and rotated pairs are stored as neighbours."""

from __future__ import annotations

import dataclasses

import torch

from penstock.core.errors import ModelLoadError
from penstock.models.config import ArchitectureConfig, Fields
from penstock.models.families.gpt import GPT2_SETTINGS
from penstock.models.families.phi import Phi
from penstock.models.huggingface_config import common_huggingface_config
from penstock.models.layout import Layout, StoredRows, rotated_rows

_CODEGEN_PARTS = 4  # of the fused matrix, each with the queries, values and keys of its heads
_NAMES = {
    "wte": "embed_tokens",
    "h": "layers",
    "ln_1": "input_layernorm",
    "ln_f": "norm",
    "attn": "self_attn",
    "out_proj": "o_proj",
    "fc_in": "up_proj",
    "fc_out": "down_proj",
}


class GPTJ(Phi):
    """Only the MLP and the head have biases."""

    name = "gptj"
    huggingface_names = ("GPTJForCausalLM", "gptj")
    gguf_names = ()

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.renamed(GPT2_SETTINGS)
        if not fields.has("rotary_dim"):
            raise ModelLoadError(f"{fields.where} has no rotary_dim, which every published model has.")
        size = fields.integer("hidden_size")
        given = {key: value for key, value in fields.values.items() if value is not None}
        head_dim = size // fields.integer("num_attention_heads")
        defaults = {
            "hidden_act": "gelu_new",
            "intermediate_size": 4 * size,
            "partial_rotary_factor": fields.integer("rotary_dim") / head_dim,
            "tie_word_embeddings": False,
        }
        fields = Fields({**defaults, **given}, fields.where)
        config = common_huggingface_config(fields, cls.name, gated=False)
        return dataclasses.replace(
            config, norm_eps=fields.number("layer_norm_epsilon", 1e-5), mlp_bias=True, head_bias=True
        )

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return Layout("transformer", _NAMES, rows=rotated_rows(config, interleaved=True))


class CodeGen(GPTJ):
    """GPT-J with queries, keys and values in one matrix."""

    name = "codegen"
    huggingface_names = ("CodeGenForCausalLM", "codegen")

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        total = 3 * config.num_heads * config.head_dim
        if config.num_heads % _CODEGEN_PARTS:
            raise ModelLoadError(
                f"CodeGen has {config.num_heads} heads, and needs a multiple of {_CODEGEN_PARTS}."
            )
        rows = torch.arange(total).view(_CODEGEN_PARTS, 3, -1)
        cut = {
            f"self_attn.{part}_proj": StoredRows("self_attn.qkv_proj", total, rows[:, index].flatten())
            for index, part in enumerate("qvk")
        }
        return Layout("transformer", _NAMES, cut, rotated_rows(config, interleaved=True))
