"""Kimi Linear: most layers are delta nets whose keys have a decay for each channel, and some are attention over
latents without positions. MLPs are those of DeepSeek V3. In Ling 3 decays are bounded, attention over latents has
positions and a gate for each head, and decays and gates come from one product each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, Ops, PackedLinear
from penstock.kernels.states import ChannelDeltaLayer, StateShapes
from penstock.models.config import ArchitectureConfig, Fields, NotNative, RecurrentConfig, extended
from penstock.models.experts import (
    MIXTRAL_NAMES,
)
from penstock.models.families.deepseek import (
    GGUF_NAMES,
    SELECTION_BIAS,
    LatentAttention,
    latent_config,
    latent_gguf_config,
    latent_rows,
    load_latent_attention,
)
from penstock.models.gguf_config import layers_without_heads, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import layer_kinds, layers_of_kind, linear_layers
from penstock.models.layers import LayerLoader, RMSNorm
from penstock.models.layout import Layout, StoredRows
from penstock.models.recurrent import (
    ConvWeights,
    HybridDecoder,
    StateMixer,
    load_convs,
    log_of_decay,
    recurrent_settings,
    taken,
)
from penstock.models.sharding import scaled
from penstock.models.weights import LinearPart, WeightLoader

# As in the file, by DeepSeek's names.
SETTINGS = {
    "max_position_embeddings": "model_max_length",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
}
_GGUF_DELTA = {
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}


@dataclass(frozen=True, slots=True)
class BoundedDecay:
    """Decays exp(lower × sigmoid(speed × (step + bias))), as steps of the rule exp(-softplus(step))."""

    lower: float  # negative
    speed: Tensor  # float32 [H × K]
    bias: Tensor

    def __call__(self, step: Tensor) -> Tensor:
        size = -self.lower * torch.sigmoid(self.speed * (step.float() + self.bias))
        return torch.expm1(size).log()


@dataclass(frozen=True, slots=True)
class KimiDelta(StateMixer):
    """A delta net of Kimi Linear. The first product gives queries, keys and values, rates, and decays and gates, or
    two narrow vectors of which further products make them."""

    conv: ConvWeights
    decays: PackedLinear | None
    gates: PackedLinear | None
    rule: ChannelDeltaLayer
    norm: RMSNorm  # of each head
    bounded: BoundedDecay | None = None

    @property
    def state_shapes(self) -> StateShapes:
        heads, width = self.rule.step_bias.shape
        return self.conv.history_shape, (heads, width, width)

    def mix(self, ops: Ops, projected: Tensor, states: tuple[Tensor, ...], batch: AttentionBatch) -> Tensor:
        heads, width = self.rule.step_bias.shape
        mixed, rate, rest = projected.tensor_split([3 * heads * width, (3 * width + 1) * heads], dim=1)
        decay, gate = rest.chunk(2, dim=1)
        mixed = ops.short_conv(mixed, self.conv.weight, self.conv.bias, states[0], batch, silu=True)
        step = decay if self.decays is None else ops.linear(decay.contiguous(), self.decays)
        if self.bounded is not None:
            step = self.bounded(step)
        made = ops.channel_delta(mixed, rate, step, self.rule, states[1], batch)
        normed = F.rms_norm(made, (width,), self.norm.weight, self.norm.eps).flatten(1)
        gate = gate if self.gates is None else ops.linear(gate.contiguous(), self.gates)
        return (normed * torch.sigmoid(gate.float())).to(projected.dtype)


class KimiLinear(HybridDecoder):
    name = "kimi_linear"
    huggingface_names: ClassVar[tuple[str, ...]] = ("KimiLinearForCausalLM", "kimi_linear")
    gguf_names: ClassVar[tuple[str, ...]] = ("kimi-linear",)
    selection_bias = SELECTION_BIAS
    stored_names: ClassVar[Mapping[str, str]] = MIXTRAL_NAMES
    gguf_stored_names: ClassVar[Mapping[str, str]] = {**GGUF_NAMES, **_GGUF_DELTA}

    def __init__(self, config: ArchitectureConfig, loader: WeightLoader, max_model_len: int) -> None:
        super().__init__(config, loader, max_model_len)
        assert config.latent is not None
        # One vector for each token, which all ranks have.
        self.num_kv_heads = 1
        self.head_dim = self.latent_width = config.latent.rank + config.latent.rope_dim

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        if not fields.flag("mla_use_nope", True):
            raise NotNative(f"{fields.where} asks for rope, which Kimi Linear does not have.")
        fields.require_silu()
        renamed = fields.with_usual(rope_interleave=False, first_k_dense_replace=1).renamed(SETTINGS)
        config = latent_config(
            renamed, cls.name, scoring="sigmoid", normalizes=True, ranked_by=2, grouped=True
        )
        nested = Fields(fields.raw("linear_attn_config") or {}, f"linear_attn_config of {fields.where}")
        width = nested.integer("head_dim", fields.integer("linear_head_dim", 128))
        return dataclasses.replace(
            config,
            unrotated_layers=frozenset(range(config.num_layers)),
            recurrent=RecurrentConfig(
                layers=_delta_layers(fields, nested, config.num_layers),
                conv_width=nested.integer(
                    "short_conv_kernel_size", fields.integer("linear_conv_kernel_dim", 4)
                ),
                num_heads=nested.integer("num_heads", fields.integer("linear_num_heads", 32)),
                head_dim=width,
                state_size=width,
            ),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config, fields = latent_gguf_config(file, cls.name), metadata_fields(file)
        assert config.latent is not None
        assert config.experts is not None
        width = fields.integer("kda.head_dim")
        return dataclasses.replace(
            config,
            latent=dataclasses.replace(config.latent, interleaved=False),
            experts=dataclasses.replace(config.experts, normalizes=fields.flag("expert_weights_norm", True)),
            unrotated_layers=frozenset(range(config.num_layers)),
            recurrent=RecurrentConfig(
                layers=layers_without_heads(file, config.num_layers),
                conv_width=fields.integer("ssm.conv_kernel"),
                num_heads=config.num_heads,
                head_dim=width,
                state_size=width,
            ),
        )

    @classmethod
    def rows(cls, config: ArchitectureConfig, *, interleaved: bool) -> dict[str, StoredRows]:
        return {}

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return dataclasses.replace(super().gguf_layout(config), changed={"self_attn.A_log": log_of_decay})

    def load_attention(self, load: LayerLoader) -> LatentAttention:
        return load_latent_attention(load)

    def load_mixer(self, load: LayerLoader) -> KimiDelta:
        return load_delta(load)


def _delta_layers(fields: Fields, nested: Fields, num_layers: int) -> frozenset[int]:
    """Return the layers that are delta nets. The makers' files count layers from 1."""
    kinds = layer_kinds(fields, num_layers, {"linear_attention", "full_attention"})
    if kinds is not None:
        return layers_of_kind(kinds, "linear_attention")
    if not nested.has("kda_layers"):
        return frozenset(index for index in range(num_layers) if index == 0 or index % 4)
    listed = [nested.raw(key) for key in ("kda_layers", "full_attn_layers")]
    if not all(isinstance(each, list) for each in listed) or sorted(listed[0] + listed[1]) != [
        *range(1, num_layers + 1)
    ]:
        raise ModelLoadError(f"{nested.where} does not list each of the {num_layers} layers once.")
    return frozenset(number - 1 for number in listed[0])


