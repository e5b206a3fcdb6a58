"""Families in the style of GPT: layer norms with a bias, and MLPs without a gate. GPT-2, GPT-Neo, StarCoder 2,
GPT-NeoX and Falcon."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, KVStore, Ops
from penstock.models.alibi import alibi_slopes, load_attention
from penstock.models.config import ArchitectureConfig, Fields, NotNative
from penstock.models.decoder import Decoder
from penstock.models.gguf_config import common_gguf_config, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import gguf_layout
from penstock.models.huggingface_config import common_huggingface_config
from penstock.models.layers import Block, LayerLoader, Norm, load_layer_norm
from penstock.models.layout import Layout, fused_qkv, grouped_qkv, rotated_rows
from penstock.models.weights import WeightLoader

# The usual names of settings and modules, and GPT-2's.
GPT2_SETTINGS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}
GPT2_MODULES = {
    "wte": "embed_tokens",
    "wpe": "embed_positions",
    "h": "layers",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "ln_f": "norm",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}


class GPT(Decoder):
    """A decoder with two layer norms and a plain MLP."""

    def load_layer(self, load: LayerLoader) -> Block:
        return Block(
            attention_norm=load.layer_norm("input_layernorm"),
            attention=load_attention(load),
            mlp_norm=load.layer_norm("post_attention_layernorm"),
            mlp=load.plain_mlp(),
        )

    def load_final_norm(self, loader: WeightLoader) -> Norm:
        return load_layer_norm(loader, "model.norm", self.config)

    def run_layer(self, layer: Block, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        if not self.config.parallel_blocks:
            residual.add_(layer.attention(ops, layer.attention_norm(ops, residual), cache, batch))
            residual.add_(layer.mlp(ops, layer.mlp_norm(ops, residual)))
            return
        attended = layer.attention(ops, layer.attention_norm(ops, residual), cache, batch)
        made = layer.mlp(ops, layer.mlp_norm(ops, residual))
        residual.add_(attended).add_(made)


class GPT2(GPT):
    """GPT-2: learned positions, and matrices that are stored transposed."""

    name = "gpt2"
    huggingface_names = ("GPT2LMHeadModel", "gpt2")
    gguf_names: ClassVar[tuple[str, ...]] = ("gpt2",)
    position_offset: ClassVar[int] = 0  # rows of the table in front of the first position

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.renamed(GPT2_SETTINGS)
        defaults = {"hidden_act": "gelu_new", "tie_word_embeddings": True, "max_position_embeddings": 1024}
        given = {key: value for key, value in fields.values.items() if value is not None}
        inner = 4 * fields.integer("hidden_size")
        fields = Fields({"intermediate_size": inner, **defaults, **given}, fields.where)
        if not fields.flag("scale_attn_weights", True) or fields.flag(
            "scale_attn_by_inverse_layer_idx", False
        ):
            raise NotNative(f"{fields.where} scales attention in a way that no published GPT-2 does.")
        config = common_huggingface_config(fields, cls.name, gated=False)
        return with_biases(
            dataclasses.replace(config, norm_eps=fields.number("layer_norm_epsilon", 1e-5)), learned=True
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = dataclasses.replace(common_gguf_config(file, cls.name), plain_activation="gelu_tanh")
        return with_biases(config, learned=True)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = GPT2_MODULES | {
            "attn.c_attn": "self_attn.qkv_proj",
            "attn.c_proj": "self_attn.o_proj",
        }
        transposed = {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"}
        return Layout("transformer", names, fused_qkv(config), transposed=frozenset(transposed))

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_layout({"position_embd": "model.embed_positions"}, cut=fused_qkv(config))

    def __init__(self, config: ArchitectureConfig, loader: WeightLoader, max_model_len: int) -> None:
        super().__init__(config, loader, max_model_len)
        self._positions: Tensor | None = None
        if self.shard.is_first_stage:
            name, rows = "model.embed_positions.weight", config.max_positions + self.position_offset
            table = loader.table(name, rows, config.hidden_size).to(loader.ops.dtype)
            self._positions = table[self.position_offset :]
            self.num_parameters, self.weight_bytes = loader.num_parameters, loader.weight_bytes

    def _run_one_by_one(
        self, residual: Tensor, batch: AttentionBatch, kv: KVStore, before_layer: Any = None
    ) -> None:
        if self._positions is not None:
            residual.add_(self._positions[batch.positions])
        super()._run_one_by_one(residual, batch, kv, before_layer)


class GPTNeo(GPT2):
    """GPT-Neo: learned positions, windows in some layers, and scores that are not scaled."""

    name = "gpt_neo"
    huggingface_names = ("GPTNeoForCausalLM", "gpt_neo")
    gguf_names = ()

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        usual = {
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "hidden_act": "activation_function",
        }
        fields = fields.renamed(usual)
        defaults = {"hidden_act": "gelu_new", "tie_word_embeddings": True}
        given = {key: value for key, value in fields.values.items() if value is not None}
        inner = 4 * fields.integer("hidden_size")
        fields = Fields({"intermediate_size": inner, **defaults, **given}, fields.where)
        config = common_huggingface_config(fields, cls.name, gated=False)
        groups = fields.raw("attention_types") or [[["global", "local"], config.num_layers // 2]]
        kinds = [kind for pattern, times in groups for kind in pattern * times]
        if len(kinds) != config.num_layers or not set(kinds) <= {"global", "local"}:
            raise ModelLoadError(f"{fields.where} has attention_types that do not fit its layers.")
        window = fields.integer("window_size", 256)
        config = dataclasses.replace(
            config,
            norm_eps=fields.number("layer_norm_epsilon", 1e-5),
            attention_scale=1.0,
            windows=tuple(window if kind == "local" else None for kind in kinds),
        )
        return dataclasses.replace(with_biases(config, learned=True), qkv_bias=False)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return Layout("transformer", GPT2_MODULES | {"attn.attention": "self_attn", "out_proj": "o_proj"})


class StarCoder2(GPT):
    name = "starcoder2"
    huggingface_names = ("Starcoder2ForCausalLM", "starcoder2")
    gguf_names = ("starcoder2",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = Fields({"tie_word_embeddings": True, **fields.values}, fields.where)
        config = common_huggingface_config(fields, cls.name, gated=False)
        window = fields.integer("sliding_window") if fields.has("sliding_window") else None
        has_bias = fields.flag("use_bias", True)
        return dataclasses.replace(
            config,
            norm_eps=fields.number("norm_epsilon", 1e-5),
            windows=(window,) * config.num_layers,
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=has_bias,
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = dataclasses.replace(common_gguf_config(file, cls.name), plain_activation="gelu_tanh")
        window = metadata_fields(file).raw("attention.sliding_window") or None
        return with_biases(dataclasses.replace(config, windows=(window,) * config.num_layers))

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = {"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
        return Layout(names=names, rows=rotated_rows(config))


class GPTNeoX(GPT):
    """GPT-NeoX and Pythia: heads that are rotated in part, and queries, keys and values together for each head."""

    name = "gpt_neox"
    huggingface_names = ("GPTNeoXForCausalLM", "gpt_neox")
    gguf_names = ("gptneox",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.renamed({"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"})
        fields = Fields({"partial_rotary_factor": 0.25, **fields.values}, fields.where)
        config = with_biases(
            dataclasses.replace(
                common_huggingface_config(fields, cls.name, gated=False),
                norm_eps=fields.number("layer_norm_eps", 1e-5),
                parallel_blocks=fields.flag("use_parallel_residual", True),
            )
        )
        has_bias = fields.flag("attention_bias", True)
        return dataclasses.replace(config, qkv_bias=has_bias, output_bias=has_bias)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        parallel = metadata_fields(file).flag("use_parallel_residual", True)
        return with_biases(dataclasses.replace(common_gguf_config(file, cls.name), parallel_blocks=parallel))

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = {
            "embed_in": "embed_tokens",
            "final_layer_norm": "norm",
            "embed_out": "lm_head",
            "attention.query_key_value": "self_attn.qkv_proj",
            "attention.dense": "self_attn.o_proj",
            "mlp.dense_h_to_4h": "mlp.up_proj",
            "mlp.dense_4h_to_h": "mlp.down_proj",
        }
        return Layout("gpt_neox", names, grouped_qkv(config), rotated_rows(config))

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_layout(cut=fused_qkv(config), rows=rotated_rows(config))


class Falcon(GPT):
    """Falcon with rope or ALiBi. Attention and MLP read the same normed residual, or norms of their own."""

    name = "falcon"
    huggingface_names = ("FalconForCausalLM", "falcon")
    gguf_names = ("falcon",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.renamed(
            {
                "intermediate_size": "ffn_hidden_size",
                "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head",
            }
        )
        is_new, heads = fields.flag("new_decoder_architecture", False), fields.integer("num_attention_heads")
        kv_heads = 1 if fields.flag("multi_query", True) else heads
        if is_new:
            kv_heads = fields.integer("num_kv_heads", heads)
        defaults = {
            "hidden_act": fields.text("activation", "gelu"),
            "intermediate_size": 4 * fields.integer("hidden_size"),
            "tie_word_embeddings": True,
        }
        given = {key: value for key, value in fields.values.items() if value is not None}
        fields = Fields({**defaults, **given, "num_key_value_heads": kv_heads}, fields.where)
        config = common_huggingface_config(fields, cls.name, gated=False)
        has_bias = fields.flag("bias", False)
        return dataclasses.replace(
            config,
            norm_eps=fields.number("layer_norm_epsilon", 1e-5),
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=has_bias,
            parallel_blocks=is_new or fields.flag("parallel_attn", True),
            **(_falcon_slopes(config) if fields.flag("alibi", False) else {}),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return dataclasses.replace(common_gguf_config(file, cls.name), parallel_blocks=True)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = {
            "word_embeddings": "embed_tokens",
            "h": "layers",
            "ln_f": "norm",
            "ln_attn": "input_layernorm",
            "ln_mlp": "post_attention_layernorm",
            "self_attention.query_key_value": "self_attn.qkv_proj",
            "self_attention.dense": "self_attn.o_proj",
            "mlp.dense_h_to_4h": "mlp.up_proj",
            "mlp.dense_4h_to_h": "mlp.down_proj",
        }
        return Layout("transformer", names, grouped_qkv(config), rotated_rows(config))

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        # Where there are two norms, the first one is the MLP's.
        names = {"attn_norm_2": "attention_norm"}
        return gguf_layout(names, cut=fused_qkv(config), rows=rotated_rows(config))

    def load_layer(self, load: LayerLoader) -> Block:
        attention_norm = mlp_norm = load.layer_norm("input_layernorm")
        if load.weights.has(f"{load.prefix}.post_attention_layernorm.weight"):
            mlp_norm = load.layer_norm("post_attention_layernorm")
        elif load.weights.has(f"{load.prefix}.attention_norm.weight"):
            attention_norm = load.layer_norm("attention_norm")
        return Block(attention_norm, load_attention(load), mlp_norm, load.plain_mlp())


def _falcon_slopes(config: ArchitectureConfig) -> dict[str, Any]:
    """Return ALiBi's settings. Falcon scales biases like scores."""
    slopes = (slope * config.attention_scale for slope in alibi_slopes(config.num_heads))
    return {"slopes": tuple(slopes), "unrotated_layers": frozenset(range(config.num_layers))}


def with_biases(config: ArchitectureConfig, *, learned: bool = False) -> ArchitectureConfig:
    """Return settings with a bias for every product. Positions that are `learned` rotate no heads."""
    unrotated = frozenset(range(config.num_layers)) if learned else config.unrotated_layers
    return dataclasses.replace(
        config, qkv_bias=True, output_bias=True, mlp_bias=True, unrotated_layers=unrotated
    )
