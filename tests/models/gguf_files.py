"""Writes GGUF files with the `gguf` package, which thereby gives a second opinion on names, layout and formats."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from tests.models.checkpoints import Reference

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}


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


def write_vocabulary(path: Path, vocabulary: Vocabulary) -> Path:
    """A file with a tokenizer and one tiny tensor."""
    writer = GGUFWriter(path, "llama")
    vocabulary.write(writer)
    writer.add_tensor("output_norm.weight", np.ones(4, dtype=np.float32))
    return _finish(writer, path)


def write_model(path: Path, reference: Reference, kind: GGMLQuantizationType) -> dict[str, np.ndarray]:
    """Convert a checkpoint the way llama.cpp's converter does. Returns the values that were stored, by Hugging Face
    name, so that a test can put them back into the reference."""
    config = reference.model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _write_settings(writer, config)
    Vocabulary().write(writer)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    stored_values = {}
    for name, tensor in reference.model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        stored = _stored_form(name, values, config)
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if values.ndim == 1:
            writer.add_tensor(stored_name, stored)
            continue
        packed = gguf.quants.quantize(np.ascontiguousarray(stored), kind)
        writer.add_tensor(stored_name, packed, raw_dtype=kind)
        exact = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        stored_values[name] = gguf.quants.dequantize(exact, kind).astype(np.float32)
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(reference, rope))
    _finish(writer, path)
    return stored_values


def _write_settings(writer: GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _stored_form(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
        return values + 1
    if config.model_type == "llama":
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():
            if f"{part}." in name:
                return _interleave(values, count)
    return values


def _interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + half of each head become neighbours."""
    shape = values.shape
    return values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _llama3_divisors(reference: Reference, rope: dict[str, Any]) -> np.ndarray:
    """What transformers divides the plain frequencies by."""
    scaled = reference.model.model.rotary_emb.inv_freq
    head_dim = 2 * len(scaled)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled).float().numpy()


def _finish(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
