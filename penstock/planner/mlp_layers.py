"""Reads the sizes of MLPs and experts from a `config.json`. Families write them in several ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.errors import UsageError
from penstock.planner.state_layers import LayerCounts, Sizes

# Families whose MLPs have two matrices instead of three: no gate.
_TWO_MATRICES = frozenset(
    {
        *(
            "apertus",
            "arcee",
            "bloom",
            "codegen",
            "falcon",
            "gpt2",
            "gpt_bigcode",
            "gpt_neo",
            "gpt_neox",
            "gptj",
        ),
        *("mpt", "nemotron", "nemotron_h", "opt", "persimmon", "phi", "starcoder2"),
    }
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_k")


@dataclass(frozen=True, slots=True)
class MLPSizes:
    mlp_parameters: int  # of one layer without experts
    num_dense_layers: int
    expert_parameters: int  # of one expert
    shared_parameters: int  # of the experts for every token, in one layer
    num_experts: int
    experts_per_token: int


def mlp_sizes(reader: Sizes, counts: LayerCounts, num_layers: int, hidden: int) -> MLPSizes:
    values, kind = reader.values, reader.values.get("model_type")
    count = reader.size(*_EXPERTS, default=0)
    shared = reader.size(
        *("shared_expert_intermediate_size", "shared_intermediate_size"),
        *("moe_shared_expert_intermediate_size",),
        default=0,
    )
    intermediate = _intermediate(reader, hidden)
    if shared and not count:  # a model of a family with experts that has none
        intermediate, shared = shared, 0
    expert = reader.size("moe_intermediate_size", default=intermediate)
    num_shared = reader.size("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0)
    shared = shared or (num_shared or kind == "llama4_text") * expert
    dense = _num_dense(reader, counts, num_layers) if count else counts.mlp
    if kind == "llama4_text":
        intermediate = reader.size("intermediate_size_mlp", default=intermediate)
    if kind == "nemotron_h" and dense == counts.mlp:
        count = shared = 0  # the settings name experts that no layer has
    matrices = 2 if kind in _TWO_MATRICES or values.get("mlp_hidden_act") == "relu2" else 3
    per_token = reader.size(*_PER_TOKEN, default=1) if count else 0
    if per_token > count:
        raise UsageError(f"The settings of {reader.name} choose {per_token} of {count} experts.")
    latent = reader.size("moe_latent_size", default=hidden)  # experts may work in a smaller space
    return MLPSizes(
        mlp_parameters=matrices * hidden * intermediate,
        num_dense_layers=dense,
        expert_parameters=matrices * latent * expert if count else 0,
        shared_parameters=matrices * hidden * shared + (2 * hidden * latent if latent != hidden else 0),
        num_experts=count,
        experts_per_token=per_token,
    )


def _intermediate(reader: Sizes, hidden: int) -> int:
    values, kind = reader.values, reader.values.get("model_type")
    if kind == "falcon":
        return reader.size("ffn_hidden_size", default=4 * hidden)
    if kind == "mpt":
        return reader.size("expansion_ratio", default=4) * hidden
    size = reader.size("intermediate_size", "block_ff_dim", "n_inner", default=4 * hidden)
    if "conv_L_cache" in values and values.get("block_auto_adjust_ff_dim", kind == "lfm2"):
        multiple = max(1, reader.size("block_multiple_of", default=256))
        size = -(-(2 * size // 3) // multiple) * multiple
    return size // 2 if kind == "recurrent_gemma" else size  # which counts gate and input


def _num_dense(reader: Sizes, counts: LayerCounts, num_layers: int) -> int:
    """Return the number of layers whose MLP has no experts, in a model with experts."""
    values = reader.values
    if counts.experts is not None:
        return counts.mlp - counts.experts
    kinds, listed = values.get("mlp_layer_types"), values.get("moe_layers")
    if _is_list(kinds, num_layers):
        return sum(each == "dense" for each in kinds)  # type: ignore[union-attr]
    if isinstance(listed, list):
        return max(0, counts.mlp - len(listed))
    if values.get("interleave_moe_layer_step"):
        return counts.mlp - num_layers // reader.size("interleave_moe_layer_step")
    if "moe_layer_start_index" in values or "moe_layer_interval" in values:
        first, step = (
            reader.size("moe_layer_start_index", default=0),
            reader.size("moe_layer_interval", default=1),
        )
        last = values.get("moe_layer_end_index", -1)
        last = last if isinstance(last, int) and 0 <= last < num_layers else num_layers - 1
        places = range(first, last + 1)
        return counts.mlp - sum((index + 1) % max(1, step) == 0 for index in places)
    period = reader.size("expert_layer_period", default=0)  # every so many layers, one has experts
    if period:
        offset = reader.size("expert_layer_offset", default=1)
        return counts.mlp - sum(index % period == offset for index in range(counts.mlp))
    return min(counts.mlp, reader.size("first_k_dense_replace", "num_dense_layers", default=0))


def _is_list(value: object, length: int) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == length
