"""Reads the sizes of layers from a `config.json`: MLPs and experts; layers with a state of fixed size for each
sequence in place of KV (Mamba, gated delta nets, convolutions); blocks of attention and MLP that several layers share
(Zamba); and layers that differ from each other (Gemma 4). Families write these sizes in several ways, and published
files leave out settings that equal the defaults of their family.

Hybrid models also have attention layers. A `config.json` lists the kinds of layers in one of several ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.core.errors import UsageError

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
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
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
    count = reader.size(*_EXPERT_COUNTS, default=0)
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


# Families whose output head is the embedding, unless a file says otherwise.
_TIED = frozenset(
    {
        *("bloom", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "falcon", "falcon_mamba", "gemma", "gemma2"),
        *("gemma3_text", "gemma4_text", "gemma4_unified_text", "gpt2", "gpt_bigcode", "gpt_neo", "lfm2"),
        *("lfm2_moe", "lfm3", "mamba", "mpt", "opt", "recurrent_gemma", "smollm3", "starcoder2", "zamba", "zamba2"),
        *("gemma3n_text", "minicpm3", "youtu", "zaya"),
    }
)  # fmt: skip
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "cohere2": {"sliding_window_pattern": 4},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gemma4_text": {"head_dim": 256, "sliding_window": 512},
    "gemma4_unified_text": {"head_dim": 256, "sliding_window": 1024},
    "llama4_text": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4},
}
# Models with images, whose files may leave the type of the text model out.
_TEXT_OF = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text",
}


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a text model, or of the text part of another, with the defaults of its family."""
    inner = config.get("text_config")
    values = dict(inner if isinstance(inner, Mapping) else config)
    kind = values.get("model_type") or config.get("model_type")
    kind = _TEXT_OF.get(kind, kind) if isinstance(kind, str) else ""
    given = values.get("tie_word_embeddings", values.get("tie_embedding", config.get("tie_word_embeddings")))
    is_tied = kind in _TIED if given is None else bool(given)
    return {**_SETTINGS.get(kind, {}), **values, "model_type": kind, "tie_word_embeddings": is_tied}


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


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    parameters: int  # of one layer, if all blocks are spread evenly over the layers
    reread_parameters: int  # that a step reads again, because a block has several layers
    head_dim: int


def shared_blocks(
    reader: Sizes, counts: LayerCounts, hidden: int, heads: int, kv_heads: int
) -> SharedBlocks | None:
    """Return the sizes of the blocks, or None for a model without shared ones."""
    kind = reader.values.get("model_type")
    if kind not in ("zamba", "zamba2") or not counts.attention:
        return None
    head_dim = 2 * hidden // heads  # queries read the residual beside the embedding
    inner, rank = (
        reader.size("intermediate_size", default=4 * hidden),
        reader.size("adapter_rank", default=128) if kind == "zamba2" else 0,
    )
    attention = head_dim * (2 * hidden * (heads + 2 * kv_heads) + heads * hidden)
    block = attention + 3 * hidden * inner
    own = rank * (hidden + 2 * inner) + hidden * hidden
    if reader.values.get("use_shared_attention_adapter"):
        own += 3 * rank * 4 * hidden
    num_blocks = counts.attention
    if reader.values.get("tie_word_embeddings", True):  # else transformers shares no blocks
        num_blocks = min(num_blocks, max(1, reader.size("num_mem_blocks", default=1)))
    spread = round(num_blocks * block / counts.attention)
    return SharedBlocks(own + spread, (counts.attention - num_blocks) * block, head_dim)


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
    if kind == "deepseek_v4" and not kinds:
        kinds = ("compressed_sparse_attention",) * num_layers
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
