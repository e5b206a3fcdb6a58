"""Decoders with Llama's layers: Llama 2 and 3, and SmolLM2; Mistral, whose layers may have a window; Mixtral, a
Mistral with a mixture of experts; Ministral 3, whose queries grow with their position; Granite 3 with factors; and
families that differ in biases, in the rotation of heads, or in names: InternLM 2 and 3, EXAONE 3 and MiniCPM bring
Python code in their folders that is not needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from penstock.core.errors import ModelLoadError
from penstock.models.config import ArchitectureConfig, Fields, yarn_amplitude
from penstock.models.decoder import BlockDecoder, PreNormDecoder
from penstock.models.experts import MIXTRAL_NAMES
from penstock.models.gguf_config import common_gguf_config, has_experts, longrope_of, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import gguf_layout
from penstock.models.huggingface_config import (
    common_huggingface_config,
    growth_of_queries,
    layer_windows,
    mixtral_experts,
    read_windows,
    rope_parameters,
)
from penstock.models.layers import LayerLoader, ScaledQueries, query_factors
from penstock.models.layout import Layout, grouped_qkv


class Llama(PreNormDecoder):
    name = "llama"
    huggingface_names: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM", "llama")
    gguf_names: ClassVar[tuple[str, ...]] = ("llama",)
    attention_bias: ClassVar[bool | None] = False
    mlp_bias: ClassVar[bool | None] = False
    is_gguf_interleaved = True


class Cwm(Llama):
    """Code World Model: Llama with windows on most layers."""

    name = "cwm"
    huggingface_names = ("CwmForCausalLM", "cwm")
    gguf_names = ()

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields)
        if not fields.raw("sliding_window"):
            return config
        window = fields.integer("sliding_window")
        windows = layer_windows(fields, config.num_layers, window)
        if windows is None:
            windows = tuple(window if index % 4 else None for index in range(config.num_layers))
        return dataclasses.replace(config, windows=windows)


class Mistral(Llama):
    """GGUF files call these models "llama" too, and never had their windows."""

    name = "mistral"
    huggingface_names: ClassVar[tuple[str, ...]] = (
        "MistralForCausalLM",
        "mistral",
        "MinistralForCausalLM",
        "ministral",
    )
    gguf_names = ()
    attention_bias = None
    mlp_bias = None

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        # The first release has a window; later ones set it to null to say that there is none.
        config = super().config_from_huggingface(fields)
        return dataclasses.replace(config, windows=read_windows(fields, config.num_layers, None))


class Mixtral(Mistral):
    """GGUF files call these models "llama", too."""

    name = "mixtral"
    huggingface_names = ("MixtralForCausalLM", "mixtral")
    gguf_mixtures = ("llama",)
    gguf_experts_normalize = True
    stored_names = MIXTRAL_NAMES

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        return dataclasses.replace(super().config_from_huggingface(fields), experts=mixtral_experts(fields))

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        # The first files have each expert by itself.
        names = {
            f"ffn_{part}.{expert}": f"mlp.experts.{expert}.{part}_proj"
            for part in ("gate", "up", "down")
            for expert in range(config.num_experts)
        }
        return gguf_layout(names, rows=cls.rows(config, interleaved=True), num_experts=config.num_experts)


class SmolLM3(Llama):
    """Llama with some layers whose attention knows no positions."""

    name = "smollm3"
    huggingface_names = ("SmolLM3ForCausalLM", "smollm3")
    gguf_names = ("smollm3",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields)
        window = None
        if fields.flag("use_sliding_window", False) and fields.has("sliding_window"):
            window = fields.integer("sliding_window")
        rotates = fields.raw("no_rope_layers")  # 1 for a layer with rope, in spite of the name
        if rotates is None:
            interval = fields.integer("no_rope_layer_interval", 4)
            rotates = [(index + 1) % interval for index in range(config.num_layers)]
        if not isinstance(rotates, list) or len(rotates) != config.num_layers:
            raise ModelLoadError(f"{fields.where} lists no_rope_layers that do not match its layers.")
        windows = layer_windows(fields, config.num_layers, window)
        if windows is None:
            windows = tuple(None if rotated else window for rotated in rotates)
        unrotated = frozenset(index for index, rotated in enumerate(rotates) if not rotated)
        return dataclasses.replace(config, windows=windows, unrotated_layers=unrotated)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = super().config_from_gguf(file)
        return dataclasses.replace(config, unrotated_layers=frozenset(range(3, config.num_layers, 4)))


class SeedOss(Llama):
    """Llama with biases of its own."""

    name = "seed_oss"
    huggingface_names = ("SeedOssForCausalLM", "seed_oss")
    gguf_names = ("seed_oss",)
    attention_bias = True
    gguf_stored_names: ClassVar[Mapping[str, str]] = {"post_attention_norm": "post_attention_layernorm"}
    is_gguf_interleaved = False

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        has_bias = fields.flag("attention_out_bias", False)
        return dataclasses.replace(super().config_from_huggingface(fields), output_bias=has_bias)


class Ernie45(Llama):
    """Ernie 4.5, dense: Llama with rotary pairs of neighbours."""

    name = "ernie4_5"
    huggingface_names: ClassVar[tuple[str, ...]] = ("Ernie4_5ForCausalLM", "ernie4_5")
    gguf_names: ClassVar[tuple[str, ...]] = ("ernie4_5",)
    is_interleaved = True

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        has_bias = fields.flag("use_bias", False)
        return dataclasses.replace(
            super().config_from_huggingface(fields),
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=has_bias,
            tie_embeddings=fields.flag("tie_word_embeddings", True),
        )


class Helium(Llama):
    """Llama with rotary pairs of neighbours."""

    name = "helium"
    huggingface_names = ("HeliumForCausalLM", "helium")
    gguf_names = ()
    is_interleaved = True


class Granite(BlockDecoder):
    """Granite 3, dense: Llama with factors for embeddings, attention, residual additions and logits."""

    name = "granite"
    huggingface_names: ClassVar[tuple[str, ...]] = ("GraniteForCausalLM", "granite")
    gguf_names: ClassVar[tuple[str, ...]] = ("granite",)
    attention_bias = False
    mlp_bias = False
    is_gguf_interleaved = True

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        return with_scales(super().config_from_huggingface(fields), fields)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return with_gguf_scales(super().config_from_gguf(file), file)


def with_scales(config: ArchitectureConfig, fields: Fields) -> ArchitectureConfig:
    """Return the settings with Granite's factors, as folders of all its generations name them."""
    return dataclasses.replace(
        config,
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


def with_gguf_scales(config: ArchitectureConfig, file: GGUFFile) -> ArchitectureConfig:
    """Return the settings with Granite's factors, as GGUF files of all its generations name them."""
    fields = metadata_fields(file)
    return dataclasses.replace(
        config,
        attention_scale=fields.number("attention.scale", config.attention_scale),
        embedding_scale=fields.number("embedding_scale", 1.0),
        residual_scale=fields.number("residual_scale", 1.0),
        logit_scale=1.0 / fields.number("logit_scale", 1.0),
    )


_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class Ministral3(BlockDecoder):
    name = "ministral3"
    huggingface_names = ("Ministral3ForCausalLM", "ministral3")
    gguf_names = ("mistral3",)
    is_gguf_interleaved = True

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        rope = {**_DEFAULT_ROPE, **rope_parameters(fields)}
        fields = fields.changed(rope_parameters=rope)
        config = Mistral.config_from_huggingface(fields)
        return dataclasses.replace(config, architecture=cls.name, **growth_of_queries(rope, fields.where))

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config, fields = common_gguf_config(file, cls.name), metadata_fields(file)
        if has_experts(file):
            raise ModelLoadError(f"{file.path.name} has experts, which are not supported for Mistral 3.")
        rope, scaling = config.rope, config.rope.scaling
        if scaling is not None and scaling.kind == "yarn":
            # Cosines and sines have two factors. Files state the factor in the denominator; the other factor is 1.
            key = "rope.scaling.yarn_log_multiplier"
            below = fields.number(key) if fields.raw(key) else 0.0
            amplitude = yarn_amplitude(scaling.factor) / yarn_amplitude(scaling.factor, below)
            rope = dataclasses.replace(rope, scaling=dataclasses.replace(scaling, attention_factor=amplitude))
        growth = fields.optional_number("attention.temperature_scale")
        return dataclasses.replace(config, rope=rope, query_growth=growth)

    def load_attention(self, load: LayerLoader) -> ScaledQueries:
        return ScaledQueries(load.attention(), query_factors(load))


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
    cut = staticmethod(grouped_qkv)
    stored_names: ClassVar[Mapping[str, str]] = {
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

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        has_bias = fields.flag("bias", False)
        return dataclasses.replace(
            common_huggingface_config(fields, cls.name), qkv_bias=has_bias, output_bias=has_bias
        )


class Exaone(Llama):
    """EXAONE 3, 3.5 and Deep: GPT-2's names."""

    name = "exaone"
    huggingface_names = ("ExaoneForCausalLM", "exaone")
    gguf_names = ("exaone",)
    is_gguf_interleaved = False
    stored_base = "transformer"
    stored_names: ClassVar[Mapping[str, str]] = {
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

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        names = {
            "num_hidden_layers": "num_layers",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        }
        return common_huggingface_config(fields.renamed(names), cls.name)


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
        config = Llama.config_from_huggingface(fields.with_usual(tie_word_embeddings=True))
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