def load_delta(
    load: LayerLoader, *, query: str = "q", is_narrow: bool = True, lower: float | None = None
) -> KimiDelta:
    """Load a rank's heads of a delta net. `query` is the name of its queries; with `is_narrow`, decays and gates are
    made of narrow vectors; `lower` bounds the logarithm of decays."""
    config, settings, shard = load.config, recurrent_settings(load.config), load.weights.shard
    prefix, width, hidden = f"{load.prefix}.self_attn", settings.head_dim, config.hidden_size
    size = settings.num_heads * width
    heads = shard.own(settings.num_heads, "heads of this model's delta nets")
    own = scaled(heads, width)
    speed = taken(load.weights.vector(f"{prefix}.A_log", settings.num_heads), [heads]).exp()
    bias = taken(load.weights.vector(f"{prefix}.dt_bias", size), [own])
    decays = gates = bounded = None
    names, inner, part = ["f", "g"], size, own
    if is_narrow:
        names, inner, part = ["f_a", "g_a"], width, range(width)
        decays, gates = (
            load.weights.linear([f"{prefix}.{each}_b_proj"], [size], width, part=LinearPart(rows=[own]))
            for each in "fg"
        )
    rule = ChannelDeltaLayer(-speed, bias.view(-1, width))
    if lower is not None:
        bounded = BoundedDecay(lower, speed.repeat_interleave(width), bias)
        rule = ChannelDeltaLayer(-torch.ones_like(speed), torch.zeros_like(rule.step_bias))
    return KimiDelta(
        into=load.weights.linear(
            [f"{prefix}.{each}_proj" for each in (query, "k", "v", "b", *names)],
            [size, size, size, settings.num_heads, inner, inner],
            hidden,
            part=LinearPart(rows=[own, own, own, heads, part, part]),
        ),
        conv=load_convs(load, prefix, [size] * 3, [own] * 3),
        decays=decays,
        gates=gates,
        rule=rule,
        norm=RMSNorm(load.weights.vector(f"{prefix}.o_norm.weight", width), config.norm_eps),
        output=load.weights.linear([f"{prefix}.o_proj"], [hidden], size, part=LinearPart(columns=own)),
        bounded=bounded,
    )


