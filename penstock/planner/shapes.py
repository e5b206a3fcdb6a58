"""Describes a model by its sizes alone: parameters, bytes of KV, operations per token. Read from a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import UsageError
from penstock.planner.layers import (
    StateLayers,
    layer_averages,
    layer_counts,
    layer_kinds,
    mlp_sizes,
    shared_blocks,
    state_layers,
    text_settings,
)

_LARGEST_SIZE = 1 << 24
_ALIBI_NUMBERS = 8  # that the engine keeps beside each key and value for the biases of ALiBi
_GATED_ATTENTION = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder. Counts of parameters leave out norms and biases, which weigh less than 0.1 %."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    kv_numbers: int  # of one token in one layer
    head_size: int  # numbers that a query head multiplies with each key and each value, on average
    vocab_size: int
    tied: bool  # the output head is the embedding
    attention_parameters: int  # of one layer
    mlp_parameters: int  # of one layer without experts
    num_dense_layers: int  # layers with an MLP that has no experts
    expert_parameters: int = 0  # of one expert
    shared_parameters: int = 0  # of the experts for every token, in one layer
    num_experts: int = 0
    experts_per_token: int = 0
    num_attention_layers: int
    num_expert_layers: int = 0
    states: StateLayers | None = None
    window: int | None = None
    num_window_layers: int = 0
    max_positions: int = 1 << 17
    lookup_parameters: int = 0  # of tables besides the embedding that are looked up, not multiplied
    reread_parameters: int = 0  # that a step reads again: blocks that several layers share

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        return (
            self.embedding_parameters * (1 if self.tied else 2)
            + self.lookup_parameters
            + self._dense_parameters
            + self.num_expert_layers * self.num_experts * self.expert_parameters
        )

    @property
    def multiplied_parameters(self) -> int:
        """Return the parameters that one token is multiplied with. Looking up an embedding multiplies nothing."""
        return self.read_parameters(1)

    def read_parameters(self, num_tokens: int) -> int:
        """Return the parameters that a step of this many tokens reads. Tokens choose experts independently: a few
        tokens read few experts, and many tokens read all experts."""
        if not self.num_experts:
            return self.embedding_parameters + self._dense_parameters + self.reread_parameters
        missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        experts = self.num_experts * (1 - missed) if num_tokens > 1 else self.experts_per_token
        return round(
            self.embedding_parameters
            + self._dense_parameters
            + self.num_expert_layers * experts * self.expert_parameters
        )

    @property
    def _dense_parameters(self) -> int:
        return (
            self.num_attention_layers * self.attention_parameters
            + (self.states.num_layers * self.states.parameters if self.states else 0)
            + self.num_dense_layers * self.mlp_parameters
            + self.num_expert_layers * (self.shared_parameters + self.hidden_size * self.num_experts)
        )

    def kv_bytes(self, num_tokens: int, bytes_per_number: float) -> float:
        """Return the KV cache of one context, if layers with a window keep no more than their window."""
        seen = min(num_tokens, self.window or num_tokens)
        whole = (self.num_attention_layers - self.num_window_layers) * num_tokens
        return (whole + self.num_window_layers * seen) * self.kv_numbers * bytes_per_number

    @property
    def state_bytes(self) -> int:
        """Return the bytes of states of one context, which do not depend on the length."""
        return self.states.num_layers * self.states.state_bytes if self.states else 0


def shape_from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Read the sizes from a Hugging Face `config.json`, of a text model or of the text part of another."""
    reader = _Reader(name, text_settings(config))
    hidden = reader.size("hidden_size", "n_embd", "d_model")
    kinds = layer_kinds(reader.values)
    layers = reader.size(
        *("num_hidden_layers", "n_layer", "num_layers", "n_layers"), default=len(kinds) if kinds else None
    )
    counts = layer_counts(reader, layers)
    if not (hidden and layers and reader.size("vocab_size")):
        raise UsageError(f"The settings of {name} describe a model without layers.")
    default_heads = None if counts.attention else 1
    heads = max(
        1, reader.size("num_attention_heads", "n_head", "num_heads", "n_heads", default=default_heads)
    )
    kv_heads = _num_kv_heads(reader, heads)
    head_dim = reader.size("head_dim", default=max(1, hidden // heads))
    if not head_dim:
        raise UsageError(f"The settings of {name} have head_dim = 0, which is not a size.")
    attention, kv_numbers, head_size = _attention(reader, hidden, heads, kv_heads, head_dim)
    mlp = mlp_sizes(reader, counts, layers, hidden)
    varied = layer_averages(reader, layers, hidden, heads)
    if varied is not None:
        attention, kv_numbers, head_size = (
            varied.attention_parameters,
            varied.kv_numbers,
            varied.head_size,
        )
    blocks = shared_blocks(reader, counts, hidden, heads, kv_heads)
    if blocks is not None:
        attention, head_size = blocks.parameters, blocks.head_dim
        kv_numbers = 2 * kv_heads * blocks.head_dim
    window, window_layers = _windows(reader, counts.attention)
    return ModelShape(
        name=name,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        # Latents belong to no head: every device of a replica keeps all of them.
        num_kv_heads=1 if reader.values.get("kv_lora_rank") else kv_heads,
        kv_numbers=kv_numbers,
        head_size=head_size,
        vocab_size=reader.size("vocab_size"),
        tied=reader.values["tie_word_embeddings"],
        attention_parameters=attention,
        mlp_parameters=round(mlp.mlp_parameters * (varied.mlp_factor if varied else 1)),
        lookup_parameters=varied.lookup_parameters if varied else 0,
        reread_parameters=blocks.reread_parameters if blocks else 0,
        num_dense_layers=mlp.num_dense_layers,
        num_attention_layers=counts.attention,
        num_expert_layers=counts.mlp - mlp.num_dense_layers,
        states=state_layers(reader, counts, hidden),
        expert_parameters=mlp.expert_parameters,
        shared_parameters=mlp.shared_parameters,
        num_experts=mlp.num_experts,
        experts_per_token=mlp.experts_per_token,
        window=window,
        num_window_layers=window_layers,
        max_positions=reader.size(
            *("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "seq_length"),
            default=1 << 17,
        ),
    )


def _num_kv_heads(reader: _Reader, heads: int) -> int:
    values, inner = reader.values, reader.values.get("attn_config")
    if values.get("multi_query") and not values.get("new_decoder_architecture"):
        return 1
    if isinstance(inner, Mapping) and isinstance(inner.get("kv_n_heads"), int):
        return max(1, int(inner["kv_n_heads"]))
    return max(1, reader.size("num_key_value_heads", "num_kv_heads", default=heads))


def _attention(
    reader: _Reader, hidden: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[int, int, int]:
    """Return the parameters of a layer's attention, the numbers of KV for each token, and the head size."""
    latent = reader.size("kv_lora_rank", default=0)
    if not latent:
        size = head_dim * (heads + kv_heads)
        gate = hidden * heads * head_dim if reader.values.get("model_type") in _GATED_ATTENTION else 0
        kept = head_dim + (_ALIBI_NUMBERS if _has_alibi(reader.values) else 0)
        return 2 * hidden * size + gate, 2 * kv_heads * kept, head_dim
    rope, plain = reader.size("qk_rope_head_dim"), reader.size("qk_nope_head_dim")
    value, query = reader.size("v_head_dim"), reader.size("q_lora_rank", default=0)
    queries = heads * (rope + plain)
    parameters = (hidden + queries) * query if query else hidden * queries
    parameters += hidden * (latent + rope) + latent * heads * (plain + value) + heads * value * hidden
    index = reader.size("index_head_dim", default=0)  # a search for the keys that are worth attention
    index_heads = reader.size("index_n_heads", default=0) if index else 0
    parameters += index_heads * ((query or hidden) * index + hidden) + hidden * index
    return parameters, latent + rope + index, latent + rope // 2


def _has_alibi(values: Mapping[str, Any]) -> bool:
    return values["model_type"] in ("bloom", "mpt") or bool(values.get("alibi"))


def _windows(reader: _Reader, num_layers: int) -> tuple[int | None, int]:
    """Return the tokens that layers with a window see, and how many layers have one, of the layers with attention."""
    if reader.values["model_type"] == "llama4_text":
        return _chunks(reader, num_layers)
    if reader.values["model_type"] == "recurrent_gemma":
        return reader.size("attention_window_size", default=2048), num_layers
    if not reader.values.get("sliding_window") or reader.values.get("use_sliding_window") is False:
        return None, 0
    window, kinds = reader.size("sliding_window"), reader.values.get("layer_types")
    if isinstance(kinds, list):
        return window, sum(kind == "sliding_attention" for kind in kinds)
    period = reader.size("sliding_window_pattern", "_sliding_window_pattern", default=0)
    return window, num_layers - num_layers // period if period else num_layers


def _chunks(reader: _Reader, num_layers: int) -> tuple[int | None, int]:
    """Return the chunks of Llama 4: a token sees the earlier tokens of the same chunk. Layers without rope see all
    earlier tokens."""
    values = reader.values
    kinds, rotates = values.get("layer_types"), values.get("no_rope_layers")
    count = num_layers - num_layers // max(1, reader.size("no_rope_layer_interval", default=4))
    if isinstance(kinds, list):
        count = sum(kind == "chunked_attention" for kind in kinds)
    elif rotates and isinstance(rotates, list):
        count = sum(bool(each) for each in rotates)
    return (reader.size("attention_chunk_size"), count) if values["attention_chunk_size"] else (None, 0)


class _Reader:
    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name = name
        self.values = values

    def size(self, *keys: str, default: int | None = None) -> int:
        """Read the first of these sizes that the file has."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST_SIZE:
                raise UsageError(
                    f"The settings of {self.name} have {key} = {value!r:.40}, which is not a size."
                )
            return value
        if default is None:
            raise UsageError(
                f"The settings of {self.name} have no {keys[0]}.",
                hint="Give the folder or the config.json of a decoder, or a known name.",
            )
        return default


def _dense(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


def _mixture(base: dict[str, Any], count: int, per_token: int, inner: int) -> dict[str, Any]:
    return {
        **base,
        "num_experts": count,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": inner,
    }


_HEAD_128 = {"head_dim": 128}
_TIED = {"tie_word_embeddings": True}
# The settings in the published config.json of each model.
KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": _dense(576, 1536, 30, 9, 3, 49152) | _TIED | {"max_position_embeddings": 8192},
    "qwen3-0.6b": _dense(1024, 3072, 28, 16, 8, 151936) | _HEAD_128 | _TIED,
    "qwen2.5-7b": _dense(3584, 18944, 28, 28, 4, 152064),
    "mistral-7b": _dense(4096, 14336, 32, 32, 8, 32768),
    "llama-2-7b": _dense(4096, 11008, 32, 32, 32, 32000) | {"max_position_embeddings": 4096},
    "llama-3.1-8b": _dense(4096, 14336, 32, 32, 8, 128256),
    "qwen3-8b": _dense(4096, 12288, 36, 32, 8, 151936) | _HEAD_128,
    "gemma-3-12b": _dense(3840, 15360, 48, 16, 8, 262208)
    | {"head_dim": 256, "sliding_window": 1024, "sliding_window_pattern": 6}
    | _TIED,
    "phi-4": _dense(5120, 17920, 40, 40, 10, 100352) | {"max_position_embeddings": 16384},
    "gpt-oss-20b": _mixture(_dense(2880, 2880, 24, 64, 8, 201088), 32, 4, 2880)
    | {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "gemma-3-27b": _dense(5376, 21504, 62, 32, 16, 262208)
    | {"head_dim": 128, "sliding_window": 1024, "sliding_window_pattern": 6}
    | _TIED,
    "qwen3-32b": _dense(5120, 25600, 64, 64, 8, 151936) | _HEAD_128,
    "qwen3-30b-a3b": _mixture(_dense(2048, 6144, 48, 32, 4, 151936) | _HEAD_128, 128, 8, 768),
    "qwen3-next-80b-a3b": _mixture(_dense(2048, 5120, 48, 16, 2, 151936), 512, 10, 512)
    | {
        "model_type": "qwen3_next",
        "head_dim": 256,
        "shared_expert_intermediate_size": 512,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "granite-4.0-h-small": _mixture(_dense(4096, 768, 40, 32, 8, 100352), 72, 10, 768)
    | _TIED
    | {
        "shared_intermediate_size": 1536,
        "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
    },
    "mixtral-8x7b": _mixture(_dense(4096, 14336, 32, 32, 8, 32000), 8, 2, 14336),
    "llama-2-70b": _dense(8192, 28672, 80, 64, 8, 32000) | {"max_position_embeddings": 4096},
    "llama-3.1-70b": _dense(8192, 28672, 80, 64, 8, 128256),
    "qwen2.5-72b": _dense(8192, 29568, 80, 64, 8, 152064),
    "gpt-oss-120b": _mixture(_dense(2880, 2880, 36, 64, 8, 201088), 128, 4, 2880)
    | {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "qwen3-235b-a22b": _mixture(_dense(4096, 12288, 94, 64, 4, 151936) | _HEAD_128, 128, 8, 1536),
    "llama-3.1-405b": _dense(16384, 53248, 126, 128, 8, 128256),
    "deepseek-v3": _mixture(_dense(7168, 18432, 61, 128, 128, 129280), 256, 8, 2048)
    | {
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
}


_TUNINGS = ("-instruct", "-chat", "-base", "-it")


def known_shape(name: str) -> ModelShape | None:
    """Return the sizes of a known model. The owner in front of a hub's name, and the kind of tuning behind it, change
    no size."""
    key = name.lower().rpartition("/")[2]
    for tuning in _TUNINGS:
        key = key.removesuffix(tuning)
    config = KNOWN_MODELS.get(key)
    return None if config is None else shape_from_config(key, config)
