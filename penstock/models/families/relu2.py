"""Families whose MLP has no gate: Nemotron and Arcee, which square positive values, and Apertus with a learned
curve."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.models.config import ArchitectureConfig, Fields, extended
from penstock.models.decoder import BlockDecoder
from penstock.models.gguf_file import GGUFFile
from penstock.models.layers import LayerLoader, PlainMLP


class Arcee(BlockDecoder):
    """Llama with a plain MLP."""

    name = "arcee"
    huggingface_names = ("ArceeForCausalLM", "arcee")
    gguf_names = ("arcee",)
    attention_bias = False
    mlp_bias = False
    has_gate = False
    gguf_activation = "relu2"
    is_gguf_interleaved = True


class Nemotron(BlockDecoder):
    """Layer norms with a bias, whose weights are stored less 1; heads that are rotated in part."""

    name = "nemotron"
    huggingface_names: ClassVar[tuple[str, ...]] = ("NemotronForCausalLM", "nemotron")
    gguf_names: ClassVar[tuple[str, ...]] = ("nemotron",)
    attention_bias = False
    mlp_bias = False
    eps_setting = "norm_eps"
    has_gate = False
    norm_kind = "layer"
    gguf_activation = "relu2"

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.with_usual(partial_rotary_factor=0.5, hidden_act="relu2")
        return dataclasses.replace(super().config_from_huggingface(fields), norm_offset=1.0)


class Jais2(Nemotron):
    """Jais 2: biases everywhere, and whole heads that are rotated."""

    name = "jais2"
    huggingface_names = ("Jais2ForCausalLM", "jais2")
    gguf_names = ("jais2",)
    attention_bias = True
    mlp_bias = True
    eps_setting = "layer_norm_eps"

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.with_usual(partial_rotary_factor=1.0)
        return dataclasses.replace(super().config_from_huggingface(fields), norm_offset=0.0)


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


class Apertus(BlockDecoder):
    """Llama with norms on query and key heads, and a plain MLP with a learned curve."""

    name = "apertus"
    huggingface_names = ("ApertusForCausalLM", "apertus")
    gguf_names = ("apertus",)
    attention_bias = False
    has_head_norms = True
    stored_names: ClassVar[Mapping[str, str]] = {
        "attention_layernorm": "input_layernorm",
        "feedforward_layernorm": "post_attention_layernorm",
    }

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields.changed(hidden_act=None))
        if fields.text("hidden_act", "xielu") != "xielu":
            fields.activation("hidden_act", "xielu")
        return config

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config, fields = super().config_from_gguf(file), Fields(file.metadata, file.path.name)
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
        return extended(config, ApertusConfig, curves=tuple(zip(right, left, strict=True)))

    def load_mlp(self, load: LayerLoader) -> PlainMLP:
        if isinstance(self.config, ApertusConfig):
            right, left = torch.tensor(self.config.curves[load.index]).to(load.weights.ops.device).split(1)
        else:
            right, left = (load.weights.vector(f"{load.prefix}.mlp.act_fn.alpha_{side}", 1) for side in "pn")
        return load.plain_mlp(activation=XIELU(F.softplus(right), _SLOPE + F.softplus(left)))
