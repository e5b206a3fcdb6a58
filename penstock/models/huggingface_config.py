"""Reads the settings that most decoders share from a Hugging Face `config.json`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Literal

from penstock.core.errors import ModelLoadError
from penstock.models.config import (
    ArchitectureConfig,
    ExpertsConfig,
    Fields,
    NotNative,
    RopeConfig,
    RopeScaling,
    yarn_amplitude,
)


def common_huggingface_config(
    fields: Fields,
    architecture: str,
    *,
    gated: bool = True,
    default_theta: float = 10000.0,
    eps_setting: str = "rms_norm_eps",
    attention_bias: bool | None = None,
    mlp_bias: bool | None = None,
) -> ArchitectureConfig:
    """Read the settings that most decoders have. An architecture replaces its differences. An MLP without a gate may
    have other activations. `attention_bias` and `mlp_bias` are what files mean that do not say; None where the
    architecture has no such setting."""
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    max_positions = fields.integer("max_position_embeddings", 2048)
    rope = rope_config(
        rope_parameters(fields), fields, max_positions, head_dim=head_dim, default_theta=default_theta
    )
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
        norm_eps=fields.number(eps_setting, 1e-6 if eps_setting == "rms_norm_eps" else 1e-5),
        rope=rope,
        windows=(None,) * num_layers,
        attention_scale=head_dim**-0.5,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        **attention_biases(fields, attention_bias),
        mlp_bias=mlp_bias is not None and fields.flag("mlp_bias", mlp_bias),
        activation=fields.activation("hidden_act", "silu") if gated else "silu",
        plain_activation="gelu" if gated else fields.plain_activation("hidden_act", "gelu"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        checkpoint_dtype=fields.raw("dtype") or fields.raw("torch_dtype"),
    )


def attention_biases(fields: Fields, usual: bool | None = False) -> dict[str, Any]:
    """Return whether all products of attention have biases. `usual` is what files mean that do not say."""
    has_bias = usual is not None and fields.flag("attention_bias", usual)
    return {"qkv_bias": has_bias, "output_bias": has_bias}


def layer_windows(fields: Fields, num_layers: int, window: int | None) -> tuple[int | None, ...] | None:
    """Return the windows by `layer_types`, or None when the file does not list them."""
    kinds = layer_kinds(fields, num_layers, {"full_attention", "sliding_attention"})
    if kinds is None:
        return None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def layer_kinds(
    fields: Fields, num_layers: int, known: Set[str], key: str = "layer_types"
) -> tuple[str, ...] | None:
    """Return the kind of each layer, or None when the file does not list them."""
    kinds = fields.raw(key)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelLoadError(f"{fields.where} lists {key} that do not match its {num_layers} layers.")
    unknown = {str(kind) for kind in kinds} - known
    if unknown:
        raise ModelLoadError(f"{fields.where} has a layer of unknown kind {sorted(unknown)[0]!r}.")
    return tuple(kinds)


def layers_of_kind(kinds: Sequence[str], *wanted: str) -> frozenset[int]:
    return frozenset(index for index, kind in enumerate(kinds) if kind in wanted)


def linear_layers(fields: Fields, num_layers: int, period: int) -> frozenset[int]:
    """Return the layers with linear attention: as `layer_types` lists them, else all but the last of each period."""
    kinds = layer_kinds(fields, num_layers, {"linear_attention", "full_attention"})
    if kinds is None:
        return frozenset(index for index in range(num_layers) if (index + 1) % period)
    return layers_of_kind(kinds, "linear_attention")


def read_windows(
    fields: Fields, num_layers: int, period: int | None, window: int | None = None
) -> tuple[int | None, ...]:
    """Return the windows of all layers: as `layer_types` lists them, else of all but the last layer of each period.
    `window` is the size that files mean that do not say. Without a period, they have no windows."""
    if period is None and not fields.has("sliding_window"):
        return (None,) * num_layers
    window = fields.integer("sliding_window", window)
    listed = layer_windows(fields, num_layers, window)
    if listed is None and period is not None:
        listed = windows_by_pattern(window, period, num_layers)
    return (window,) * num_layers if listed is None else listed


def rotated_in_windows(config: ArchitectureConfig, windows: tuple[int | None, ...]) -> ArchitectureConfig:
    """Return the settings with windows. Heads are not rotated in layers without one."""
    unrotated = frozenset(index for index, window in enumerate(windows) if window is None)
    return replace(config, windows=windows, unrotated_layers=unrotated)


def mixtral_experts(fields: Fields) -> ExpertsConfig:
    """Read a mixture by Mixtral's settings, with weights by the softmax of the chosen logits."""
    return ExpertsConfig(
        count=fields.integer("num_local_experts"),
        per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        normalizes=True,
    )


def grouped_experts(
    fields: Fields,
    num_layers: int,
    *,
    scoring: Literal["softmax", "sigmoid"] = "sigmoid",
    normalizes: bool = True,
    grouped: bool = True,
    ranked_by: int = 2,
) -> ExpertsConfig:
    """Read a mixture by the settings of DeepSeek V3, which many families have."""
    inner, shared = fields.integer("moe_intermediate_size"), fields.raw("n_shared_experts")
    kinds = layer_kinds(fields, num_layers, {"dense", "sparse"}, "mlp_layer_types")
    if kinds is None:
        first, period = fields.raw("first_k_dense_replace") or 0, fields.integer("moe_layer_freq", 1)
        dense = frozenset(index for index in range(num_layers) if index < first or index % period)
    else:
        dense = layers_of_kind(kinds, "dense")
    return ExpertsConfig(
        count=fields.integer("n_routed_experts"),
        per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=inner,
        normalizes=fields.switch("norm_topk_prob", normalizes),
        dense_layers=dense,
        shared_intermediate_size=inner * fields.integer("n_shared_experts") if shared else None,
        scoring=scoring,
        num_groups=fields.integer("n_group", 1) if grouped else 1,
        kept_groups=fields.integer("topk_group", 1) if grouped else 1,
        groups_ranked_by=ranked_by,
        weight_scale=fields.number("routed_scaling_factor", 1.0),
    )


