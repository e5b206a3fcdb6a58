"""Reads the settings that most decoders share from GGUF metadata. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from penstock.core.errors import ModelLoadError
from penstock.models.config import (
    ArchitectureConfig,
    ExpertsConfig,
    Fields,
    RopeConfig,
    RopeScaling,
    axes_of_pairs,
)
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import windows_by_pattern


def metadata_fields(file: GGUFFile) -> Fields:
    """Return the metadata below the file's architecture: `attention.head_count` reads
    `llama.attention.head_count`."""
    return Fields(file.metadata, file.path.name, prefix=f"{file.architecture}.")


_OF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_SIZES_OF_LAYERS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
_ANY_LENGTH = 1 << 20
_LIMITED_POSITIONS = 1 << 17
SIGMOID = 2
_SOFTMAX_OF_CHOSEN = 3
_GATING: dict[int, Literal["softmax", "sigmoid"]] = {
    1: "softmax",
    SIGMOID: "sigmoid",
    _SOFTMAX_OF_CHOSEN: "softmax",
}


def has_experts(file: GGUFFile) -> bool:
    return bool(metadata_fields(file).raw("expert_count"))


def gguf_experts(
    file: GGUFFile, config: ArchitectureConfig, *, normalizes: bool, usual_gating: int = 1
) -> ExpertsConfig:
    """Read the settings of a mixture. `normalizes` and `usual_gating` are what the architecture does where the file
    does not say."""
    fields = metadata_fields(file)
    inner = fields.integer("expert_feed_forward_length", config.intermediate_size)
    shared = _shared_expert_size(file)
    gating = fields.integer("expert_gating_func", usual_gating)
    if gating not in _GATING:
        raise ModelLoadError(f"{file.path.name} chooses experts in a way that is not known ({gating}).")
    first = fields.raw("leading_dense_block_count") or 0
    return ExpertsConfig(
        count=fields.integer("expert_count"),
        per_token=fields.integer("expert_used_count"),
        intermediate_size=inner,
        normalizes=fields.flag("expert_weights_norm", normalizes) or gating == _SOFTMAX_OF_CHOSEN,
        dense_layers=frozenset(
            index
            for index in range(config.num_layers)
            if index < first or f"blk.{index}.ffn_gate_inp.weight" not in file.tensors
        ),
        shared_intermediate_size=shared or None,
        scoring=_GATING[gating],
        num_groups=fields.integer("expert_group_count", 1),
        kept_groups=fields.integer("expert_group_used_count", 1),
        groups_ranked_by=2 if gating == SIGMOID else 1,
        weight_scale=fields.number("expert_weights_scale", 1.0),
    )


def _shared_expert_size(file: GGUFFile) -> int | None:
    """Return the inner size of the expert for every token. Converters of some families write another number."""
    gates = (tensor for name, tensor in file.tensors.items() if name.endswith(".ffn_up_shexp.weight"))
    gate = next(gates, None)
    return None if gate is None else gate.shape[0]


def common_gguf_config(
    file: GGUFFile, architecture: str, changes: Mapping[str, Any] | None = None
) -> ArchitectureConfig:
    """Read the settings that most decoders have. `changes` replaces values of the metadata."""
    values = {**file.metadata, **(changes or {})}
    fields = Fields(
        {**values, **_one_for_all_layers(file, values)}, file.path.name, prefix=f"{file.architecture}."
    )
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    extra = "nextn_predict_layers"
    num_mtp_layers = fields.integer(extra) if fields.raw(extra) else 0
    num_layers = fields.integer("block_count") - num_mtp_layers  # which files count, too
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise ModelLoadError(f"{file.path.name} has keys and values of different sizes.")
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise ModelLoadError(
            f"{file.path.name} rotates {rotary_dim} of the {head_dim} numbers of a head, "
            "which cannot be done in pairs."
        )
    tokenizer = Fields(file.metadata, file.path.name, prefix="tokenizer.ggml.")
    bos_token_ids = tokenizer.token_ids("bos_token_id")
    return ArchitectureConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(fields),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=_vocab_size(file, hidden_size),
        max_positions=fields.integer("context_length"),
        norm_eps=fields.number(
            "attention.layer_norm_rms_epsilon",
            fields.optional_number("attention.layer_norm_epsilon"),
        ),
        rope=_rope(fields, None if rotary_dim == head_dim else rotary_dim),
        windows=(None,) * num_layers,
        attention_scale=head_dim**-0.5,
        qkv_bias=has_tensor(file, "attn_q.bias") or has_tensor(file, "attn_qkv.bias"),
        output_bias=has_tensor(file, "attn_output.bias"),
        mlp_bias=has_tensor(file, "ffn_down.bias"),
        num_mtp_layers=num_mtp_layers,
        tie_embeddings="output.weight" not in file.tensors,
        eos_token_ids=tokenizer.token_ids("eos_token_id"),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
    )


def hybrid_gguf_config(file: GGUFFile, architecture: str, *, has_rope: bool = True) -> ArchitectureConfig:
    """Read the settings of a decoder that lists some sizes for each layer: 0 where a layer has no such part."""
    fields, changes = metadata_fields(file), dict[str, Any]()
    for key in ("attention.head_count_kv", "feed_forward_length"):
        sizes = fields.raw(key)
        if isinstance(sizes, list) and sizes:
            changes[f"{file.architecture}.{key}"] = max(sizes)
    if has_rope:
        return common_gguf_config(file, architecture, changes)
    # A size of rotated parts means nothing then, and need not fit.
    changes[f"{file.architecture}.rope.dimension_count"] = None
    config = common_gguf_config(file, architecture, changes)
    return replace(
        config,
        max_positions=limited_positions(config.max_positions),
        unrotated_layers=frozenset(range(config.num_layers)),
    )


def limited_positions(context_length: int) -> int:
    """Return the positions of a model without rope, for which converters may write a million. Requests need a limit
    whose tables fit into memory."""
    return _LIMITED_POSITIONS if context_length == _ANY_LENGTH else context_length


def fields_without_attention(file: GGUFFile) -> Fields:
    """Return the settings of a model of state-space layers alone by the keys of `config.json`. Files have zeros for
    sizes of attention and MLP."""
    fields = metadata_fields(file)
    tokenizer = Fields(file.metadata, file.path.name, prefix="tokenizer.ggml.")
    hidden_size = fields.integer("embedding_length")
    values = {
        "hidden_size": hidden_size,
        "num_hidden_layers": fields.integer("block_count"),
        "vocab_size": _vocab_size(file, hidden_size),
        "layer_norm_epsilon": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": tokenizer.raw("eos_token_id"),
        "bos_token_id": tokenizer.raw("bos_token_id"),
    }
    return Fields(values, file.path.name)


def layers_with(file: GGUFFile, tensor: str) -> frozenset[int]:
    """Return the layers that have a tensor of this name."""
    return frozenset(
        int(match[1]) for name in file.tensors if (match := _OF_LAYER.fullmatch(name)) and match[2] == tensor
    )


def has_tensor(file: GGUFFile, tensor: str) -> bool:
    """Return whether any layer has a tensor of this name."""
    return bool(layers_with(file, tensor))


def layers_without_heads(file: GGUFFile, num_layers: int) -> frozenset[int]:
    """Return the layers of a hybrid that have no attention: their count of key-value heads is 0."""
    counts = metadata_fields(file).raw("attention.head_count_kv")
    if not isinstance(counts, list) or len(counts) < num_layers:
        raise ModelLoadError(f"{file.path.name} does not list the key-value heads of each layer.")
    return frozenset(index for index in range(num_layers) if counts[index] == 0)


def gguf_windows(fields: Fields, num_layers: int, default_period: int) -> tuple[int | None, ...]:
    """Read the windows. The pattern is a period, or one flag for each layer; most files leave it out."""
    window = fields.integer("attention.sliding_window")
    flags = fields.raw("attention.sliding_window_pattern")
    if isinstance(flags, list) and len(flags) == num_layers:
        return tuple(window if flag else None for flag in flags)
    period = fields.integer("attention.sliding_window_pattern", default_period)
    return windows_by_pattern(window, period, num_layers)


def _one_for_all_layers(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that a file lists for each layer, as one size."""
    found = {}
    for key in _SIZES_OF_LAYERS:
        sizes = values.get(f"{file.architecture}.{key}")
        if not isinstance(sizes, list) or not sizes:
            continue
        if any(size != sizes[0] for size in sizes):
            raise ModelLoadError(
                f"{file.path.name} has layers that differ in {file.architecture}.{key}, which is not known of this "
                "architecture.",
                hint="Give the folder of the original checkpoint, with --model-implementation transformers.",
            )
        found[f"{file.architecture}.{key}"] = sizes[0]
    return found


