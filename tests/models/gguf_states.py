"""What llama.cpp's converters write of families with latents, indexers, learned curves and fixed states: settings,
and tensors in another form than folders have."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from gguf import GGUFWriter

Tensors = dict[str, np.ndarray]
WITHOUT_ATTENTION = ("mamba", "falcon_mamba", "mamba2")


def write_special_settings(writer: GGUFWriter, config: Any, tensors: Tensors) -> None:
    """Write the settings that few families have. Values of `_write_settings` are replaced."""
    kind = config.model_type
    if kind == "llama4_text":
        writer.add_feed_forward_length(config.intermediate_size_mlp)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
        writer.add_sliding_window(config.attention_chunk_size)
        writer.add_attn_temperature_length(config.floor_scale)
    if kind == "apertus":
        for side, write in (("p", writer.add_xielu_alpha_p), ("n", writer.add_xielu_alpha_n)):
            names = [f"model.layers.{n}.mlp.act_fn.alpha_{side}" for n in range(config.num_hidden_layers)]
            write([float(tensors[name].item()) for name in names])
    if hasattr(config, "index_topk"):
        writer.add_indexer_head_count(config.index_n_heads)
        writer.add_indexer_key_length(config.index_head_dim)
        writer.add_indexer_top_k(config.index_topk)
    if kind == "kimi_linear":
        writer.add_head_count_kv([int(each == "full_attention") for each in config.layer_types])
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_kda_head_dim(config.linear_head_dim)
    if kind == "granitemoehybrid":
        _write_mamba(writer, config)
        counts = [config.num_key_value_heads * (each == "full_attention") for each in config.layer_types]
        writer.add_head_count_kv(counts)
        writer.add_rope_scaling_finetuned(False)
        writer.add_context_length(2**20)
        if config.num_local_experts:
            writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        else:
            writer.add_feed_forward_length(config.shared_intermediate_size)
    if kind in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        is_state = [each == "linear_attention" for each in config.layer_types]
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", is_state)
        writer.add_rope_dimension_sections([1, 1, 0, 0])
    if kind in ("lfm2", "lfm2_moe"):
        counts = [config.num_key_value_heads * (each == "full_attention") for each in config.layer_types]
        writer.add_head_count_kv(counts)
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_feed_forward_length(len(tensors["model.layers.0.feed_forward.w1.weight"]))
        if kind == "lfm2_moe":
            writer.add_leading_dense_block_count(config.num_dense_layers)
    if kind == "falcon_h1":
        _write_mamba(writer, config)
    if kind == "mistral4":
        writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])
        writer.add_attn_temperature_length(config.rope_parameters["original_max_position_embeddings"])
    if kind == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
        writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])
    if kind == "jamba":
        attends = [
            f"model.layers.{n}.self_attn.q_proj.weight" in tensors for n in range(config.num_hidden_layers)
        ]
        writer.add_head_count_kv([config.num_key_value_heads * each for each in attends])
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
        writer.add_ssm_time_step_rank(config.mamba_dt_rank)
    if kind == "nemotron_h":
        _write_nemotron_h(writer, config)


def write_gemma4(writer: GGUFWriter, config: Any) -> None:
    """Write what differs between its layers, and the frequencies of layers that see the whole context."""
    layers = [config.per_layer_config[index] for index in range(config.num_hidden_layers)]
    if len({layer.num_key_value_heads for layer in layers}) > 1:
        writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
    inner, num_own = config.intermediate_size, config.num_hidden_layers - config.num_kv_shared_layers
    if config.use_double_wide_mlp:
        writer.add_feed_forward_length([inner] * num_own + [2 * inner] * config.num_kv_shared_layers)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    narrow, wide = (layers[index].head_dim for index in range(2))  # of the first two layers, which differ
    for part in ("key", "value"):
        getattr(writer, f"add_{part}_length")(wide)
        getattr(writer, f"add_{part}_length_swa")(narrow)
    writer.add_rope_dimension_count(wide)
    writer.add_rope_dimension_count_swa(narrow)
    share = config.rope_parameters["full_attention"]["partial_rotary_factor"]
    divisors = np.full(wide // 2, 1e30, dtype=np.float32)
    divisors[: int(wide * share / 2)] = 1.0
    writer.add_tensor("rope_freqs.weight", divisors)


def _write_nemotron_h(writer: GGUFWriter, config: Any) -> None:
    inner = config.moe_intermediate_size if "moe" in config.layers_block_type else config.intermediate_size
    kinds = config.layers_block_type
    writer.add_feed_forward_length([inner * (kind in ("mlp", "moe")) for kind in kinds])
    writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_rope_scaling_finetuned(False)
    writer.add_rope_dimension_count(2 * config.head_dim)  # of other heads, as converters write it
    writer.add_context_length(2**20)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    if "moe" in kinds:
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        if config.moe_latent_size:
            writer.add_moe_latent_size(config.moe_latent_size)


def write_without_attention(writer: GGUFWriter, config: Any) -> None:
    """Write the settings of models of state-space layers alone."""
    writer.add_context_length(2**20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.state_size)
    if config.model_type == "mamba2":
        writer.add_ssm_inner_size(config.num_heads * config.head_dim)
        writer.add_ssm_time_step_rank(config.num_heads)
        writer.add_ssm_group_count(config.n_groups)
        return
    writer.add_ssm_inner_size(config.intermediate_size)
    writer.add_ssm_time_step_rank(config.time_step_rank)
    writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")


def _write_mamba(writer: GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)


def converted(config: Any, tensors: Tensors) -> Tensors:
    """Return the tensors under the names and in the form in which the converter gives them to the file."""
    change = CONVERSIONS.get(config.model_type)
    return tensors if change is None else change(config, tensors)


def _apertus(config: Any, tensors: Tensors) -> Tensors:
    return {name: values for name, values in tensors.items() if "act_fn" not in name}


def _stablelm(config: Any, tensors: Tensors) -> Tensors:
    """Put the norms of all heads of a layer into one table."""
    made = {name: values for name, values in tensors.items() if ".norms." not in name}
    for name in tensors:
        if name.endswith(".norms.0.weight"):
            stem, count = name.removesuffix("norms.0.weight"), config.num_attention_heads
            if "k_layernorm" in stem:
                count = config.num_key_value_heads
            made[f"{stem}weight"] = np.stack([tensors[f"{stem}norms.{head}.weight"] for head in range(count)])
    return made


def _glm(config: Any, tensors: Tensors) -> Tensors:
    """Put queries, keys and values into one tensor, as in the makers' first folders."""
    made = {name: values for name, values in tensors.items() if not re.search(r"\.[qkv]_proj\.", name)}
    for name in tensors:
        if ".q_proj." in name:
            parts = [tensors[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            made[name.replace(".q_proj.", ".qkv_proj.")] = np.concatenate(parts)
    return made


def glm4_of_images(config: Any, tensors: Tensors) -> Tensors:
    """Put the halves of rotary pairs apart, as in models with positions in three dimensions."""
    rotated = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, config.head_dim)]
    made = dict(tensors)
    for name, values in tensors.items():
        if re.search(r"\.[qk]_proj\.", name):
            heads = values.reshape(-1, config.head_dim, *values.shape[1:])
            made[name] = heads[:, order].reshape(values.shape)
    return made


