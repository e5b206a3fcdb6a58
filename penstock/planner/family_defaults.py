"""Adds the defaults of a model family to a `config.json`. Published files leave out settings that equal these
defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Families whose output head is the embedding, unless a file says otherwise.
_TIED = frozenset(
    {
        *("bloom", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "falcon", "falcon_mamba", "gemma", "gemma2"),
        *("gemma3_text", "gemma4_text", "gpt2", "gpt_bigcode", "gpt_neo", "lfm2", "lfm2_moe", "lfm3", "mamba"),
        *("mpt", "opt", "recurrent_gemma", "smollm3", "starcoder2", "zamba", "zamba2"),
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
    "llama4_text": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4},
}
# Models with images, whose files may leave the type of the text model out.
_TEXT_OF = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "llama4": "llama4_text"}


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a text model, or of the text part of another, with the defaults of its family."""
    inner = config.get("text_config")
    values = dict(inner if isinstance(inner, Mapping) else config)
    kind = values.get("model_type") or config.get("model_type")
    kind = _TEXT_OF.get(kind, kind) if isinstance(kind, str) else ""
    given = values.get("tie_word_embeddings", values.get("tie_embedding", config.get("tie_word_embeddings")))
    is_tied = kind in _TIED if given is None else bool(given)
    return {**_SETTINGS.get(kind, {}), **values, "model_type": kind, "tie_word_embeddings": is_tied}
