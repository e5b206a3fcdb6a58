"""Older families with learned positions beside GPT-2: OPT, and StarCoder 1 with SantaCoder (GPTBigCode)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from penstock.models.config import ArchitectureConfig, Fields, NotNative
from penstock.models.families.gpt import GPT2, GPT2_MODULES, GPT2_SETTINGS, with_biases
from penstock.models.gguf_config import common_gguf_config
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import common_huggingface_config
from penstock.models.layers import Norm, load_layer_norm
from penstock.models.layout import Layout, fused_qkv, grouped_qkv
from penstock.models.weights import WeightLoader


class OPT(GPT2):
    """OPT, with norms before attention and MLP, as all sizes but 350M have them."""

    name = "opt"
    huggingface_names = ("OPTForCausalLM", "opt")
    gguf_names: ClassVar[tuple[str, ...]] = ()
    position_offset = 2

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        names = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}
        fields = fields.renamed(names)
        fields = Fields({"hidden_act": "relu", "tie_word_embeddings": True, **fields.values}, fields.where)
        usual = {"do_layer_norm_before": True, "_remove_final_layer_norm": False,
                 "layer_norm_elementwise_affine": True}  # fmt: skip
        odd = next((key for key, value in usual.items() if fields.flag(key, value) != value), None)
        width = fields.integer("hidden_size")
        if odd is not None or fields.integer("word_embed_proj_dim", width) != width:
            raise NotNative(
                f"{fields.where} has {odd or 'word_embed_proj_dim'} as OPT 350M has, alone of all sizes."
            )
        config = common_huggingface_config(fields, cls.name, gated=False)
        has_bias = fields.flag("enable_bias", True)
        config = with_biases(dataclasses.replace(config, norm_eps=1e-5), learned=True)
        return dataclasses.replace(config, qkv_bias=has_bias, output_bias=has_bias, mlp_bias=has_bias)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = {
            "self_attn_layer_norm": "input_layernorm",
            # The last norm of the model has the same name, and so becomes this one without a layer.
            "final_layer_norm": "post_attention_layernorm",
            "fc1": "mlp.up_proj",
            "fc2": "mlp.down_proj",
            "self_attn.out_proj": "self_attn.o_proj",
        }
        return Layout("model.decoder", names, old_base="decoder")

    def load_final_norm(self, loader: WeightLoader) -> Norm:
        return load_layer_norm(loader, "model.post_attention_layernorm", self.config)


class GPTBigCode(GPT2):
    """StarCoder 1 and SantaCoder: GPT-2 with one head of keys and values for all queries."""

    name = "gpt_bigcode"
    huggingface_names = ("GPTBigCodeForCausalLM", "gpt_bigcode")
    gguf_names = ("starcoder",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.renamed(GPT2_SETTINGS)
        changes = {"hidden_act": fields.raw("hidden_act") or "gelu_pytorch_tanh"}
        heads = 1 if fields.flag("multi_query", True) else fields.integer("num_attention_heads")
        changed = {**fields.values, **changes, "num_key_value_heads": heads}
        return super().config_from_huggingface(Fields(changed, fields.where))

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = dataclasses.replace(common_gguf_config(file, cls.name), plain_activation="gelu_tanh")
        return with_biases(config, learned=True)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = GPT2_MODULES | {"attn.c_attn": "self_attn.qkv_proj", "attn.c_proj": "self_attn.o_proj"}
        rows = fused_qkv(config) if config.num_kv_heads == 1 else grouped_qkv(config)
        return Layout("transformer", names, rows)