_QUERY = "delta_q"  # of delta nets, which have the name of other queries in files, and another order of rows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BailingConfig(ArchitectureConfig):
    least_decay: float | None  # its logarithm


class BailingHybrid(KimiLinear):
    name = "bailing_hybrid"
    huggingface_names = ("BailingHybridForCausalLM", "bailing_hybrid")
    gguf_names = ()
    stored_names: ClassVar[Mapping[str, str]] = {
        "word_embeddings": "embed_tokens",
        "attention": "self_attn",
        "dense": "o_proj",
        "expert_bias": "e_score_correction_bias",
    }
    config: BailingConfig

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields.require_silu()
        renamed = fields.renamed(SETTINGS)
        base = latent_config(renamed, cls.name, scoring="sigmoid", normalizes=True, ranked_by=2, grouped=True)
        period = fields.integer("layer_group_size", 6)
        # Transformers writes a second name for the size of these heads, as it overwrites the first.
        width = fields.integer("linear_head_dim", fields.integer("head_dim", 128))
        recurrent = RecurrentConfig(
            layers=linear_layers(fields, base.num_layers, period),
            conv_width=fields.integer("short_conv_kernel_size", 4),
            num_heads=base.num_heads,
            head_dim=width,
            state_size=width,
        )
        lower = fields.raw("kda_lower_bound")
        if not isinstance(lower, int | float | None) or (lower is not None and not -80 < lower < 0):
            raise ModelLoadError(
                f"{fields.where} has kda_lower_bound {lower!r}, which is no logarithm of a decay."
            )
        least = (-5.0 if lower is None else float(lower)) if fields.flag("kda_safe_gate", True) else None
        return extended(base, BailingConfig, recurrent=recurrent, least_decay=least)

    @staticmethod
    def cut(config: ArchitectureConfig) -> dict[str, StoredRows]:
        settings = recurrent_settings(config)
        size = settings.num_heads * settings.head_dim
        return {f"self_attn.{_QUERY}_proj": StoredRows("self_attn.q_proj", size, torch.arange(size))}

    @classmethod
    def rows(cls, config: ArchitectureConfig, *, interleaved: bool) -> dict[str, StoredRows]:
        return latent_rows(config)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return dataclasses.replace(super().layout(config), has_usual_adapters=True)

    def load_attention(self, load: LayerLoader) -> LatentAttention:
        return load_latent_attention(load, is_gated=True)

    def load_mixer(self, load: LayerLoader) -> KimiDelta:
        return load_delta(load, query=_QUERY, is_narrow=False, lower=self.config.least_decay)
