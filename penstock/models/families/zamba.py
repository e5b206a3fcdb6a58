"""Zamba 1: every layer is Mamba 1 with several heads, and some have the one block of attention and MLP in front. They
share the block as the layers of Zamba 2 share theirs, without adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, Ops, PackedLinear
from penstock.kernels.states import ChannelScanLayer, StateShapes
from penstock.models.config import ArchitectureConfig, Fields, extended
from penstock.models.families.zamba2 import BEHIND, BLOCK, Zamba2, Zamba2Config, hybrid_layers
from penstock.models.huggingface_config import common_huggingface_config
from penstock.models.layers import LayerLoader
from penstock.models.layout import Layout, StoredRows
from penstock.models.mamba import load_input, load_output, mamba1_config, mamba1_settings
from penstock.models.recurrent import ConvWeights, StateMixer, load_conv, taken
from penstock.models.sharding import scaled
from penstock.models.weights import LinearPart

NAMES = {
    "final_layernorm": "norm",
    "shared_transf": BLOCK,
    f"{BLOCK}.feed_forward.gate_proj": f"{BLOCK}.mlp.gate_proj",
    f"{BLOCK}.feed_forward.up_proj": f"{BLOCK}.mlp.up_proj",
    "x_proj_weight": "x_proj.weight",
    "dt_proj_weight": "dt_proj.weight",
    "dt_proj_bias": "dt_proj.bias",
}


@dataclass(frozen=True, slots=True)
class ChannelHead:
    """Some channels of Mamba 1, with a step, a write and a read of their own."""

    channels: slice
    selection: PackedLinear
    step: PackedLinear
    scan: ChannelScanLayer


@dataclass(frozen=True, slots=True)
class HeadedMamba1(StateMixer):
    """Mamba 1 in heads: a projection to input and gate, a short convolution, and for each head a projection to step,
    write and read, and a scan; a gate."""

    conv: ConvWeights
    heads: Sequence[ChannelHead]
    sizes: tuple[int, int, int]  # of step, write and read

    @property
    def state_shapes(self) -> StateShapes:
        return self.conv.history_shape, *(tuple(head.scan.decay.shape) for head in self.heads)

    def mix(self, ops: Ops, projected: Tensor, states: tuple[Tensor, ...], batch: AttentionBatch) -> Tensor:
        inputs, gate = projected.chunk(2, dim=1)
        inputs = ops.short_conv(inputs, self.conv.weight, self.conv.bias, states[0], batch, silu=True)
        made = []
        for head, state in zip(self.heads, states[1:], strict=True):
            x = inputs[:, head.channels].contiguous()
            selected = ops.linear(x, head.selection).split(self.sizes, dim=1)
            step, write, read = (each.contiguous() for each in selected)
            step = ops.linear(step, head.step)
            made.append(ops.channel_scan(x, step, read, write, head.scan, state, batch))
        return ops.gated_norm(torch.cat(made, dim=1), gate, None, 0.0, 1, gates_first=True)


class Zamba(Zamba2):
    name = "zamba"
    huggingface_names = ("ZambaForCausalLM", "zamba")

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        given = fields.with_usual_for_nulls(
            rms_norm_eps=1e-5, tie_word_embeddings=True, max_position_embeddings=4096
        )
        head_dim = fields.integer("attention_head_dim", 2 * hidden // heads)
        common = common_huggingface_config(given.changed(head_dim=head_dim, hidden_act="silu"), cls.name)
        if fields.integer("attention_hidden_size", 2 * hidden) != 2 * hidden:
            raise ModelLoadError(f"{fields.where} has an attention_hidden_size other than 2 × {hidden}.")
        layers, num_heads = frozenset(range(common.num_layers)), fields.integer("n_mamba_heads", 2)
        activation = fields.raw("hidden_mamba_act")
        mamba = mamba1_config(given.changed(hidden_act=activation), layers, prefix="mamba_")
        if mamba.num_channels % num_heads:
            raise ModelLoadError(
                f"{fields.where} has {mamba.num_channels} channels for {num_heads} heads of Mamba."
            )
        return extended(
            common,
            Zamba2Config,
            attention_scale=(common.head_dim / 2) ** -0.5,
            unrotated_layers=layers,
            plain_activation=fields.plain_activation("hidden_act", "gelu"),
            recurrent=dataclasses.replace(mamba, num_heads=num_heads),
            hybrid_layers=_hybrid_layers(fields, common.num_layers),
            num_blocks=1,
            adapter_rank=0,
            adapts_attention=False,
        )

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        """Return the rows of input and gate, which take turns."""
        total = 2 * mamba1_settings(config).num_channels
        cut = {
            f"{mamba}.{part}_proj": StoredRows(f"{mamba}.in_proj", total, torch.arange(first, total, 2))
            for mamba in ("mamba", f"{BEHIND}.mamba")
            for first, part in enumerate(("input", "gate"))
        }
        return Layout(names=NAMES, cut=cut)

    def load_named_mixer(self, load: LayerLoader, name: str) -> HeadedMamba1:
        """Load a rank's heads of Mamba 1."""
        settings, weights = mamba1_settings(load.config), load.weights
        prefix, channels, count = f"{load.prefix}.{name}", settings.num_channels, settings.num_heads
        heads = weights.shard.own(count, "heads of Mamba")
        own = scaled(heads, channels // count)
        return HeadedMamba1(
            into=load_input(load, prefix, own),
            conv=load_conv(load, f"{prefix}.conv1d", channels, [own]),
            heads=[_load_head(load, prefix, head, own.start) for head in heads],
            sizes=(settings.step_rank, settings.state_size, settings.state_size),
            output=load_output(load, prefix, own),
        )


def _load_head(load: LayerLoader, prefix: str, head: int, first_channel: int) -> ChannelHead:
    """Load one head. The matrices of all heads are stored one below the other."""
    settings, weights = mamba1_settings(load.config), load.weights
    channels, count, rank = settings.num_channels, settings.num_heads, settings.step_rank
    width, selected = channels // count, rank + 2 * settings.state_size
    own = scaled(range(head, head + 1), width)

    def by_channel(part: str) -> Tensor:
        return weights.table(f"{prefix}.{part}", count, width)[head]

    return ChannelHead(
        channels=slice(own.start - first_channel, own.stop - first_channel),
        selection=weights.linear(
            [f"{prefix}.x_proj"],
            [count * selected],
            width,
            part=LinearPart(rows=[scaled(range(head, head + 1), selected)]),
        ),
        step=weights.linear([f"{prefix}.dt_proj"], [channels], rank, part=LinearPart(rows=[own])),
        scan=ChannelScanLayer(
            decay=-taken(weights.table(f"{prefix}.A_log", channels, settings.state_size), [own]).exp(),
            skip=by_channel("D"),
            step_bias=by_channel("dt_proj.bias"),
        ),
    )


def _hybrid_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Return the layers with the block: as listed, or the third and then one of each period."""
    if fields.has("layers_block_type"):
        return hybrid_layers(fields, num_layers)
    period, offset = fields.integer("attn_layer_period", 6), fields.integer("attn_layer_offset", 4)
    return (2, *(index for index in range(3, num_layers) if (index - 3) % period == offset))
