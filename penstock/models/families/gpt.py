"""Families in the style of GPT: layer norms with a bias, and MLPs without a gate. GPT-2, GPT-Neo, StarCoder 2,
GPT-NeoX, Falcon, OPT, and StarCoder 1 with SantaCoder (GPTBigCode)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, KVStore
from penstock.models.alibi import AlibiAttention, alibi_slopes, load_attention
from penstock.models.config import ArchitectureConfig, Fields, NotNative
from penstock.models.decoder import BeforeLayer, BlockDecoder
from penstock.models.gguf_config import metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import attention_biases, common_huggingface_config
from penstock.models.layers import Attention, Block, LayerLoader, Norm, NormKind, load_norm
from penstock.models.layout import Layout, fused_qkv, grouped_qkv
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
# The modules of a layer in the style of NeoX.
NEOX_MODULES = {
    "query_key_value": "qkv_proj",
    "dense_h_to_4h": "up_proj",
    "dense_4h_to_h": "down_proj",
    "dense": "o_proj",
}


class GPT(BlockDecoder):
    """A decoder with two layer norms and a plain MLP."""

    eps_setting = "layer_norm_epsilon"
    norm_kind: ClassVar[NormKind] = "layer"
    has_gate = False

    def load_attention(self, load: LayerLoader) -> Attention | AlibiAttention:
        return load_attention(load)


class GPT2(GPT):
    """GPT-2: learned positions, and matrices that are stored transposed."""

    name = "gpt2"
    huggingface_names = ("GPT2LMHeadModel", "gpt2")
    gguf_names: ClassVar[tuple[str, ...]] = ("gpt2",)
    gguf_activation = "gelu_tanh"
    stored_base = "transformer"
    stored_names: ClassVar[Mapping[str, str]] = GPT2_MODULES | {
        "attn.c_attn": "self_attn.qkv_proj",
        "attn.c_proj": "self_attn.o_proj",
    }
    gguf_stored_names: ClassVar[Mapping[str, str]] = {"position_embd": "model.embed_positions"}
    cut = staticmethod(fused_qkv)
    gguf_cut = staticmethod(fused_qkv)
    position_offset: ClassVar[int] = 0  # rows of the table in front of the first position

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = with_gpt_settings(fields.renamed(GPT2_SETTINGS), max_position_embeddings=1024)
        if not fields.flag("scale_attn_weights", True) or fields.flag(
            "scale_attn_by_inverse_layer_idx", False
        ):
            raise NotNative(f"{fields.where} scales attention in a way that no published GPT-2 does.")
        return with_biases(super().config_from_huggingface(fields), learned=True)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return with_biases(super().config_from_gguf(file), learned=True)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        transposed = {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"}
        return dataclasses.replace(super().layout(config), transposed=frozenset(transposed))

    def __init__(self, config: ArchitectureConfig, loader: WeightLoader, max_model_len: int) -> None:
        super().__init__(config, loader, max_model_len)
        self._positions: Tensor | None = None
        if self.shard.is_first_stage:
            name, rows = "model.embed_positions.weight", config.max_positions + self.position_offset
            table = loader.table(name, rows, config.hidden_size).to(loader.ops.dtype)
            self._positions = table[self.position_offset :]
            self.num_parameters, self.weight_bytes = loader.num_parameters, loader.weight_bytes

    def _run_one_by_one(
        self, residual: Tensor, batch: AttentionBatch, kv: KVStore, before_layer: BeforeLayer = None
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
        fields = with_gpt_settings(fields.renamed(usual))
        config = common_huggingface_config(fields, cls.name, gated=False, eps_setting=cls.eps_setting)
        groups = fields.raw("attention_types") or [[["global", "local"], config.num_layers // 2]]
        kinds = [kind for pattern, times in groups for kind in pattern * times]
        if len(kinds) != config.num_layers or not set(kinds) <= {"global", "local"}:
            raise ModelLoadError(f"{fields.where} has attention_types that do not fit its layers.")
        window = fields.integer("window_size", 256)
        config = dataclasses.replace(
            config,
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
    eps_setting = "norm_epsilon"
    gguf_activation = "gelu_tanh"
    stored_names: ClassVar[Mapping[str, str]] = {"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields.with_usual(tie_word_embeddings=True))
        has_bias = fields.flag("use_bias", True)
        return dataclasses.replace(
            config,
            windows=(fields.optional_integer("sliding_window"),) * config.num_layers,
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=has_bias,
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = super().config_from_gguf(file)
        window = metadata_fields(file).raw("attention.sliding_window") or None
        return with_biases(dataclasses.replace(config, windows=(window,) * config.num_layers))


class GPTNeoX(GPT):
    """GPT-NeoX and Pythia: heads that are rotated in part, and queries, keys and values together for each head."""

    name = "gpt_neox"
    huggingface_names = ("GPTNeoXForCausalLM", "gpt_neox")
    gguf_names = ("gptneox",)
    eps_setting = "layer_norm_eps"
    stored_base = "gpt_neox"
    stored_names: ClassVar[Mapping[str, str]] = {
        "embed_in": "embed_tokens",
        "final_layer_norm": "norm",
        "embed_out": "lm_head",
        "attention": "self_attn",
        **NEOX_MODULES,
    }
    cut = staticmethod(grouped_qkv)
    gguf_cut = staticmethod(fused_qkv)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.renamed({"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"})
        config = super().config_from_huggingface(fields.with_usual(partial_rotary_factor=0.25))
        return dataclasses.replace(
            config,
            parallel_blocks=fields.flag("use_parallel_residual", True),
            **attention_biases(fields, True),
            mlp_bias=True,
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        parallel = metadata_fields(file).flag("use_parallel_residual", True)
        return with_biases(dataclasses.replace(super().config_from_gguf(file), parallel_blocks=parallel))


class Falcon(GPT):
    """Falcon with rope or ALiBi. Attention and MLP read the same normed residual, or norms of their own."""

    name = "falcon"
    huggingface_names = ("FalconForCausalLM", "falcon")
    gguf_names = ("falcon",)
    stored_base = "transformer"
    stored_names: ClassVar[Mapping[str, str]] = {
        "word_embeddings": "embed_tokens",
        "h": "layers",
        "ln_f": "norm",
        "ln_attn": "input_layernorm",
        "ln_mlp": "post_attention_layernorm",
        "self_attention": "self_attn",
        **NEOX_MODULES,
    }
    # Where there are two norms, the first one is the MLP's.
    gguf_stored_names: ClassVar[Mapping[str, str]] = {"attn_norm_2": "attention_norm"}
    cut = staticmethod(grouped_qkv)
    gguf_cut = staticmethod(fused_qkv)

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
        fields = with_gpt_settings(fields, hidden_act=fields.text("activation", "gelu"))
        config = super().config_from_huggingface(fields.changed(num_key_value_heads=kv_heads))
        has_bias = fields.flag("bias", False)
        return dataclasses.replace(
            config,
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=has_bias,
            parallel_blocks=is_new or fields.flag("parallel_attn", True),
            **(_falcon_slopes(config) if fields.flag("alibi", False) else {}),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return dataclasses.replace(super().config_from_gguf(file), parallel_blocks=True)

    def load_layer(self, load: LayerLoader) -> Block:
        attention_norm = mlp_norm = load.norm("input_layernorm", "layer")
        if load.weights.has(f"{load.prefix}.post_attention_layernorm.weight"):
            mlp_norm = load.norm("post_attention_layernorm", "layer")
        elif load.weights.has(f"{load.prefix}.attention_norm.weight"):
            attention_norm = load.norm("attention_norm", "layer")
        return Block(attention_norm, load_attention(load), mlp_norm, load.plain_mlp())


def _falcon_slopes(config: ArchitectureConfig) -> dict[str, Any]:
    """Return ALiBi's settings. Falcon scales biases like scores."""
    slopes = (slope * config.attention_scale for slope in alibi_slopes(config.num_heads))
    return {"slopes": tuple(slopes), "unrotated_layers": frozenset(range(config.num_layers))}


