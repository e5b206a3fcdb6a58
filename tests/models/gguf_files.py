"""Writes GGUF files with the `gguf` package, which thereby gives a second opinion on names, layout and formats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from tests.models.checkpoints import Reference
from tests.models.gguf_states import (
    WITHOUT_ATTENTION,
    converted,
    write_gemma4,
    write_special_settings,
    write_without_attention,
)

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "phi": gguf.MODEL_ARCH.PHI2,
    "olmo": gguf.MODEL_ARCH.OLMO,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "glm": gguf.MODEL_ARCH.CHATGLM,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
    "gpt_bigcode": gguf.MODEL_ARCH.STARCODER,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "falcon": gguf.MODEL_ARCH.FALCON,
    "bloom": gguf.MODEL_ARCH.BLOOM,
    "mpt": gguf.MODEL_ARCH.MPT,
    "stablelm": gguf.MODEL_ARCH.STABLELM,
    "nemotron": gguf.MODEL_ARCH.NEMOTRON,
    "jais2": gguf.MODEL_ARCH.JAIS2,
    "arcee": gguf.MODEL_ARCH.ARCEE,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "mistral4": gguf.MODEL_ARCH.MISTRAL4,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "hunyuan_v1_dense": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "hunyuan_v1_moe": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "dots1": gguf.MODEL_ARCH.DOTS1,
    "hy_v3": gguf.MODEL_ARCH.DOTS1,
    "exaone_moe": gguf.MODEL_ARCH.EXAONE_MOE,
    "afmoe": gguf.MODEL_ARCH.AFMOE,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "granitemoeshared": gguf.MODEL_ARCH.GRANITE_MOE,
    "phimoe": gguf.MODEL_ARCH.PHIMOE,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "llama4_text": gguf.MODEL_ARCH.LLAMA4,
    "apertus": gguf.MODEL_ARCH.APERTUS,
    "glm4_moe_lite": gguf.MODEL_ARCH.DEEPSEEK2,
    "glm_moe_dsa": gguf.MODEL_ARCH.GLM_DSA,
    "deepseek_v32": gguf.MODEL_ARCH.GLM_DSA,
    "kimi_linear": gguf.MODEL_ARCH.KIMI_LINEAR,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H,
    "nemotron_h_moe": gguf.MODEL_ARCH.NEMOTRON_H_MOE,
    "falcon_h1": gguf.MODEL_ARCH.FALCON_H1,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "jamba": gguf.MODEL_ARCH.JAMBA,
    "mamba": gguf.MODEL_ARCH.MAMBA,
    "falcon_mamba": gguf.MODEL_ARCH.MAMBA,
    "mamba2": gguf.MODEL_ARCH.MAMBA2,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
}
# Names in files of the text parts of models with images, which are as those of the model types.
TEXT_PARTS = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3_moe"}
# Names of architectures that transformers has not, whose layers are as those of a model type.
SAME_LAYERS = {"internlm2": "llama", "exaone": "qwen2", "minicpm": "granite"}
NEWER_NAMES = {
    "deepseek_v32": "deepseek32",
    "hy_v3": "hy_v3",
}  # of architectures that the package does not know
# Families whose converters put the rows of rotary pairs beside each other.
PERMUTED = (
    "llama",
    "ministral3",
    "smollm3",
    "granite",
    "olmo",
    "arcee",
    "mixtral",
    "granitemoe",
    "granitemoeshared",
)
NORMS_PLUS_ONE = ("gemma", "gemma2", "gemma3_text", "nemotron")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    kind: str = "gpt2"
    pre: str | None = "gpt-2"
    tokens: list[str] = field(default_factory=lambda: ["<|end|>", "a", "b", "ab"])
    types: list[int] = field(default_factory=lambda: [3, 1, 1, 1])
    merges: list[str] | None = field(default_factory=lambda: ["a b"])
    scores: list[float] | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # calls of the writer: {"add_bos_token_id": 1}

    def write(self, writer: GGUFWriter) -> None:
        writer.add_tokenizer_model(self.kind)
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        for name, value in self.settings.items():
            getattr(writer, name)(value)


def write_vocabulary(path: Path, vocabulary: Vocabulary, *, is_causal: bool = True) -> Path:
    """A file with a tokenizer and one tiny tensor."""
    writer = GGUFWriter(path, "llama")
    writer.add_causal_attention(is_causal)
    vocabulary.write(writer)
    writer.add_tensor("output_norm.weight", np.ones(4, dtype=np.float32))
    return finish(writer, path)


def write_model(
    path: Path,
    reference: Reference,
    kind: GGMLQuantizationType,
    max_tensors: int = 0,
    *,
    spoil: str | None = None,
    fuses_experts: bool = False,
    splits_experts: bool = False,
    name: str | None = None,
    vocabulary: Vocabulary | None = None,
    also: Callable[[GGUFWriter], None] | None = None,
) -> dict[str, np.ndarray]:
    """Convert a checkpoint the way llama.cpp's converter does. Returns the values that were stored, by Hugging Face
    name, so that a test can put them back into the reference. `spoil` is a setting of experts to get wrong;
    `fuses_experts` puts gates in front of the other halves of experts, as the converter does if asked;
    `splits_experts` writes each expert by itself, as the first files have them.
    `name` is another one for the architecture, `vocabulary` another vocabulary; `also` adds what else there is."""
    config = reference.model.config
    has_other_name = config.model_type == "nemotron_h" and "moe" in config.layers_block_type
    architecture = ARCHITECTURES["nemotron_h_moe" if has_other_name else config.model_type]
    name = name or NEWER_NAMES.get(config.model_type, gguf.MODEL_ARCH_NAMES[architecture])
    writer = GGUFWriter(path, name, split_max_tensors=max_tensors)
    if config.model_type == "gemma4_text":
        config.allow_global_per_layer_attribute_access = True
        _write_settings(writer, config)
        write_gemma4(writer, config)
    elif config.model_type in WITHOUT_ATTENTION:
        write_without_attention(writer, config)
    else:
        _write_settings(writer, config)
    if _num_experts(config):
        _write_expert_settings(writer, config, spoil)
    tensors = {name: tensor.float().numpy() for name, tensor in reference.model.state_dict().items()}
    write_special_settings(writer, config, tensors)
    (vocabulary or Vocabulary()).write(writer)
    if also is not None:
        also(writer)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    stored_values = {}
    for name, values in converted(config, tensors).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = f"{name}.weight" if name.endswith("layer_scalar") else name
        if ".experts." in name or "_linear." in name:
            if fuses_experts and name.endswith("gate_up_proj"):
                writer.add_tensor(f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight", values)
                continue
            stored_values[name] = _write_experts(
                writer, name, values, kind, config.model_type, splits_experts
            )
            continue
        if name.endswith("kv_b_proj.weight"):
            _write_absorbed(writer, name, values, config)
            continue
        if name.endswith(("e_score_correction_bias", "expert_bias", ".sinks")):
            part = "attn_sinks.weight" if name.endswith("sinks") else "exp_probs_b.bias"
            writer.add_tensor(f"blk.{name.split('.')[2]}.{part}", values.flatten())
            continue
        stored = _stored_form(name, values, config)
        suffixes = (".weight", ".bias")
        stored_name = names.get_name(name, suffixes) or "output.weight"
        if config.model_type == "bloom" and name.startswith("transformer."):  # its table has names without it
            stored_name = names.get_name(name.removeprefix("transformer."), suffixes)
        if name.endswith(".per_expert_scale"):
            stored_name = f"blk.{name.split('.')[2]}.ffn_down_exps.scale"
        elif name.endswith("router.scale"):
            stored_name = f"blk.{name.split('.')[2]}.ffn_gate_inp.scale"
        elif ".router." in name:
            stored_name = f"blk.{name.split('.')[2]}.ffn_gate_inp.{name.split('.')[-1]}"
        is_narrow = stored.shape[-1] % 32 != 0  # of states, some tensors are
        if values.ndim == 1 or "_norm." in stored_name or is_narrow:
            writer.add_tensor(stored_name, stored)
            continue
        packed = gguf.quants.quantize(np.ascontiguousarray(stored), kind)
        writer.add_tensor(stored_name, packed, raw_dtype=kind)
        exact = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        stored_values[name] = gguf.quants.dequantize(exact, kind).astype(np.float32)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(reference, rope))
    finish(writer, path)
    return stored_values


def _write_settings(writer: GGUFWriter, config: Any) -> None:
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    writer.add_block_count(config.num_hidden_layers)
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", 2048)
    writer.add_context_length(positions)
    writer.add_embedding_length(hidden)
    inner = (
        getattr(config, "ffn_hidden_size", None) or getattr(config, "intermediate_size", None) or 4 * hidden
    )
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(_kv_heads(config))
    for name, value in _epsilons(config).items():
        getattr(writer, name)(value)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if (window := getattr(config, "sliding_window", None)) is not None:
        writer.add_sliding_window(window)
        if config.model_type not in ("gemma2", "phi3", "starcoder2"):
            kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    # Names of settings, and of the calls that write them.
    for name, call in {
        "attn_logit_softcapping": "add_attn_logit_softcapping",
        "final_logit_softcapping": "add_final_logit_softcapping",
        "attention_multiplier": "add_attention_scale",
        "embedding_multiplier": "add_embedding_scale",
        "residual_multiplier": "add_residual_scale",
        "logits_scaling": "add_logit_scale",
        "logit_scale": "add_logit_scale",
        "clip_qkv": "add_clamp_kqv",
        "use_parallel_residual": "add_parallel_residual",
    }.items():
        is_in_matrices = config.model_type == "falcon_h1" and name == "embedding_multiplier"
        if getattr(config, name, None) is not None and not is_in_matrices:
            getattr(writer, call)(getattr(config, name))
    if (attention := getattr(config, "attn_config", None)) is not None:  # MPT
        writer.add_clamp_kqv(attention.clip_qkv)
        writer.add_max_alibi_bias(attention.alibi_bias_max)
    if getattr(config, "rope_parameters", None):
        _write_rope(writer, config.rope_parameters, head_dim, config.max_position_embeddings)


def _kv_heads(config: Any) -> int:
    if config.model_type == "falcon":
        one_or_all = 1 if config.multi_query else config.num_attention_heads
        return config.num_kv_heads if config.new_decoder_architecture else one_or_all
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _epsilons(config: Any) -> dict[str, float]:
    if hasattr(config, "rms_norm_eps") and config.model_type not in ("olmo", "starcoder2"):
        return {"add_layer_norm_rms_eps": config.rms_norm_eps}
    names = ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
    return {
        "add_layer_norm_eps": next((getattr(config, name) for name in names if hasattr(config, name)), 1e-5)
    }


def _write_rope(writer: GGUFWriter, rope: dict[str, Any], head_dim: int, max_positions: int) -> None:
    if "full_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    stretch = rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2))  # of Hunyuan
    writer.add_rope_freq_base(rope["rope_theta"] * stretch)
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(max_positions / original) / math.log(original))
        )
        for kind in ("long", "short"):
            factors = np.array(rope[f"{kind}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def _ungrouped(values: np.ndarray, config: Any) -> np.ndarray:
    """Put all queries first, then all keys, then all values."""
    kv_heads = _kv_heads(config)
    size = config.hidden_size // config.num_attention_heads
    groups = values.reshape(kv_heads, -1, size, *values.shape[1:])
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])


def _num_experts(config: Any) -> int:
    if config.model_type == "nemotron_h" and "moe" not in config.layers_block_type:
        return 0
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((getattr(config, name) for name in counts if getattr(config, name, None)), 0)


def _write_expert_settings(writer: GGUFWriter, config: Any, spoil: str | None) -> None:
    writer.add_expert_count(_num_experts(config))
    if spoil != "expert_used_count":
        named = (
            getattr(config, name, None)
            for name in ("moe_k", "top_k_experts", "num_experts_per_tok", "moe_topk")
        )
        writer.add_expert_used_count(next(count for count in named if count))
    if spoil == "expert_gating_func":
        writer.add_expert_gating_func(_Unknown())
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if getattr(config, "shared_expert_intermediate_size", 0):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type == "granitemoeshared":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if hasattr(config, "norm_topk_prob"):
        writer.add_expert_weights_norm(config.norm_topk_prob and config.model_type != "deepseek_v2")
    if getattr(config, "n_shared_experts", None):
        writer.add_expert_shared_count(config.n_shared_experts)
    for name in ("moe_num_shared_experts", "num_shared_experts"):
        if getattr(config, name, None):
            writer.add_expert_shared_count(getattr(config, name))
    if hasattr(config, "first_k_dense_replace"):
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
    for name in ("routed_scaling_factor", "router_scaling_factor", "route_scale"):
        if hasattr(config, name):
            writer.add_expert_weights_scale(getattr(config, name))
    if getattr(config, "n_group", None):
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if config.model_type in (
        "deepseek_v3",
        "glm4_moe",
        "minimax_m2",
        "kimi_linear",
        "lfm2_moe",
        "nemotron_h",
    ):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if hasattr(config, "kv_lora_rank"):
        writer.add_kv_lora_rank(config.kv_lora_rank)
        if config.q_lora_rank:
            writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)
        rope = getattr(config, "rope_parameters", None) or {}
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope.get("mscale_all_dim", 1.0))


def _write_absorbed(writer: GGUFWriter, name: str, values: np.ndarray, config: Any) -> None:
    """Write keys [H, C, N] and values [H, V, C] apart, as newer converters do."""
    layer, plain = name.split(".")[2], config.qk_nope_head_dim
    by_head = values.reshape(config.num_attention_heads, plain + config.v_head_dim, config.kv_lora_rank)
    keys = np.ascontiguousarray(by_head[:, :plain].transpose(0, 2, 1))
    writer.add_tensor(f"blk.{layer}.attn_k_b.weight", keys)
    writer.add_tensor(f"blk.{layer}.attn_v_b.weight", np.ascontiguousarray(by_head[:, plain:]))


class _Unknown:
    value = 77


def _write_experts(
    writer: GGUFWriter,
    name: str,
    values: np.ndarray,
    kind: GGMLQuantizationType,
    model_type: str,
    splits: bool,
) -> np.ndarray:
    """Write the experts of a layer as one tensor for each part, and return what was stored in transformers' form."""
    layer = name.split(".")[2]
    is_gate_up = name.endswith(("gate_up_proj", "gate_up_proj_bias", "input_linear.weight"))
    if name.endswith("_bias"):
        pairs = {"gate": values[:, ::2], "up": values[:, 1::2]} if is_gate_up else {"down": values}
        for part, biases in pairs.items():
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.bias", np.ascontiguousarray(biases))
        return values
    if model_type in ("gpt_oss", "llama4_text"):
        values = values.transpose(0, 2, 1)
    parts = {"up" if name.endswith(".up_proj") else "down": values}
    if is_gate_up and model_type == "gpt_oss":
        parts = {"gate": values[:, ::2], "up": values[:, 1::2]}
    elif is_gate_up:
        parts = dict(zip(("gate", "up"), np.split(values, 2, axis=1), strict=True))
    kept = []
    for part, matrices in parts.items():
        packed = gguf.quants.quantize(np.ascontiguousarray(matrices), kind)
        if splits:
            for index, expert in enumerate(packed):
                writer.add_tensor(f"blk.{layer}.ffn_{part}.{index}.weight", expert, raw_dtype=kind)
        else:
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", packed, raw_dtype=kind)
        kept.append(gguf.quants.dequantize(packed, kind).astype(np.float32))
    return np.concatenate(kept, axis=1)


def _stored_form(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    if config.model_type in NORMS_PLUS_ONE and name.endswith("norm.weight"):
        return values + 1
    if config.model_type == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return values.T
    if "query_key_value" in name:
        return _ungrouped(values, config)
    if config.model_type in PERMUTED:
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():
            if f"{part}." in name:
                return interleave(values, count)
    return values


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + half of each head become neighbours."""
    shape = values.shape
    return values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _llama3_divisors(reference: Reference, rope: dict[str, Any]) -> np.ndarray:
    """What transformers divides the plain frequencies by."""
    scaled = reference.model.model.rotary_emb.inv_freq
    head_dim = 2 * len(scaled)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled).float().numpy()


def finish(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
