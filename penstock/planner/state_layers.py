"""Layers that keep a state of fixed size for each sequence instead of KV: Mamba, gated delta nets, convolutions.

Hybrids mix them with attention. Which layer is of which kind stands in a `config.json` in one of several ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.core.errors import UsageError

_ATTENTION = frozenset({"full_attention", "attention", "sliding_attention", "chunked_attention", "*"})
_STATE = frozenset({"linear_attention", "mamba", "mamba2", "conv", "M"})
_PLAIN = frozenset({"mlp", "-"})  # layers that are an MLP and nothing else
_STATE_BYTES = 4  # of one number: states are added to for thousands of steps
_CONVOLUTION_BYTES = 2


class Sizes(Protocol):
    """Reads sizes from a config.json."""

    name: str
    values: Mapping[str, Any]

    def size(self, *keys: str, default: int | None = None) -> int: ...


@dataclass(frozen=True, slots=True)
class LayerCounts:
    attention: int
    state: int
    mlp: int


@dataclass(frozen=True, slots=True)
class StateLayers:
    num_layers: int
    parameters: int  # of one layer
    state_bytes: int  # of one sequence in one layer


def layer_counts(reader: Sizes, num_layers: int) -> LayerCounts:
    values = reader.values
    kind = values.get("model_type")
    if kind == "falcon_h1":  # every layer has both
        return LayerCounts(num_layers, num_layers, num_layers)
    if kind in ("mamba", "falcon_mamba", "mamba2"):
        return LayerCounts(0, num_layers, 0)
    if kind == "jamba":
        period, offset = (
            reader.size("attn_layer_period", default=8),
            reader.size("attn_layer_offset", default=4),
        )
        attention = sum(index % max(1, period) == offset for index in range(num_layers))
        return LayerCounts(attention, num_layers - attention, num_layers)
    if isinstance(values.get("attn_layer_indices"), list):
        attention = len(values["attn_layer_indices"])
        return LayerCounts(attention, num_layers - attention, num_layers)
    kinds = (
        values.get("layer_types")
        or values.get("layers_block_type")
        or values.get("hybrid_override_pattern")
        or ()
    )
    if not kinds and values.get("full_attention_interval"):
        attention = num_layers // reader.size("full_attention_interval")
        return LayerCounts(attention, num_layers - attention, num_layers)
    if not kinds:
        return LayerCounts(num_layers, 0, num_layers)
    for each in kinds:
        if each not in _ATTENTION | _STATE | _PLAIN:
            raise UsageError(
                f"{reader.name} has layers of the kind {each!r:.40}, which the planner does not know.",
                hint=f"Known are {', '.join(sorted(_ATTENTION | _STATE | _PLAIN))}.",
            )
    plain = sum(each in _PLAIN for each in kinds)
    return LayerCounts(
        attention=sum(each in _ATTENTION for each in kinds),
        state=sum(each in _STATE for each in kinds),
        mlp=plain if kind == "nemotron_h" or plain else num_layers,
    )


def state_layers(reader: Sizes, counts: LayerCounts, hidden: int) -> StateLayers | None:
    if not counts.state:
        return None
    if "conv_L_cache" in reader.values:  # a gated convolution over the last tokens
        kept = (reader.size("conv_L_cache") - 1) * hidden
        return StateLayers(counts.state, 4 * hidden * hidden, kept * _CONVOLUTION_BYTES)
    if "linear_num_value_heads" in reader.values:  # a gated delta net
        keys = reader.size("linear_num_key_heads") * reader.size("linear_key_head_dim")
        num_values = reader.size("linear_num_value_heads")
        values = num_values * reader.size("linear_value_head_dim")
        kept = (reader.size("linear_conv_kernel_dim", default=4) - 1) * (2 * keys + values)
        state = values * reader.size("linear_key_head_dim")
        parameters = hidden * (2 * keys + 2 * values + 2 * num_values) + values * hidden
        return StateLayers(counts.state, parameters, state * _STATE_BYTES + kept * _CONVOLUTION_BYTES)
    if reader.values.get("model_type") in ("mamba", "falcon_mamba", "jamba"):
        return _mamba1_layers(reader, counts, hidden)
    heads = reader.size("mamba_n_heads", "mamba_num_heads", "num_heads")
    inner = heads * reader.size("mamba_d_head", "mamba_head_dim", "head_dim")
    groups = reader.size("mamba_n_groups", "n_groups", default=1)
    size = reader.size("mamba_d_state", "ssm_state_size", "state_size")
    convolved = inner + 2 * groups * size
    kept = (reader.size("mamba_d_conv", "conv_kernel", default=4) - 1) * convolved
    parameters = hidden * (inner + convolved + heads) + inner * hidden
    return StateLayers(counts.state, parameters, inner * size * _STATE_BYTES + kept * _CONVOLUTION_BYTES)


def _mamba1_layers(reader: Sizes, counts: LayerCounts, hidden: int) -> StateLayers:
    inner = hidden * reader.size("expand", "mamba_expand", default=2)
    if reader.values["model_type"] != "jamba":
        inner = reader.size("intermediate_size", default=inner)
    size = reader.size("state_size", "mamba_d_state", default=16)
    ranks = [reader.values.get(key) for key in ("time_step_rank", "mamba_dt_rank")]
    rank = next((each for each in ranks if isinstance(each, int)), -(-hidden // 16))
    kept = (reader.size("conv_kernel", "mamba_d_conv", default=4) - 1) * inner
    parameters = inner * (3 * hidden + 2 * (rank + size) + size)
    return StateLayers(counts.state, parameters, inner * size * _STATE_BYTES + kept * _CONVOLUTION_BYTES)
