"""GPT-J and CodeGen: attention and MLP read the same normed residual, and rotated pairs are stored as neighbours."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch

from penstock.core.errors import ModelLoadError
from penstock.models.config import ArchitectureConfig, Fields
from penstock.models.families.gpt import GPT2_SETTINGS, with_gpt_settings
from penstock.models.families.phi import Phi
from penstock.models.huggingface_config import common_huggingface_config
from penstock.models.layout import StoredRows

_CODEGEN_PARTS = 4  # of the fused matrix, each with the queries, values and keys of its heads


class GPTJ(Phi):
    """Only the MLP and the head have biases."""

    name = "gptj"
    huggingface_names = ("GPTJForCausalLM", "gptj")
    gguf_names = ()
    eps_setting = "layer_norm_epsilon"
    is_interleaved = True
    stored_base = "transformer"
    stored_names: ClassVar[Mapping[str, str]] = {
        "wte": "embed_tokens",
        "h": "layers",
        "ln_1": "input_layernorm",
        "ln_f": "norm",
        "attn": "self_attn",
        "out_proj": "o_proj",
        "fc_in": "up_proj",
        "fc_out": "down_proj",
    }

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.renamed(GPT2_SETTINGS)
        if not fields.has("rotary_dim"):
            raise ModelLoadError(f"{fields.where} has no rotary_dim, which every published model has.")
        head_dim = fields.integer("hidden_size") // fields.integer("num_attention_heads")
        fields = with_gpt_settings(
            fields,
            partial_rotary_factor=fields.integer("rotary_dim") / head_dim,
            tie_word_embeddings=False,
        )
        config = common_huggingface_config(fields, cls.name, gated=False, eps_setting=cls.eps_setting)
        return dataclasses.replace(config, mlp_bias=True, head_bias=True, parallel_blocks=True)


class CodeGen(GPTJ):
    """GPT-J with queries, keys and values in one matrix."""

    name = "codegen"
    huggingface_names = ("CodeGenForCausalLM", "codegen")

    @staticmethod
    def cut(config: ArchitectureConfig) -> dict[str, StoredRows]:
        total = 3 * config.num_heads * config.head_dim
        if config.num_heads % _CODEGEN_PARTS:
            raise ModelLoadError(
                f"CodeGen has {config.num_heads} heads, and needs a multiple of {_CODEGEN_PARTS}."
            )
        rows = torch.arange(total).view(_CODEGEN_PARTS, 3, -1)
        return {
            f"self_attn.{part}_proj": StoredRows("self_attn.qkv_proj", total, rows[:, index].flatten())
            for index, part in enumerate("qvk")
        }
