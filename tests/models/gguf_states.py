"""Converts checkpoints with layers of a fixed state to GGUF, as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
from gguf import GGUFWriter

ARCHITECTURES = {
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "mamba2": gguf.MODEL_ARCH.MAMBA2,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "falcon_h1": gguf.MODEL_ARCH.FALCON_H1,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
}
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Names of other modules that the package's table of names does not have.
RENAMED = {
    "q_layernorm": "attn_q_norm",
    "k_layernorm": "attn_k_norm",
    "pre_ff_layernorm": "ffn_norm",
    "block_sparse_moe.router": "ffn_gate_inp",
    "self_attn.out_proj": "attn_output",
}


def write_state_settings(writer: GGUFWriter, config: Any) -> None:
    """Write the settings that the writer of other families does not."""
    kind = config.model_type
    if kind == "lfm2":
        writer.add_layer_norm_rms_eps(config.norm_eps)
        inner = int(2 * config.intermediate_size / 3)
        writer.add_feed_forward_length(-(-inner // config.block_multiple_of) * config.block_multiple_of)
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_head_count_kv(_kv_heads_of_layers(config, "full_attention"))
    elif kind in DELTA_NETS:
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    elif kind == "mamba2":
        _write_mamba(
            writer, config.conv_kernel, config.state_size, config.n_groups, config.num_heads, config.head_dim
        )
    elif kind == "nemotron_h":
        sizes = (config.ssm_state_size, config.n_groups, config.mamba_num_heads, config.mamba_head_dim)
        _write_mamba(writer, config.conv_kernel, *sizes)
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
        writer.add_head_count_kv(_kv_heads_of_layers(config, "full_attention", "attention"))
        inner = config.intermediate_size
        writer.add_feed_forward_length([inner if each == "mlp" else 0 for each in _kinds(config)])
    else:
        head_dim = config.mamba_d_head
        if head_dim == "auto":
            head_dim = config.mamba_expand * config.hidden_size // config.mamba_n_heads
        if kind == "falcon_h1":
            head_dim = config.mamba_d_ssm // config.mamba_n_heads
        sizes = (config.mamba_d_state, config.mamba_n_groups, config.mamba_n_heads, head_dim)
        _write_mamba(writer, config.mamba_d_conv, *sizes)
        if kind == "granitemoehybrid":
            writer.add_head_count_kv(_kv_heads_of_layers(config, "full_attention", "attention"))
            writer.add_rope_scaling_finetuned(False)
            writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def write_mamba2_settings(writer: GGUFWriter, config: Any) -> None:
    """Write the settings that other families have of a model without attention."""
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)


def _write_mamba(writer: GGUFWriter, conv: int, state: int, groups: int, heads: int, head_dim: int) -> None:
    writer.add_ssm_conv_kernel(conv)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(heads * head_dim)
    writer.add_ssm_time_step_rank(heads)


def _kinds(config: Any) -> list[str]:
    return getattr(config, "layers_block_type", None) or config.layer_types


def _kv_heads_of_layers(config: Any, *attends: str) -> list[int]:
    return [config.num_key_value_heads if kind in attends else 0 for kind in _kinds(config)]


def converted(name: str, values: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors that are stored for one of the checkpoint's: names that the package's table of names
    translates, or stored names that begin with "blk."."""
    layer = name.split(".")[2] if ".layers." in name else ""
    for own, stored in RENAMED.items():
        if f".{own}." in name:
            name = f"blk.{layer}.{stored}.{name.rpartition('.')[2]}"
    if config.model_type == "nemotron_h":
        name = name.replace("model.", "backbone.", 1)
    if config.model_type == "falcon_h1":
        values = _with_factors(name, values, config)
    if config.model_type in ("qwen3_5_text", "qwen3_5_moe_text"):
        values = _tiled(name, values, config)
    if config.model_type in DELTA_NETS and name.endswith("norm.weight") and "linear_attn.norm" not in name:
        values = values + 1
    if name.endswith(".A_log"):
        values, name = -np.exp(values), f"blk.{layer}.ssm_a"
        yield name, values if config.model_type in DELTA_NETS else values[:, None]
    elif name.endswith((".mamba.D", ".mixer.D")):
        yield f"blk.{layer}.ssm_d", values[:, None]
    elif name.endswith(".dt_bias"):
        yield f"blk.{layer}.ssm_dt.bias", values
    elif name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        groups = config.n_groups if hasattr(config, "n_groups") else config.mamba_n_groups
        yield f"blk.{layer}.ssm_norm.weight", values.reshape(groups, -1)
    elif name.endswith(("conv1d.weight", "conv.conv.weight")):
        yield name, values[:, 0]
    elif name.endswith("shared_mlp.input_linear.weight"):
        ending = "_shexp" if config.num_local_experts else ""
        for part, half in zip(("gate", "up"), np.split(values, 2), strict=True):
            yield f"blk.{layer}.ffn_{part}{ending}.weight", half
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield f"blk.{layer}.ffn_down{'_shexp' if config.num_local_experts else ''}.weight", values
    elif name.endswith("in_proj_qkvz.weight"):
        yield from _by_part(f"blk.{layer}", values, config)
    else:
        yield name, values


def _by_part(prefix: str, values: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Take queries, keys, values and gates of each key head apart."""
    key, groups = config.linear_key_head_dim, config.linear_num_key_heads
    value = config.linear_value_head_dim * config.linear_num_value_heads // groups
    by_head = values.reshape(groups, -1, values.shape[1])
    parts = np.split(by_head, np.cumsum([key, key, value]), axis=1)
    query, keys, inner, gate = (part.reshape(-1, values.shape[1]) for part in parts)
    yield f"{prefix}.attn_qkv.weight", np.concatenate([query, keys, inner])
    yield f"{prefix}.attn_gate.weight", gate


def _tiled(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """Put the first value heads of all key heads first, then the second ones."""
    if ".linear_attn." not in name:
        return values
    groups, size = config.linear_num_key_heads, config.linear_value_head_dim
    before = 2 * groups * config.linear_key_head_dim

    def reorder(part: np.ndarray, width: int) -> np.ndarray:
        heads = part.reshape(groups, -1, width, *part.shape[1:])
        return heads.swapaxes(0, 1).reshape(part.shape)

    if ".in_proj_qkv." in name or ".conv1d." in name:
        return np.concatenate([values[:before], reorder(values[before:], size)])
    if ".in_proj_z." in name:
        return reorder(values, size)
    if name.endswith((".A_log", ".dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        return reorder(values, 1)
    return reorder(values.T, size).T if ".out_proj." in name else values


def _with_factors(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """Multiply the weights of Falcon-H1 by its factors."""
    into, out = config.attention_in_multiplier, config.attention_out_multiplier
    factors = {
        "feed_forward.down_proj": config.mlp_multipliers[1],
        "feed_forward.gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * into,
        "q_proj": into,
        "v_proj": into,
        "o_proj": out,
        "mamba.out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    for part, factor in factors.items():
        if f"{part}.weight" in name:
            return values * factor
    if "mamba.in_proj" not in name:
        return values
    inner, state = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    sizes = [inner, inner, state, state, config.mamba_n_heads]
    return (
        values
        * config.ssm_in_multiplier
        * np.repeat(config.ssm_multipliers, sizes)[:, None].astype(np.float32)
    )