def _kimi_linear(config: Any, tensors: Tensors) -> Tensors:
    made = {}
    for name, values in tensors.items():
        name = name.replace("forget_gate.", "").replace("dt_bias", "dt_proj.bias")
        if name.endswith("conv1d.weight"):
            for part, channels in zip("qkv", np.split(values, 3), strict=True):
                own = channels.reshape(1, len(channels), 1, -1)
                made[name.replace("conv1d", f"{part}_conv1d")] = np.ascontiguousarray(own)
        else:
            made[name] = -np.exp(values) if name.endswith("A_log") else values
    return made


def _granite_hybrid(config: Any, tensors: Tensors) -> Tensors:
    return _granite_shared(config, _mamba2(tensors, config.mamba_n_groups))


def _granite_shared(config: Any, tensors: Tensors) -> Tensors:
    shared = "mlp.shared_expert" if config.num_local_experts else "mlp"
    made = {}
    for name, values in tensors.items():
        name = name.replace("shared_mlp.output_linear", f"{shared}.down_proj")
        if "shared_mlp.input_linear" not in name:
            made[name] = values
            continue
        for part, rows in zip(("gate", "up"), np.split(values, 2), strict=True):
            made[name.replace("shared_mlp.input_linear", f"{shared}.{part}_proj")] = rows
    return made


