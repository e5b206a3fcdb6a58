"""The settings that all architectures spell alike in a Hugging Face `config.json`. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ModelLoadError
from penstock.models.config import ArchitectureConfig, Fields, RopeConfig, RopeScaling


def common_config(fields: Fields, architecture: str) -> ArchitectureConfig:
    """What most decoders have in common. An architecture replaces what it does differently."""
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    max_positions = fields.integer("max_position_embeddings", 2048)
    rope = rope_config(rope_parameters(fields), fields, max_positions)
    bos_token_ids = fields.token_ids("bos_token_id")
    return ArchitectureConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        max_positions=stretched_positions(rope, max_positions),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        windows=(None,) * num_layers,
        attention_scale=head_dim**-0.5,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        activation=fields.activation("hidden_act", "silu"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        checkpoint_dtype=fields.raw("dtype") or fields.raw("torch_dtype"),
    )


def layer_windows(fields: Fields, num_layers: int, window: int | None) -> tuple[int | None, ...] | None:
    """Windows by `layer_types`, or None when the file does not list them."""
    kinds = fields.raw("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelLoadError(f"{fields.where} lists layer_types that do not match its {num_layers} layers.")
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelLoadError(f"{fields.where} has a layer of unknown kind {sorted(map(str, unknown))[0]!r}.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def qwen_windows(fields: Fields, config: ArchitectureConfig) -> ArchitectureConfig:
    """Qwen's rule: windows only when `use_sliding_window` is set, and not in the first `max_window_layers`."""
    if not fields.flag("use_sliding_window", False) or not fields.has("sliding_window"):
        return config
    window = fields.integer("sliding_window")
    windows = layer_windows(fields, config.num_layers, window)
    if windows is None:
        first = fields.integer("max_window_layers", 28)
        windows = tuple(window if index >= first else None for index in range(config.num_layers))
    return dataclasses.replace(config, windows=windows)


def rope_parameters(fields: Fields) -> Mapping[str, Any]:
    """The rope settings as one mapping: `rope_parameters`, or the older `rope_scaling` beside `rope_theta`."""
    for key in ("rope_parameters", "rope_scaling"):
        value = fields.raw(key)
        if isinstance(value, dict):
            return value
        if value is not None:
            raise ModelLoadError(f"{fields.where} has {key} that is not an object.")
    return {}


def rope_config(
    parameters: Mapping[str, Any], fields: Fields, max_positions: int, *, default_theta: float = 10000.0
) -> RopeConfig:
    rope = Fields(parameters, f"The rope settings of {fields.where}")
    theta = rope.number("rope_theta", fields.number("rope_theta", default_theta))
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelLoadError(
            f"{fields.where} rotates only part of each head, which no known architecture does."
        )
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, RopeScaling(kind="linear", factor=rope.number("factor")))
    original = rope.integer("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        scaling = RopeScaling(
            kind="llama3",
            factor=rope.number("factor"),
            original_max_positions=original,
            low_frequency_factor=rope.number("low_freq_factor"),
            high_frequency_factor=rope.number("high_freq_factor"),
        )
        return RopeConfig(theta, scaling)
    if kind == "yarn":
        if rope.has("mscale") or rope.has("mscale_all_dim"):
            raise ModelLoadError(
                f"{fields.where} scales yarn rope by mscale, which no known architecture does."
            )
        scaling = RopeScaling(
            kind="yarn",
            factor=rope.number("factor", max_positions / original),
            original_max_positions=original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=rope.optional_number("attention_factor"),
            truncate=rope.flag("truncate", True),
        )
        return RopeConfig(theta, scaling)
    raise ModelLoadError(
        f"{fields.where} asks for rope scaling of kind {kind!r}; known are default, linear, llama3 and yarn."
    )


def stretched_positions(rope: RopeConfig, max_positions: int) -> int:
    """Yarn checkpoints may state the length before stretching."""
    scaling = rope.scaling
    if scaling is None or scaling.kind != "yarn" or scaling.original_max_positions is None:
        return max_positions
    return max(max_positions, int(scaling.original_max_positions * scaling.factor))