def _intermediate_size(fields: Fields) -> int:
    """Read the inner size of MLPs. Mixtures may state the size of experts only."""
    return fields.integer("feed_forward_length", fields.raw("expert_feed_forward_length"))


def _vocab_size(file: GGUFFile, hidden_size: int) -> int:
    """Return the rows of the embedding table: the metadata may lack the size, or count without padding rows."""
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise ModelLoadError(f"{file.path.name} has no tensor token_embd.weight.")
    if len(table.shape) != 2 or table.shape[1] != hidden_size:
        raise ModelLoadError(
            f"{file.path.name} has token_embd.weight of shape {list(table.shape)} "
            f"where the embedding length is {hidden_size}."
        )
    return table.shape[0]


def _rope(fields: Fields, rotary_dim: int | None) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10000.0)
    # A factor alone stretches evenly. The first files have another name for the factor.
    key = next((key for key in ("rope.scaling.factor", "rope.scale_linear") if fields.raw(key)), None)
    factor = 1.0 if key is None else fields.number(key)
    kind = fields.text("rope.scaling.type", "none" if key is None else "linear")
    scaling = None
    if kind == "linear":
        scaling = None if factor == 1.0 else RopeScaling(kind="linear", factor=factor)
    elif kind == "yarn":
        scaling = RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_positions=fields.integer(
                "rope.scaling.original_context_length", fields.integer("context_length")
            ),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=fields.optional_number("rope.scaling.yarn_attn_factor"),
        )
    elif kind == "longrope":
        scaling = longrope_of(fields)
    elif kind != "none":
        raise ModelLoadError(
            f"{fields.where} asks for rope scaling of kind {kind!r}; known are none, linear, yarn and longrope."
        )
    return RopeConfig(theta, scaling, rotary_dim)