def with_gpt_settings(fields: Fields, **usual: Any) -> Fields:
    """Return the settings with those that files in the style of GPT-2 leave out, or have as a null."""
    common = {
        "hidden_act": "gelu_new",
        "intermediate_size": 4 * fields.integer("hidden_size"),
        "tie_word_embeddings": True,
    }
    return fields.with_usual_for_nulls(**common | usual)


def with_biases(config: ArchitectureConfig, *, learned: bool = False) -> ArchitectureConfig:
    """Return settings with a bias for every product. Positions that are `learned` rotate no heads."""
    unrotated = frozenset(range(config.num_layers)) if learned else config.unrotated_layers
    return dataclasses.replace(
        config, qkv_bias=True, output_bias=True, mlp_bias=True, unrotated_layers=unrotated
    )


class OPT(GPT2):
    """OPT, with norms before attention and MLP, as all sizes but 350M have them."""

    name = "opt"
    huggingface_names = ("OPTForCausalLM", "opt")
    gguf_names: ClassVar[tuple[str, ...]] = ()
    position_offset = 2

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        names = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}
        fields = fields.renamed(names).with_usual(hidden_act="relu", tie_word_embeddings=True)
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
        return load_norm(loader, "model.post_attention_layernorm", self.config, "layer")


class GPTBigCode(GPT2):
    """StarCoder 1 and SantaCoder: GPT-2 with one head of keys and values for all queries."""

    name = "gpt_bigcode"
    huggingface_names = ("GPTBigCodeForCausalLM", "gpt_bigcode")
    gguf_names = ("starcoder",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.renamed(GPT2_SETTINGS)
        activation = fields.raw("hidden_act") or "gelu_pytorch_tanh"
        heads = 1 if fields.flag("multi_query", True) else fields.integer("num_attention_heads")
        changed = fields.changed(hidden_act=activation, num_key_value_heads=heads)
        return super().config_from_huggingface(changed)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        rows = fused_qkv(config) if config.num_kv_heads == 1 else grouped_qkv(config)
        return Layout(cls.stored_base, cls.stored_names, rows)
