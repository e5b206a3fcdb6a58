"""RecurrentGemma (Griffin): layers are a gated linear recurrence of single channels or attention with a window, each
in front of Gemma's MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, Ops
from penstock.kernels.states import ChannelScanLayer, StateShapes
from penstock.models.config import ArchitectureConfig, Fields, RecurrentConfig
from penstock.models.huggingface_config import layers_of_kind
from penstock.models.layers import ACTIVATIONS, LayerLoader
from penstock.models.recurrent import (
    ConvWeights,
    HybridDecoder,
    StateMixer,
    load_conv,
    recurrent_settings,
    taken,
)
from penstock.models.sharding import scaled
from penstock.models.weights import LinearPart

_CONTEXT = 8192  # tokens that the models were trained with; their files do not tell
_PATTERN = ["recurrent", "recurrent", "attention"]
_DECAY_SCALE = 8.0
_SMALLEST_STEP = 1e-30  # steps are divided by
NAMES = {
    "final_norm": "norm",
    "temporal_pre_norm": "input_layernorm",
    "temporal_block": "self_attn",
    "channel_pre_norm": "post_attention_layernorm",
    "mlp_block": "mlp",
    "self_attn.linear_y": "self_attn.gate_proj",
    "self_attn.linear_x": "self_attn.input_proj",
    "self_attn.linear_out": "self_attn.out_proj",
}


@dataclass(frozen=True, slots=True)
class BlockProduct:
    """A product of each head with a matrix of its own."""

    weight: Tensor  # float32 [H, W, W]
    bias: Tensor  # float32 [H, 1, W]

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [T, H × W] → [T, H × W]"""
        by_head = x.unflatten(1, self.weight.shape[:2]).transpose(0, 1)
        return torch.baddbmm(self.bias, by_head, self.weight).transpose(0, 1).flatten(1)


@dataclass(frozen=True, slots=True)
class GatedRecurrence(StateMixer):
    """The real-gated linear recurrent unit behind a short convolution, times a gate. The first product gives the gate
    and the input of the convolution.

    state = a × state + √(1 - a²) × gated input, with a = exp(decay × step) and a step from 0 to 1. The first token of
    a text has no factor √(1 - a²). Scans multiply inputs by their step, so inputs are divided by it."""

    conv: ConvWeights
    input_gate: BlockProduct
    step_gate: BlockProduct
    scan: ChannelScanLayer
    activation: Callable[[Tensor], Tensor]

    @property
    def state_shapes(self) -> StateShapes:
        return self.conv.history_shape, tuple(self.scan.decay.shape)

    def mix(self, ops: Ops, projected: Tensor, states: tuple[Tensor, ...], batch: AttentionBatch) -> Tensor:
        gate, inputs = projected.chunk(2, dim=1)
        inputs = ops.short_conv(inputs, self.conv.weight, self.conv.bias, states[0], batch, silu=False)
        inputs = inputs.float()
        step = self.step_gate(inputs).sigmoid().clamp(min=_SMALLEST_STEP)
        kept = 2 * step * self.scan.decay.squeeze(1)
        is_first = (batch.positions == 0).unsqueeze(1)
        factor = torch.where(is_first, 1.0, (-torch.expm1(kept)).sqrt())
        added = inputs * self.input_gate(inputs).sigmoid() * factor / step
        ones = step.new_ones(len(step), 1)
        before_softplus = torch.expm1(step).log()
        made = ops.channel_scan(added, before_softplus, ones, ones, self.scan, states[1], batch)
        return (made * self.activation(gate.float())).to(projected.dtype)


class RecurrentGemma(HybridDecoder):
    name = "recurrent_gemma"
    huggingface_names = ("RecurrentGemmaForCausalLM", "recurrent_gemma")
    stored_names = NAMES
    rotated_norms = "none"

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.with_usual_for_nulls(
            tie_word_embeddings=True, partial_rotary_factor=0.5, max_position_embeddings=_CONTEXT
        ).changed(hidden_act=None)
        config = super().config_from_huggingface(fields)
        kinds = _kinds(fields, config.num_layers)
        width = fields.integer("lru_width", config.hidden_size)
        if width % config.num_heads or config.intermediate_size % 2:
            raise ModelLoadError(
                f"{fields.where} has a recurrence of {width} numbers for {config.num_heads} heads, and MLPs of "
                f"{config.intermediate_size} numbers; heads and halves must come out even."
            )
        return dataclasses.replace(
            config,
            intermediate_size=config.intermediate_size // 2,  # files count gate and input
            windows=(fields.integer("attention_window_size", 2048),) * config.num_layers,
            embedding_scale=float(torch.tensor(config.hidden_size**0.5, dtype=torch.bfloat16)),
            logit_softcap=fields.number("logits_soft_cap", 30.0),
            activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
            qkv_bias=fields.flag("attention_bias", False),
            output_bias=True,
            mlp_bias=True,
            norm_offset=1.0,
            recurrent=RecurrentConfig(
                layers=layers_of_kind(kinds, "recurrent"),
                conv_width=fields.integer("conv1d_width", 4),
                conv_bias=True,
                bias=True,
                output_bias=True,
                num_heads=config.num_heads,
                head_dim=width // config.num_heads,
            ),
        )

    def load_mixer(self, load: LayerLoader) -> GatedRecurrence:
        return _load_recurrence(load)


def _kinds(fields: Fields, num_layers: int) -> list[str]:
    """Return the kind of each layer: kinds take turns."""
    pattern = fields.raw("block_types") or _PATTERN
    if not isinstance(pattern, list) or not set(pattern) <= set(_PATTERN):
        raise ModelLoadError(f"{fields.where} has block_types other than recurrent and attention.")
    return [str(pattern[index % len(pattern)]) for index in range(num_layers)]


def _load_recurrence(load: LayerLoader) -> GatedRecurrence:
    """Load a rank's heads of a recurrence."""
    config, settings, shard = load.config, recurrent_settings(load.config), load.weights.shard
    weights, prefix = load.weights, f"{load.prefix}.self_attn"
    count, width = settings.num_heads, settings.head_dim
    heads = shard.own(count, "heads of the recurrence")
    size, own = count * width, scaled(heads, width)

    def gate(name: str) -> BlockProduct:
        weight = weights.table(f"{prefix}.rg_lru.{name}_gate_weight", size, width)
        bias = weights.table(f"{prefix}.rg_lru.{name}_gate_bias", count, width)
        return BlockProduct(taken(weight, [own]).view(-1, width, width), taken(bias, [heads]).unsqueeze(1))

    speed = taken(weights.vector(f"{prefix}.rg_lru.recurrent_param", size), [own])
    nothing = torch.zeros(len(own), device=weights.ops.device)
    scan = ChannelScanLayer(-_DECAY_SCALE * F.softplus(speed).unsqueeze(1), nothing, nothing)
    return GatedRecurrence(
        into=weights.linear(
            [f"{prefix}.gate_proj", f"{prefix}.input_proj"],
            [size] * 2,
            config.hidden_size,
            bias=True,
            part=LinearPart(rows=[own, own]),
        ),
        conv=load_conv(load, f"{prefix}.conv_1d", size, [own]),
        input_gate=gate("input"),
        step_gate=gate("recurrent"),
        scan=scan,
        activation=ACTIVATIONS[config.activation],
        output=weights.linear(
            [f"{prefix}.out_proj"], [config.hidden_size], size, bias=True, part=LinearPart(columns=own)
        ),
    )