def windows_by_pattern(window: int, period: int, num_layers: int) -> tuple[int | None, ...]:
    """Return windows for all layers but the last of each period, which sees the whole context."""
    return tuple(window if (index + 1) % period else None for index in range(num_layers))


def ropes_by_layer_kind(
    fields: Fields, whole_theta: float, local_theta: float
) -> tuple[RopeConfig, RopeConfig, Fields]:
    """Return the ropes of layers with full attention and of layers with a window, and the settings without
    rope. Scaling in the older style belongs to layers with full attention."""
    parameters = rope_parameters(fields)
    max_positions = fields.integer("max_position_embeddings", 2048)
    head_dim = fields.integer(
        "head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads")
    )
    whole, local = parameters, {"rope_theta": fields.number("rope_local_base_freq", local_theta)}
    if "full_attention" in parameters or "sliding_attention" in parameters:
        # Transformers looks for `truncate` beside the kinds of layers, not within them.
        common = {"truncate": parameters.get("truncate", True)}
        whole, local = (
            {**(parameters.get(kind) or {}), **common} for kind in ("full_attention", "sliding_attention")
        )
    rope = rope_config(whole, fields, max_positions, head_dim=head_dim, default_theta=whole_theta)
    local_rope = rope_config(local, fields, max_positions, head_dim=head_dim, default_theta=local_theta)
    plain = {key: value for key, value in fields.values.items() if not key.startswith("rope_")}
    return rope, local_rope, Fields(plain, fields.where)


def rope_parameters(fields: Fields) -> Mapping[str, Any]:
    """Return the rope settings as one mapping: `rope_parameters`, or the older `rope_scaling` beside `rope_theta`."""
    for key in ("rope_parameters", "rope_scaling"):
        value = fields.raw(key)
        if isinstance(value, dict):
            return value
        if value is not None:
            raise ModelLoadError(f"{fields.where} has {key} that is not an object.")
    return {}


def growth_of_queries(rope: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings of queries that grow with their position, which rope settings hold."""
    fields, key = Fields(rope, where), "original_max_position_embeddings"
    return {
        "query_growth": fields.optional_number("llama_4_scaling_beta"),
        "query_step": fields.integer(key) if fields.has(key) else None,
    }


def rope_config(
    parameters: Mapping[str, Any],
    fields: Fields,
    max_positions: int,
    *,
    head_dim: int,
    default_theta: float = 10000.0,
) -> RopeConfig:
    rope = Fields(parameters, f"The rope settings of {fields.where}")
    theta = rope.number("rope_theta", fields.number("rope_theta", default_theta))
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if rope.text("rope_type", "default") == "proportional":
        pairs = int(share * head_dim // 2)
        return RopeConfig(
            theta,
            RopeScaling(kind="proportional", factor=rope.number("factor", 1.0), rotated_pairs=pairs),
        )
    rotary_dim = int(head_dim * share)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise NotNative(
            f"{fields.where} rotates {rotary_dim} of the {head_dim} numbers of a head, which cannot be done in pairs."
        )
    scaling = _rope_scaling(rope, fields, max_positions)
    return RopeConfig(theta, scaling, None if rotary_dim == head_dim else rotary_dim)


def _rope_scaling(rope: Fields, fields: Fields, max_positions: int) -> RopeScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    # Dynamic scaling changes nothing within the positions of the model, and longer contexts are not served.
    if kind in ("default", "dynamic", "mrope"):
        return None
    if kind in ("linear", "ntk"):
        return RopeScaling(kind="linear" if kind == "linear" else "ntk", factor=rope.number("factor"))
    key = "original_max_position_embeddings"
    original = rope.integer(key, fields.integer(key, max_positions))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=rope.number("factor"),
            original_max_positions=original,
            low_frequency_factor=rope.number("low_freq_factor"),
            high_frequency_factor=rope.number("high_freq_factor"),
        )
    if kind == "yarn":
        factor = rope.number("factor", max_positions / original)
        amplitude = rope.optional_number("attention_factor")
        if amplitude is None and rope.raw("mscale") and rope.raw("mscale_all_dim"):
            amplitude = yarn_amplitude(factor, rope.number("mscale")) / yarn_amplitude(
                factor, rope.number("mscale_all_dim")
            )
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_positions=original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=amplitude,
            truncate=rope.flag("truncate", True),
        )
    if kind in ("longrope", "su"):
        return RopeScaling(
            kind="longrope",
            factor=rope.number("factor", max_positions / original),
            original_max_positions=original,
            attention_factor=rope.optional_number("attention_factor"),
            short_divisors=rope.numbers("short_factor"),
            long_divisors=rope.numbers("long_factor"),
            short_amplitude=rope.optional_number("short_mscale"),
            long_amplitude=rope.optional_number("long_mscale"),
        )
    raise NotNative(
        f"{fields.where} asks for rope scaling of kind {kind!r}; known are default, linear, dynamic, ntk, "
        "llama3, yarn and longrope."
    )


def stretched_positions(rope: RopeConfig, max_positions: int) -> int:
    """Return the context length. Yarn checkpoints may state the length before stretching."""
    scaling = rope.scaling
    if scaling is None or scaling.kind != "yarn" or scaling.original_max_positions is None:
        return max_positions
    return max(max_positions, int(scaling.original_max_positions * scaling.factor))
