"""Families whose MLP has no gate: Nemotron and Arcee, which square positive values, and Apertus with a learned
curve."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, Fields
from penstock.models.decoder import Decoder
from penstock.models.families.llama import Llama
from penstock.models.gguf_config import common_gguf_config
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import common_huggingface_config
from penstock.models.layers import Block, LayerLoader, Norm, load_layer_norm
from penstock.models.layout import Layout, rotated_rows
from penstock.models.weights import WeightLoader


class Arcee(Decoder):
    """Llama with a plain MLP."""

    name = "arcee"
    huggingface_names = ("ArceeForCausalLM", "arcee")
    gguf_names = ("arcee",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        has_bias = fields.flag("attention_bias", False)
        return dataclasses.replace(
            common_huggingface_config(fields, cls.name, gated=False),
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=fields.flag("mlp_bias", False),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return dataclasses.replace(common_gguf_config(file, cls.name), plain_activation="relu2")

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return Llama.gguf_layout(config)

    def load_layer(self, load: LayerLoader) -> Block:
        return Block(
            attention_norm=load.rms_norm("input_layernorm"),
            attention=load.attention(),
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=load.plain_mlp(),
        )

    def run_layer(self, layer: Block, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        residual.add_(layer.attention(ops, layer.attention_norm(ops, residual), cache, batch))
        residual.add_(layer.mlp(ops, layer.mlp_norm(ops, residual)))


class Nemotron(Decoder):
    """Layer norms with a bias, whose weights are stored less 1; heads that are rotated in part."""

    name = "nemotron"
    huggingface_names: ClassVar[tuple[str, ...]] = ("NemotronForCausalLM", "nemotron")
    gguf_names: ClassVar[tuple[str, ...]] = ("nemotron",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = Fields({"partial_rotary_factor": 0.5, "hidden_act": "relu2", **fields.values}, fields.where)
        has_bias = fields.flag("attention_bias", False)
        return dataclasses.replace(
            common_huggingface_config(fields, cls.name, gated=False),
            norm_eps=fields.number("norm_eps", 1e-5),
            norm_offset=1.0,
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=fields.flag("mlp_bias", False),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return dataclasses.replace(common_gguf_config(file, cls.name), plain_activation="relu2")

    def load_layer(self, load: LayerLoader) -> Block:
        return Block(
            attention_norm=load.layer_norm("input_layernorm"),
            attention=load.attention(),
            mlp_norm=load.layer_norm("post_attention_layernorm"),
            mlp=load.plain_mlp(),
        )

    def load_final_norm(self, loader: WeightLoader) -> Norm:
        return load_layer_norm(loader, "model.norm", self.config)

    def run_layer(self, layer: Block, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        residual.add_(layer.attention(ops, layer.attention_norm(ops, residual), cache, batch))
        residual.add_(layer.mlp(ops, layer.mlp_norm(ops, residual)))


class Jais2(Nemotron):
    """Jais 2: biases everywhere, and whole heads that are rotated."""

    name = "jais2"
    huggingface_names = ("Jais2ForCausalLM", "jais2")
    gguf_names = ("jais2",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = Fields({"hidden_act": "relu2", **fields.values}, fields.where)
        has_bias = fields.flag("attention_bias", True)
        return dataclasses.replace(
            common_huggingface_config(fields, cls.name, gated=False),
            norm_eps=fields.number("layer_norm_eps", 1e-5),
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=fields.flag("mlp_bias", True),
        )


_SLOPE = 0.5
_LARGEST_LEFT = -1e-6


@dataclass(frozen=True, slots=True)
class XIELU:
    """A curve that is a parabola right of zero and flattens out left of it. Made of two learned numbers."""

    right: Tensor  # float32 [1]
    left: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        right = self.right * x * x
        left = (torch.expm1(x.clamp_max(_LARGEST_LEFT)) - x) * self.left
        return torch.where(x > 0, right, left) + _SLOPE * x


@dataclass(frozen=True, slots=True, kw_only=True)
class ApertusConfig(ArchitectureConfig):
    curves: tuple[tuple[float, float], ...]  # the two numbers of each layer, where they are no tensors


class Apertus(Decoder):
    """Llama with norms on query and key heads, and a plain MLP with a learned curve."""

    name = "apertus"
    huggingface_names = ("ApertusForCausalLM", "apertus")
    gguf_names = ("apertus",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        has_bias = fields.flag("attention_bias", False)
        config = common_huggingface_config(
            Fields({**fields.values, "hidden_act": None}, fields.where), cls.name
        )
        if fields.text("hidden_act", "xielu") != "xielu":
            fields.activation("hidden_act", "xielu")
        return dataclasses.replace(config, qkv_bias=has_bias, output_bias=has_bias)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config, fields = common_gguf_config(file, cls.name), Fields(file.metadata, file.path.name)
        right, left = (fields.numbers(f"xielu.alpha_{side}", positive=False) for side in "pn")
        if {len(right), len(left)} != {config.num_layers}:
            raise ModelLoadError(f"{file.path.name} has no xielu.alpha_p and xielu.alpha_n for each layer.")
        for key, usual in (("beta", _SLOPE), ("eps", _LARGEST_LEFT)):
            if fields.has(f"xielu.{key}") and any(
                not math.isclose(value, usual, rel_tol=1e-3)
                for value in fields.numbers(f"xielu.{key}", positive=False)
            ):
                raise ModelLoadError(
                    f"{file.path.name} has another xielu.{key} than {usual}, which is not known."
                )
        shared = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        return ApertusConfig(**shared, curves=tuple(zip(right, left, strict=True)))

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = {
            "attention_layernorm": "input_layernorm",
            "feedforward_layernorm": "post_attention_layernorm",
        }
        return Layout(names=names, rows=rotated_rows(config))

    def load_layer(self, load: LayerLoader) -> Block:
        return Block(
            attention_norm=load.rms_norm("input_layernorm"),
            attention=load.attention(head_norms=True),
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=load.plain_mlp(activation=self._load_curve(load)),
        )

    def _load_curve(self, load: LayerLoader) -> XIELU:
        if isinstance(self.config, ApertusConfig):
            right, left = torch.tensor(self.config.curves[load.index]).to(load.weights.ops.device).split(1)
            return XIELU(F.softplus(right), _SLOPE + F.softplus(left))
        right, left = (load.weights.vector(f"{load.prefix}.mlp.act_fn.alpha_{side}", 1) for side in "pn")
        return XIELU(F.softplus(right), _SLOPE + F.softplus(left))

    def run_layer(self, layer: Block, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        residual.add_(layer.attention(ops, layer.attention_norm(ops, residual), cache, batch))
        residual.add_(layer.mlp(ops, layer.mlp_norm(ops, residual)))
