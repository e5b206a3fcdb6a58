"""BERT-style encoders, for sentence embeddings: every token sees the whole text, and nothing is cached.

All matrix products go through `Ops`, whose rows do not depend on each other, and the rest is computed row by row or
text by text: a vector does not depend on the other texts of its batch. Weights and activations are float32. Knows no
scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from penstock.core.errors import ModelLoadError
from penstock.core.request import Pooling
from penstock.kernels.interface import PackedLinear
from penstock.models.config import Fields, read_settings
from penstock.models.weights import WeightLoader

HUGGINGFACE_NAMES = ("BertModel", "bert")

_GELU: dict[str, Literal["none", "tanh"]] = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    num_positions: int
    num_token_types: int
    norm_eps: float
    gelu: Literal["none", "tanh"]
    max_text_len: int  # tokens that the model was trained to embed, special ones included
    pooling: Pooling


def encoder_config(folder: Path, fields: Fields) -> EncoderConfig:
    """Read the settings from `config.json`, and from the files of sentence-transformers beside it, if there are
    any."""
    activation = fields.text("hidden_act", "gelu")
    if activation not in _GELU:
        raise ModelLoadError(
            f"{fields.where} asks for the activation {activation!r}; known are {', '.join(_GELU)}."
        )
    if fields.text("position_embedding_type", "absolute") != "absolute":
        raise ModelLoadError(f"{fields.where} has relative positions, which no known encoder has.")
    num_positions = fields.integer("max_position_embeddings", 512)
    sentence = _fields(folder / "sentence_bert_config.json")
    return EncoderConfig(
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=fields.integer("num_attention_heads"),
        vocab_size=fields.integer("vocab_size"),
        num_positions=num_positions,
        num_token_types=fields.integer("type_vocab_size", 2),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        gelu=_GELU[activation],
        max_text_len=min(num_positions, sentence.integer("max_seq_length", num_positions)),
        pooling=_pooling(_fields(folder / "1_Pooling" / "config.json")),
    )


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: PackedLinear
    attention_output: PackedLinear
    attention_norm: _Norm
    up: PackedLinear
    down: PackedLinear
    output_norm: _Norm


class BertEncoder:
    def __init__(self, config: EncoderConfig, loader: WeightLoader) -> None:
        self.config = config
        self._ops = loader.ops
        # Checkpoints of a model with a head on top keep the encoder one level down.
        self._prefix = "bert." if loader.has("bert.embeddings.word_embeddings.weight") else ""
        hidden = config.hidden_size
        names = {"word": config.vocab_size, "position": config.num_positions}
        self._words, self._positions = (
            loader.table(f"{self._prefix}embeddings.{name}_embeddings.weight", rows, hidden)
            for name, rows in names.items()
        )
        types = loader.table(
            f"{self._prefix}embeddings.token_type_embeddings.weight", config.num_token_types, hidden
        )
        self._first_type = types[0]  # all tokens of a single text are of the first type
        self._embedding_norm = self._norm("embeddings.LayerNorm", loader)
        self._layers = [self._load_layer(index, loader) for index in range(config.num_layers)]
        self.num_parameters = loader.num_parameters
        self.weight_bytes = loader.weight_bytes

    def hidden_states(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return float32 [length, hidden] for each text, after the last layer."""
        device = self._ops.device
        lengths = [len(text) for text in texts]
        token_ids = torch.tensor([token_id for text in texts for token_id in text], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        x = self._words[token_ids] + self._first_type + self._positions[positions]
        x = self._embedding_norm(x)
        for layer in self._layers:
            x = self._run(layer, x, starts)
        return [x[start:end] for start, end in pairwise(starts)]

    def _run(self, layer: _Layer, x: Tensor, starts: Sequence[int]) -> Tensor:
        linear = self._ops.linear
        attended = self._attend(linear(x, layer.qkv), starts)
        x = layer.attention_norm(x + linear(attended, layer.attention_output))
        inner = linear(x, layer.up)
        # Text by text: torch's split of a tensor into vector and scalar code depends on the size of the whole tensor.
        for start, end in pairwise(starts):
            inner[start:end] = functional.gelu(inner[start:end], approximate=self.config.gelu)
        return layer.output_norm(x + linear(inner, layer.down))

    def _attend(self, qkv: Tensor, starts: Sequence[int]) -> Tensor:
        heads = self.config.num_heads
        output = torch.empty(qkv.shape[0], self.config.hidden_size, dtype=qkv.dtype, device=qkv.device)
        for start, end in pairwise(starts):
            query, key, value = qkv[start:end].view(end - start, 3, heads, -1).permute(1, 2, 0, 3)
            attended = functional.scaled_dot_product_attention(query[None], key[None], value[None])
            output[start:end] = attended[0].transpose(0, 1).flatten(1)
        return output

    def _load_layer(self, index: int, loader: WeightLoader) -> _Layer:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        layer = f"encoder.layer.{index}"

        def linear(names: Sequence[str], rows: Sequence[int], columns: int) -> PackedLinear:
            full_names = [f"{self._prefix}{layer}.{name}" for name in names]
            return loader.linear(full_names, rows, columns, bias=True)

        return _Layer(
            qkv=linear(
                [f"attention.self.{name}" for name in ("query", "key", "value")], [hidden] * 3, hidden
            ),
            attention_output=linear(["attention.output.dense"], [hidden], hidden),
            attention_norm=self._norm(f"{layer}.attention.output.LayerNorm", loader),
            up=linear(["intermediate.dense"], [inner], hidden),
            down=linear(["output.dense"], [hidden], inner),
            output_norm=self._norm(f"{layer}.output.LayerNorm", loader),
        )

    def _norm(self, name: str, loader: WeightLoader) -> _Norm:
        size = self.config.hidden_size
        weight = loader.vector(f"{self._prefix}{name}.weight", size)
        return _Norm(weight, loader.vector(f"{self._prefix}{name}.bias", size), self.config.norm_eps)


def _pooling(fields: Fields) -> Pooling:
    modes = [key for key, value in fields.values.items() if key.startswith("pooling_mode_") and value is True]
    if modes in ([], ["pooling_mode_mean_tokens"]):
        return "mean"
    if modes == ["pooling_mode_cls_token"]:
        return "first"
    raise ModelLoadError(f"{fields.where} asks for {', '.join(modes)}; known are mean_tokens and cls_token.")


def _fields(path: Path) -> Fields:
    """Return the fields of a file; none, when there is no such file."""
    return Fields(read_settings(path) or {}, str(path))
