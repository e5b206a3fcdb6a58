"""What llama.cpp's converters write of families with latents, indexers, learned curves and fixed states: settings,
and tensors in another form than folders have."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGUFWriter

Tensors = dict[str, np.ndarray]


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


def converted(config: Any, tensors: Tensors) -> Tensors:
    """Return the tensors under the names and in the form in which the converter gives them to the file."""
    change = {"kimi_linear": _kimi_linear, "apertus": _apertus}.get(config.model_type)
    return tensors if change is None else change(config, tensors)


def _apertus(config: Any, tensors: Tensors) -> Tensors:
    return {name: values for name, values in tensors.items() if "act_fn" not in name}


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
