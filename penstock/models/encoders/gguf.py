"""Reads encoders from GGUF files: BERT, NomicBERT, ModernBERT, EuroBERT and EmbeddingGemma."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import ModelLoadError
from penstock.models.config import Fields
from penstock.models.encoders.base import Encoder
from penstock.models.encoders.bert import Bert
from penstock.models.encoders.eurobert import EmbeddingGemma, EuroBert
from penstock.models.encoders.modernbert import ModernBert
from penstock.models.encoders.nomic_bert import NomicBert
from penstock.models.gguf_config import gguf_windows, metadata_fields
from penstock.models.gguf_file import GGUFFile, gguf_architecture
from penstock.models.gguf_source import GGUFSource
from penstock.models.layout import Layout, LayoutSource
from penstock.models.pooling_head import Head, dense_layer
from penstock.models.weights import WeightLoader, WeightSource

_TABLES = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
}


@dataclass(frozen=True, slots=True)
class GGUFEncoder:
    """An encoder, the names that folders have for its tensors, and its settings by the keys of `config.json`."""

    encoder: type[Encoder]
    names: Mapping[str, str]
    settings: Callable[[GGUFFile, Fields], dict[str, Any]]


def _bert_settings(file: GGUFFile, fields: Fields) -> dict[str, Any]:
    """Read the settings of BERT. Files of RoBERTa and XLM-RoBERTa have no rows for positions of padding, so that they
    are as those of BERT. Files of DistilBERT name BERT, and have no kinds of tokens."""
    types = "token_types.weight"
    return {
        "max_position_embeddings": _rows(file, "position_embd.weight"),
        "hidden_act": "gelu",
        "type_vocab_size": _rows(file, types) if types in file.tensors else 0,
    }


def _nomic_settings(file: GGUFFile, fields: Fields) -> dict[str, Any]:
    theta = fields.number("rope.freq_base", 1000.0)
    return {
        "max_position_embeddings": fields.integer("context_length"),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "type_vocab_size": _rows(file, "token_types.weight"),
    }


def _nomic_moe_settings(file: GGUFFile, fields: Fields) -> dict[str, Any]:
    return _nomic_settings(file, fields) | {
        "activation_function": "gelu",
        "num_experts": fields.integer("expert_count"),
        "moe_top_k": fields.integer("expert_used_count"),
        "moe_every_n_layers": fields.integer("moe_every_n_layers"),
    }


def _modernbert_settings(file: GGUFFile, fields: Fields) -> dict[str, Any]:
    return {
        "max_position_embeddings": fields.integer("context_length"),
        "norm_eps": fields.number("attention.layer_norm_epsilon", 1e-5),
        "hidden_activation": fields.text("hidden_act", "gelu"),
        "local_attention": fields.integer("attention.sliding_window"),
        "global_attn_every_n_layers": fields.integer("attention.sliding_window_pattern", 3),
        "global_rope_theta": fields.number("rope.freq_base", 160_000.0),
        "local_rope_theta": fields.number("rope.freq_base_swa", 10_000.0),
        "norm_bias": "output_norm.bias" in file.tensors,
        "attention_bias": "blk.0.attn_qkv.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _eurobert_settings(file: GGUFFile, fields: Fields) -> dict[str, Any]:
    heads = fields.integer("attention.head_count")
    return {
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10_000.0),
    }


def _gemma_settings(file: GGUFFile, fields: Fields) -> dict[str, Any]:
    """Read the settings of EmbeddingGemma. Every sixth layer sees the whole text, where files do not say."""
    num_layers = fields.integer("block_count")
    windows = gguf_windows(fields, num_layers, 6)
    head_dim = fields.integer("attention.key_length")
    return {
        "num_key_value_heads": fields.integer("attention.head_count_kv"),
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10_000.0),
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": ["full_attention" if each is None else "sliding_attention" for each in windows],
        "norms_hold_one": True,
    }


# Names of layers that are those of decoders.
_DECODER_LAYERS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "blk": "layers",
    "attn_norm": "input_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_NOMIC_LAYERS = {
    **_TABLES,
    "token_embd_norm": "emb_ln",
    "blk": "encoder.layers",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "attn_output_norm": "norm1",
    "layer_output_norm": "norm2",
    "ffn_down": "mlp.fc2",
}
_KNOWN = {
    "bert": GGUFEncoder(
        Bert,
        {
            **_TABLES,
            "position_embd": "embeddings.position_embeddings",
            "token_embd_norm": "embeddings.LayerNorm",
            "blk": "encoder.layer",
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
        _bert_settings,
    ),
    "nomic-bert": GGUFEncoder(
        NomicBert, {**_NOMIC_LAYERS, "ffn_up": "mlp.fc11", "ffn_gate": "mlp.fc12"}, _nomic_settings
    ),
    "nomic-bert-moe": GGUFEncoder(
        NomicBert,
        {
            **_NOMIC_LAYERS,
            "ffn_up": "mlp.fc1",
            "ffn_gate_inp": "mlp.router.layer",
            "ffn_up_exps": "mlp.experts.up",
            "ffn_down_exps": "mlp.experts.down",
        },
        _nomic_moe_settings,
    ),
    "modern-bert": GGUFEncoder(
        ModernBert,
        {
            "token_embd": "embeddings.tok_embeddings",
            "token_embd_norm": "embeddings.norm",
            "output_norm": "final_norm",
            "blk": "layers",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.Wo",
            "ffn_norm": "mlp_norm",
            "ffn_up": "mlp.Wi",
            "ffn_down": "mlp.Wo",
        },
        _modernbert_settings,
    ),
    "eurobert": GGUFEncoder(
        EuroBert, {**_DECODER_LAYERS, "ffn_norm": "post_attention_layernorm"}, _eurobert_settings
    ),
    "gemma-embedding": GGUFEncoder(
        EmbeddingGemma,
        {
            **_DECODER_LAYERS,
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _gemma_settings,
    ),
}


def is_gguf_encoder(path: Path) -> bool:
    return gguf_architecture(path) in _KNOWN


def open_gguf_encoder(file: GGUFFile) -> tuple[type[Encoder], Fields, WeightSource]:
    """Return the encoder of a file, its settings, and its tensors under the names of folders."""
    known, fields = _KNOWN[file.architecture], metadata_fields(file)
    settings = {
        "hidden_size": fields.integer("embedding_length"),
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": fields.integer("attention.head_count"),
        "layer_norm_eps": fields.number("attention.layer_norm_epsilon", 1e-12),
        "vocab_size": _rows(file, "token_embd.weight"),
        **known.settings(file, fields),
    }
    source = LayoutSource(GGUFSource(file), Layout(names=known.names))
    return known.encoder, Fields(settings, file.path.name), source


def gguf_head(file: GGUFFile, loader: WeightLoader, hidden_size: int, num_labels: int | None) -> Head:
    """Load the classifier, or the dense layers behind the pooling, which few files have."""
    if num_labels is not None:
        shapes = {"cls": (hidden_size, hidden_size), "cls.output": (num_labels, hidden_size)}
        inner, last = (
            dense_layer(loader, f"model.{name}", shape, "tanh" if name == "cls" else "none")
            for name, shape in shapes.items()
        )
        return Head((inner, last), num_labels)
    steps, size = [], hidden_size
    for name in ("dense_2", "dense_3"):
        if f"{name}.weight" in file.tensors:
            outputs = _rows(file, f"{name}.weight")
            steps.append(dense_layer(loader, f"model.{name}", (outputs, size), has_bias=False))
            size = outputs
    return Head(tuple(steps), size)


def _rows(file: GGUFFile, name: str) -> int:
    if name not in file.tensors:
        raise ModelLoadError(f"{file.path.name} has no tensor {name}.")
    shape = file.tensors[name].shape
    return shape[0] if len(shape) > 1 else 1
