"""Defines what encoders share: texts packed end to end without padding, attention in which every token attends to its
whole text, and rotation by position. Knows no architecture by name and no scheduler.

All matrix products use `Ops`, whose rows do not depend on each other. The rest is computed row by row or text by
text. A vector therefore does not depend on the other texts of its batch. Weights and activations are float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from penstock.core.errors import ModelLoadError
from penstock.models.config import Fields
from penstock.models.pooling_head import Head, LayerNorm
from penstock.models.weights import WeightLoader

QUERIES_AT_ONCE = 512  # rows of attention with a window, which need a mask of this many rows only

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    max_text_len: int  # tokens, special ones included
    norm_eps: float
    activation: str

    num_token_types: int = 0

    def __post_init__(self) -> None:
        if self.activation not in _ACTIVATIONS:
            raise ModelLoadError(
                f"The model's config.json asks for the activation {self.activation!r}; known are "
                f"{', '.join(_ACTIVATIONS)}."
            )
        if self.hidden_size % self.num_heads:
            raise ModelLoadError(
                f"The model's hidden size {self.hidden_size} cannot be divided by {self.num_heads} heads."
            )


@dataclass(frozen=True, slots=True)
class Texts:
    """Several texts, end to end."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], from 0 in each text
    is_second: Tensor  # bool [T]: the tokens of the second text of a pair
    ranges: Sequence[tuple[int, int]]  # the rows of each text

    @classmethod
    def packed(
        cls, texts: Sequence[Sequence[int]], second_texts_at: Sequence[int], device: torch.device
    ) -> Self:
        lengths = [len(text) for text in texts]
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        positions = torch.cat([torch.arange(length) for length in lengths])
        first_lengths = torch.tensor(
            [at or length for at, length in zip(second_texts_at, lengths, strict=True)]
        ).repeat_interleave(torch.tensor(lengths))
        token_ids = torch.tensor([token_id for text in texts for token_id in text])
        is_second = positions >= first_lengths
        return cls(token_ids.to(device), positions.to(device), is_second.to(device), list(pairwise(starts)))

    def each(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply a function to the rows of each text, in place. Torch splits a tensor into vector and scalar code by
        the size of the whole tensor, so that a function of all rows would depend on the other texts."""
        for start, end in self.ranges:
            x[start:end] = function(x[start:end])
        return x


class Encoder(ABC):
    """An encoder. An architecture is a subclass, with its names in checkpoints, the reading of settings, and a
    forward pass."""

    name: ClassVar[str]
    huggingface_names: ClassVar[tuple[str, ...]]  # of the bare model, and of the same with a head
    prefixes: ClassVar[tuple[str, ...]] = ()  # of the encoder's tensors, in checkpoints with a head
    first_tensor: ClassVar[str] = "embeddings.word_embeddings.weight"  # without a prefix
    config: Any

    @classmethod
    @abstractmethod
    def read_config(cls, fields: Fields) -> EncoderConfig: ...

    def __init__(self, config: Any, loader: WeightLoader) -> None:
        self.config = config
        self._ops = loader.ops
        prefixes = *self.prefixes, "model."  # the last one of GGUF files
        self._prefix = next((each for each in prefixes if loader.has(f"{each}{self.first_tensor}")), "")
        self._activation = _ACTIVATIONS[config.activation]
        self._load(loader)
        self.num_parameters = loader.num_parameters
        self.weight_bytes = loader.weight_bytes

    @abstractmethod
    def _load(self, loader: WeightLoader) -> None: ...

    @abstractmethod
    def classifier(self, loader: WeightLoader, num_labels: int) -> Head:
        """Load the head of a checkpoint for classification."""
        ...

    @abstractmethod
    def forward(self, texts: Texts) -> Tensor:
        """Compute float32 [T, hidden], after the last layer."""
        ...

    def hidden_states(
        self, texts: Sequence[Sequence[int]], second_texts_at: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Return float32 [length, hidden] for each text, after the last layer."""
        packed = Texts.packed(texts, second_texts_at or [0] * len(texts), self._ops.device)
        states = self.forward(packed)
        return [states[start:end] for start, end in packed.ranges]

    def _norm(
        self, name: str, loader: WeightLoader, *, has_bias: bool = True, size: int | None = None
    ) -> LayerNorm:
        size = size or self.config.hidden_size
        name = f"{self._prefix}{name}"
        bias = loader.vector(f"{name}.bias", size) if has_bias else None
        return LayerNorm(loader.vector(f"{name}.weight", size), bias, self.config.norm_eps)


def require_known(fields: Fields, known: Mapping[str, Any]) -> None:
    """Refuse settings of the makers' own files that name variants which are not known."""
    for key, expected in known.items():
        if fields.has(key) and fields.raw(key) != expected:
            raise ModelLoadError(f"{fields.where} has {key} = {fields.raw(key)!r}; known is {expected!r}.")


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    texts: Texts,
    *,
    scale: float | None = None,
    window: int | None = None,
    biases: Sequence[Tensor] | None = None,
) -> Tensor:
    """Let every token attend to all tokens of its text, or those at most `window` away: [T, heads, D] → [T, heads ×
    D]. `biases` [heads, length, length] of each text are added to the products of queries and keys."""
    output = torch.empty_like(query)
    for index, (start, end) in enumerate(texts.ranges):
        q, k, v = (part[start:end].transpose(0, 1)[None] for part in (query, key, value))
        if window is not None and end - start > window + 1:
            made = _attend_nearby(q, k, v, scale, window)
        else:
            bias = None if biases is None else biases[index][None]
            made = _attend(q, k, v, scale, bias)
        output[start:end] = made[0].transpose(0, 1)
    return output.flatten(1)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def _attend_nearby(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int) -> Tensor:
    length, device = query.shape[2], query.device
    made = []
    for first in range(0, length, QUERIES_AT_ONCE):
        last = min(first + QUERIES_AT_ONCE, length)
        low, high = max(0, first - window), min(length, last + window)
        rows, columns = torch.arange(first, last, device=device), torch.arange(low, high, device=device)
        mask = (rows[:, None] - columns).abs() <= window
        made.append(_attend(query[:, :, first:last], key[:, :, low:high], value[:, :, low:high], scale, mask))
    return torch.cat(made, dim=2)


def rotated(x: Tensor, table: Tensor) -> Tensor:
    """Rotate [T, heads, D] by `table` [T, D], the cosines and sines of the tokens' positions."""
    cosines, sines = table[:, None].chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
