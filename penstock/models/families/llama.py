"""Decoders with Llama's layers: Llama 2 and 3, and SmolLM2; Mistral, whose layers may have a window; Mixtral, a
Mistral with a mixture of experts; and families that differ in biases and in the rotation of heads."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from penstock.core.errors import ModelLoadError
from penstock.models.config import ArchitectureConfig, ExpertsConfig, Fields
from penstock.models.decoder import PreNormDecoder
from penstock.models.experts import MIXTRAL_NAMES, ExpertMLP, expert_layout, load_experts, num_experts
from penstock.models.gguf_config import common_gguf_config, gguf_experts
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import gguf_layout
from penstock.models.huggingface_config import common_huggingface_config, layer_windows
from penstock.models.layers import LayerLoader
from penstock.models.layout import Layout, rotated_rows


class Llama(PreNormDecoder):
    name = "llama"
    huggingface_names: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM", "llama")
    gguf_names: ClassVar[tuple[str, ...]] = ("llama",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        has_bias = fields.flag("attention_bias", False)
        return dataclasses.replace(
            common_huggingface_config(fields, cls.name),
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=fields.flag("mlp_bias", False),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return common_gguf_config(file, cls.name)

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        # Rows of queries and keys are stored in the order of interleaved rotary pairs.
        return gguf_layout(rows=rotated_rows(config, interleaved=True))


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

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = common_huggingface_config(fields, cls.name)
        # The first release has the key; later ones set it to null to say that there is no window.
        if not fields.has("sliding_window"):
            return config
        window = fields.integer("sliding_window")
        listed = layer_windows(fields, config.num_layers, window)
        windows = (window,) * config.num_layers if listed is None else listed
        return dataclasses.replace(config, windows=windows)


class Mixtral(Mistral):
    """GGUF files call these models "llama", too."""

    name = "mixtral"
    huggingface_names = ("MixtralForCausalLM", "mixtral")
    gguf_mixtures = ("llama",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        experts = ExpertsConfig(
            count=fields.integer("num_local_experts"),
            per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("intermediate_size"),
            normalizes=True,
        )
        return dataclasses.replace(super().config_from_huggingface(fields), experts=experts)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = common_gguf_config(file, cls.name)
        return dataclasses.replace(config, experts=gguf_experts(file, config, normalizes=True))

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return expert_layout(config, MIXTRAL_NAMES)

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        # The first files have each expert by itself.
        names = {
            f"ffn_{part}.{expert}": f"mlp.experts.{expert}.{part}_proj"
            for part in ("gate", "up", "down")
            for expert in range(num_experts(config))
        }
        rows = rotated_rows(config, interleaved=True)
        return gguf_layout(names, rows=rows, num_experts=num_experts(config))

    def load_mlp(self, load: LayerLoader) -> ExpertMLP:
        return load_experts(load)


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

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        return dataclasses.replace(
            super().config_from_huggingface(fields),
            qkv_bias=fields.flag("attention_bias", True),
            output_bias=fields.flag("attention_out_bias", False),
        )

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_layout({"post_attention_norm": "post_attention_layernorm"})


class Ernie45(Llama):
    """Ernie 4.5, dense: Llama with rotary pairs of neighbours."""

    name = "ernie4_5"
    huggingface_names = ("Ernie4_5ForCausalLM", "ernie4_5")
    gguf_names = ("ernie4_5",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        has_bias = fields.flag("use_bias", False)
        config = dataclasses.replace(
            super().config_from_huggingface(fields),
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=has_bias,
        )
        return dataclasses.replace(config, tie_embeddings=fields.flag("tie_word_embeddings", True))

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return Layout(rows=rotated_rows(config, interleaved=True))


class Helium(Llama):
    """Llama with rotary pairs of neighbours."""

    name = "helium"
    huggingface_names = ("HeliumForCausalLM", "helium")
    gguf_names = ()

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return Layout(rows=rotated_rows(config, interleaved=True))
