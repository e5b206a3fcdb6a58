"""Reads the sizes of layers that keep a state of fixed size for each sequence instead of KV: Mamba, gated delta nets,
convolutions.

Hybrid models also have attention layers. A `config.json` lists the kinds of layers in one of several ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.core.errors import UsageError

_ATTENTION = frozenset(
    {"full_attention", "attention", "sliding_attention", "chunked_attention", "indexed_attention", "*"}
)
_STATE = frozenset({"linear_attention", "mamba", "mamba2", "conv", "M"})
_PLAIN = frozenset({"mlp", "-"})  # layers that are an MLP and nothing else
_EXPERTS = frozenset({"moe", "E"})  # layers that are experts and nothing else
_KNOWN = _ATTENTION | _STATE | _PLAIN | _EXPERTS
# The bytes of one number. States are float32, because thousands of steps add to them. The engine keeps the inputs of
# convolutions in the same type.
_STATE_BYTES = 4


class Sizes(Protocol):
    """Reads sizes from a config.json."""

    name: str
    values: Mapping[str, Any]

    def size(self, *keys: str, default: int | None = None) -> int: ...


@dataclass(frozen=True, slots=True)
class LayerCounts:
    attention: int
    state: int
    mlp: int  # with and without experts
    experts: int | None = None  # MLPs with experts, if the kinds of layers say which


@dataclass(frozen=True, slots=True)
class StateLayers:
    num_layers: int
    parameters: int  # of one layer
    state_bytes: int  # of one sequence in one layer


def layer_kinds(values: Mapping[str, Any]) -> Sequence[Any]:
    """Return the kind of each layer, where the settings tell: words, or letters of one text."""
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        kinds = values.get(key)
        if kinds and isinstance(kinds, list | str):
            return kinds
    return ()


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
    if kind == "recurrent_gemma":
        pattern = values.get("block_types")
        if not isinstance(pattern, list) or not pattern:
            pattern = ["recurrent", "recurrent", "attention"]
        attention = sum(pattern[index % len(pattern)] == "attention" for index in range(num_layers))
        return LayerCounts(attention, num_layers - attention, num_layers)
    if isinstance(values.get("attn_layer_indices"), list):
        attention = len(values["attn_layer_indices"])
        return LayerCounts(attention, num_layers - attention, num_layers)
    kinds = layer_kinds(values)
    if kind in ("zamba", "zamba2"):  # every layer has a state, and some have a block of attention and MLP
        hybrids = sum(each == "hybrid" for each in kinds)
        return LayerCounts(hybrids, num_layers, 0)
    if not kinds and values.get("full_attention_interval"):
        attention = num_layers // reader.size("full_attention_interval")
        return LayerCounts(attention, num_layers - attention, num_layers)
    if not kinds and kind == "minimax":
        return LayerCounts(num_layers - num_layers // 2, num_layers // 2, num_layers)
    if not kinds:
        return LayerCounts(num_layers, 0, num_layers)
    for each in kinds:
        if not isinstance(each, str) or each not in _KNOWN:
            raise UsageError(
                f"{reader.name} has layers of the kind {each!r:.40}, which the planner does not know.",
                hint=f"Known are {', '.join(sorted(_KNOWN))}.",
            )
    if len(kinds) != num_layers:
        raise UsageError(
            f"The settings of {reader.name} list the kinds of {len(kinds)} layers, and it has {num_layers}."
        )
    plain, experts = sum(each in _PLAIN for each in kinds), sum(each in _EXPERTS for each in kinds)
    has_own = kind == "nemotron_h" or plain or experts
    return LayerCounts(
        attention=sum(each in _ATTENTION for each in kinds),
        state=sum(each in _STATE for each in kinds),
        mlp=plain + experts if has_own else num_layers,
        experts=experts if has_own else None,
    )


def state_layers(reader: Sizes, counts: LayerCounts, hidden: int) -> StateLayers | None:
    if not counts.state:
        return None
    if "conv_L_cache" in reader.values:  # a gated convolution over the last tokens
        kept = (reader.size("conv_L_cache") - 1) * hidden
        return StateLayers(counts.state, 4 * hidden * hidden, kept * _STATE_BYTES)
    if "linear_num_value_heads" in reader.values:  # a gated delta net
        keys = reader.size("linear_num_key_heads") * reader.size("linear_key_head_dim")
        num_values = reader.size("linear_num_value_heads")
        values = num_values * reader.size("linear_value_head_dim")
        kept = (reader.size("linear_conv_kernel_dim", default=4) - 1) * (2 * keys + values)
        state = values * reader.size("linear_key_head_dim")
        parameters = hidden * (2 * keys + 2 * values + 2 * num_values) + values * hidden
        return StateLayers(counts.state, parameters, (state + kept) * _STATE_BYTES)
    if "linear_num_heads" in reader.values:  # a delta net with a gate for each channel
        heads, width = reader.size("linear_num_heads"), reader.size("linear_head_dim")
        inner = heads * width
        kept = (reader.size("linear_conv_kernel_dim", default=4) - 1) * 3 * inner
        parameters = 4 * hidden * inner + 2 * width * (hidden + inner) + hidden * heads
        return StateLayers(counts.state, parameters, (inner * width + kept) * _STATE_BYTES)
    if reader.values.get("model_type") == "recurrent_gemma":  # a number for each channel
        inner, heads = reader.size("lru_width", default=hidden), reader.size("num_attention_heads")
        width = reader.size("conv1d_width", default=4)
        vectors = 6  # biases, and the speeds of channels
        parameters = inner * (3 * hidden + 2 * inner // heads + width + vectors)
        return StateLayers(counts.state, parameters, width * inner * _STATE_BYTES)
    if reader.values.get("model_type") == "minimax":  # lightning attention, with a gate
        heads = reader.size("num_attention_heads")
        width = reader.size("head_dim", default=hidden // max(1, heads))
        return StateLayers(counts.state, 5 * hidden * heads * width, heads * width * width * _STATE_BYTES)
    if reader.values.get("model_type") in ("mamba", "falcon_mamba", "jamba", "zamba"):
        return _mamba1_layers(reader, counts, hidden)
    heads = reader.size("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    if reader.values.get("model_type") == "zamba2":
        inner = hidden * reader.size("mamba_expand", default=2)
    else:
        inner = heads * reader.size("mamba_d_head", "mamba_head_dim", "head_dim")
    groups = reader.size("mamba_n_groups", "mamba_ngroups", "n_groups", default=1)
    size = reader.size("mamba_d_state", "ssm_state_size", "state_size")
    convolved = inner + 2 * groups * size
    width = reader.size("mamba_d_conv", "conv_kernel", default=4)
    kept = (width - 1) * convolved
    parameters = hidden * (inner + convolved + heads) + inner * hidden + width * convolved
    return StateLayers(counts.state, parameters, (inner * size + kept) * _STATE_BYTES)


def _mamba1_layers(reader: Sizes, counts: LayerCounts, hidden: int) -> StateLayers:
    inner = hidden * reader.size("expand", "mamba_expand", default=2)
    if reader.values["model_type"] not in ("jamba", "zamba"):
        inner = reader.size("intermediate_size", default=inner)
    size = reader.size("state_size", "mamba_d_state", default=16)
    ranks = [reader.values.get(key) for key in ("time_step_rank", "mamba_dt_rank")]
    rank = next((each for each in ranks if isinstance(each, int)), -(-hidden // 16))
    width = reader.size("conv_kernel", "mamba_d_conv", default=4)
    kept = (width - 1) * inner
    parameters = inner * (3 * hidden + 2 * (rank + size) + size + width)
    return StateLayers(counts.state, parameters, (inner * size + kept) * _STATE_BYTES)