def _mamba1(config: Any, tensors: Tensors) -> Tensors:
    made = {}
    for name, values in tensors.items():
        if name.endswith("A_log"):
            values = -np.exp(values)
        made[name] = values.squeeze(1) if name.endswith("conv1d.weight") else values
    return made


def _mamba2(tensors: Tensors, num_groups: int) -> Tensors:
    """Store decays as they are used, norms by group, and numbers of heads as columns."""
    made = {}
    for name, values in tensors.items():
        if name.endswith("A_log"):
            values = -np.exp(values).reshape(-1, 1)
        elif name.endswith((".mamba.D", ".mixer.D")):
            values = values.reshape(-1, 1)
        elif name.endswith("conv1d.weight"):
            values = values.squeeze(1)
        elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            values = values.reshape(num_groups, -1)
        made[name.replace("dt_bias", "dt_proj.bias")] = values
    return made


def _falcon_h1(config: Any, tensors: Tensors) -> Tensors:
    """Multiply the weights with the settings' factors."""
    gate, down = config.mlp_multipliers
    wide, width = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    into = np.repeat(config.ssm_multipliers, [wide, wide, width, width, config.mamba_n_heads])
    factors: dict[str, Any] = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "in_proj": config.ssm_in_multiplier * into[:, None],
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    return {
        name: (values * factors.get(name.split(".")[-2], 1.0)).astype(np.float32)
        for name, values in _mamba2(tensors, config.mamba_n_groups).items()
    }


def _nemotron_h(config: Any, tensors: Tensors) -> Tensors:
    made = _mamba2(tensors, config.n_groups)
    return {name.replace("model.", "backbone.", 1): values for name, values in made.items()}


def _lfm2(config: Any, tensors: Tensors) -> Tensors:
    return {
        name: values.squeeze(1) if name.endswith("conv.conv.weight") else values
        for name, values in tensors.items()
    }


def _qwen3_next(config: Any, tensors: Tensors) -> Tensors:
    """Put queries, keys and values of all key heads one below the other, and gates into a tensor of their own."""
    made = {}
    for name, values in older_qwen3_next(config, tensors).items():
        if "in_proj_qkvz" not in name:
            made[name] = values
            continue
        keys, width = config.linear_num_key_heads, config.linear_key_head_dim
        own = config.linear_num_value_heads // keys * config.linear_value_head_dim
        groups = values.reshape(keys, -1, values.shape[-1])
        parts = [
            part.reshape(-1, values.shape[-1])
            for part in np.split(groups, [width, 2 * width, 2 * width + own], 1)
        ]
        made[name.replace("qkvz", "qkv")] = np.concatenate(parts[:3])
        made[name.replace("qkvz", "z")] = parts[3]
    return made


def older_qwen3_next(config: Any, tensors: Tensors) -> Tensors:
    """Leave the projection as it is, as the first converters did."""
    made = {}
    for name, values in tensors.items():
        if name.endswith("A_log"):
            values = -np.exp(values)
        elif name.endswith("conv1d.weight"):
            values = values.squeeze(1)
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            values = values + 1
        made[name.replace("dt_bias", "dt_proj.bias")] = values
    return made


def _qwen3_5(config: Any, tensors: Tensors) -> Tensors:
    """Put the first value head of each key head in front, then the second ones."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    first = 2 * keys * config.linear_key_head_dim

    def tiled(values: np.ndarray) -> np.ndarray:
        return values.reshape(keys, heads // keys, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)

    made = {}
    for name, values in older_qwen3_next(config, tensors).items():
        if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            values = np.concatenate([values[:first], tiled(values[first:])])
        elif name.endswith(
            ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_proj.bias")
        ):
            values = tiled(values)
        elif name.endswith("linear_attn.out_proj.weight"):
            values = tiled(values.T).T
        made[name] = values
    return made


CONVERSIONS: dict[str, Callable[[Any, Tensors], Tensors]] = {
    "glm": _glm,
    "stablelm": _stablelm,
    "kimi_linear": _kimi_linear,
    "apertus": _apertus,
    "granitemoehybrid": _granite_hybrid,
    "granitemoeshared": _granite_shared,
    "falcon_h1": _falcon_h1,
    "jamba": _mamba1,
    "mamba": _mamba1,
    "falcon_mamba": _mamba1,
    "mamba2": lambda config, tensors: _mamba2(tensors, config.n_groups),
    "nemotron_h": _nemotron_h,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5,
}