# Architectures with positions in three dimensions, and whether the axes take turns along a head.
_THREE_AXES = {
    "glm4": False,
    "qwen2vl": False,
    "qwen3vl": True,
    "qwen3vlmoe": True,
    "qwen35": True,
    "qwen35moe": True,
}


def gguf_rope_axes(file: GGUFFile) -> list[int]:
    """Return the axis of each rotated pair of a head; nothing for positions in one dimension, which a file may have
    in spite of its architecture: it then has no sections, or none for rows."""
    sections = metadata_fields(file).raw("rope.dimension_sections")
    has_axes = isinstance(sections, list) and len(sections) > 1 and all(sections[:2])
    if file.architecture not in _THREE_AXES or not has_axes:
        return []
    return axes_of_pairs(sections[:3], interleaved=_THREE_AXES[file.architecture])


def longrope_of(fields: Fields) -> RopeScaling:
    """Return the settings of longrope, whose divisors are stored as tensors."""
    return RopeScaling(
        kind="longrope",
        factor=1.0,
        original_max_positions=fields.integer(
            "rope.scaling.original_context_length", fields.integer("context_length")
        ),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0),
    )


# Settings that no family reads, with the values that change nothing; None: any value changes numbers.
_UNREAD: Mapping[str, float | None] = {
    "activation.situ_beta": None,
    "activation_sparsity_scale": 0.0,
    "altup.num_inputs": 1.0,
    "attention.compress_ratios": None,
    "attention.output_scale": 1.0,
    "attention.relative_buckets_count": None,
    "attention.value_scale": 1.0,
    "attn_res.block_size": None,
    "expert_group_scale": 1.0,
    "hyper_connection.count": 1.0,
    "kda.gate_lower_bound": None,
    "num_loops": 1.0,
    "rescale_every_n_layers": 0.0,
    "rope.scaling.alpha": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "router_logit_softcapping": 0.0,
    "swiglu_clamp_exp": 0.0,
    "swiglu_clamp_shexp": 0.0,
    "token_shift_count": None,
}


def refuse_unread_settings(file: GGUFFile, config: ArchitectureConfig) -> None:
    """Raise ModelLoadError for the first setting that would be passed over in silence."""
    fields = metadata_fields(file)
    for key, neutral in _UNREAD.items():
        if fields.has(key) and not _is(fields.raw(key), neutral):
            raise _unread(file, key)
    experts = config.experts
    # Values that differ if the family reads the setting.
    unchanged: dict[str, tuple[bool, float]] = {
        "attention.clamp_kqv": (config.qkv_limit is None, 0.0),
        "attention.scale": (
            math.isclose(config.attention_scale, config.head_dim**-0.5),
            config.head_dim**-0.5,
        ),
        "attn_logit_softcapping": (config.attention_softcap is None, 0.0),
        "final_logit_softcapping": (config.logit_softcap is None, 0.0),
        "logit_scale": (config.logit_scale == 1.0, 1.0),
        "residual_scale": (config.residual_scale == 1.0, 1.0),
        "embedding_scale": (config.embedding_scale == 1.0, 1.0),
        "expert_weights_scale": (experts is None or experts.weight_scale == 1.0, 1.0),
    }
    for key, (is_unchanged, neutral) in unchanged.items():
        value = fields.raw(key)
        # Some converters write 0 for a scale that a model does not have.
        if value is not None and is_unchanged and not _is(value, neutral) and not _is(value, 0.0):
            raise _unread(file, key)


def _is(value: object, neutral: float | None) -> bool:
    values = value if isinstance(value, list) else [value]
    return neutral is not None and all(
        isinstance(each, int | float) and math.isclose(each, neutral, rel_tol=1e-4) for each in values
    )


def _unread(file: GGUFFile, key: str) -> ModelLoadError:
    return ModelLoadError(
        f"{file.path.name} has {file.architecture}.{key}, which changes the numbers of the model and is not known "
        "of this architecture.",
        hint="Give the folder of the original checkpoint, with --model-implementation transformers.",
    )
