"""Sizes of Gemma 4, whose layers differ: wider heads with global attention, layers that use the KV of earlier ones,
and inputs of their own for each layer. Planning takes the averages over all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.planner.state_layers import Sizes, layer_kinds


@dataclass(frozen=True, slots=True)
class LayerAverages:
    attention_parameters: int
    kv_numbers: int
    head_size: int
    mlp_factor: float  # of the MLP's parameters, because some MLPs are wider
    lookup_parameters: int  # of tables that are looked up, of all layers together


def layer_averages(reader: Sizes, num_layers: int, hidden: int, heads: int) -> LayerAverages | None:
    """None for a model of another family."""
    values = reader.values
    if not str(values.get("model_type", "")).startswith("gemma4") or not num_layers:
        return None
    kinds, own = layer_kinds(values), values.get("per_layer_config")
    own = own if isinstance(own, Mapping) else {}
    num_shared = reader.size("num_kv_shared_layers", default=0)
    parameters = numbers = widths = 0
    for index in range(num_layers):
        width, kv_heads = reader.size("head_dim"), reader.size("num_key_value_heads", default=heads)
        if index < len(kinds) and kinds[index] == "full_attention":
            width = reader.size("global_head_dim", default=width)
            kv_heads = reader.size("num_global_key_value_heads", default=kv_heads)
        special = own.get(str(index))
        if isinstance(special, Mapping) and isinstance(special.get("head_dim"), int):
            width = special["head_dim"]
        kept = 0 if index >= num_layers - num_shared else 2 * kv_heads * width
        parameters += hidden * (2 * heads * width + kept)
        numbers += kept
        widths += width
    inputs = reader.size("hidden_size_per_layer_input", default=0)
    tables = reader.size("vocab_size_per_layer_input", "vocab_size") * num_layers * inputs
    wider = num_shared if values.get("use_double_wide_mlp") else 0
    return LayerAverages(
        attention_parameters=parameters // num_layers + 3 * hidden * inputs,
        kv_numbers=numbers // num_layers,
        head_size=widths // num_layers,
        mlp_factor=1 + wider / num_layers,
        lookup_parameters=tables,
    )
