"""Layers after the pooling, which turn a pooled state into an embedding or into logits of labels. Knows no files but
those of dense layers; knows no tokens.

A head works on one row at a time: the result for a row does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from penstock.core.errors import ModelLoadError
from penstock.models.pooling import DenseActivation, DenseFile, PoolingSettings
from penstock.models.weights import WeightLoader

_ACTIVATIONS: dict[DenseActivation, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class DenseLayer:
    weight: Tensor  # float32 [outputs, inputs]
    bias: Tensor | None
    activation: DenseActivation = "none"

    def __call__(self, row: Tensor) -> Tensor:
        made = functional.linear(row, self.weight, self.bias)
        return made if self.activation == "none" else _ACTIVATIONS[self.activation](made)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The logit of one token, less the logit of another token."""

    logits: Callable[[Tensor], Tensor]  # of a language model
    tokens: tuple[int, int | None]
    dtype: torch.dtype

    def __call__(self, row: Tensor) -> Tensor:
        logits = self.logits(row.to(self.dtype)).float()
        true, false = self.tokens
        made = logits[:, true : true + 1]
        return made if false is None else made - logits[:, false : false + 1]


@dataclass(frozen=True, slots=True)
class Head:
    steps: tuple[Step, ...]
    size: int  # numbers of a result

    def __call__(self, row: Tensor) -> Tensor:
        """Compute float32 [1, hidden] → float32 [1, size]."""
        for step in self.steps:
            row = step(row)
        return row


def dense_layer(
    loader: WeightLoader,
    name: str,
    shape: tuple[int, int],
    activation: DenseActivation = "none",
    *,
    has_bias: bool = True,
) -> DenseLayer:
    """Load `{name}.weight` of [outputs, inputs], and `{name}.bias`."""
    weight = loader.table(f"{name}.weight", *shape)
    bias = loader.vector(f"{name}.bias", shape[0]) if has_bias else None
    return DenseLayer(weight, bias, activation)


def embedding_head(settings: PoolingSettings, hidden_size: int, device: torch.device) -> Head:
    """Return the dense layers that the model's files put after the pooling."""
    steps, size = [], hidden_size
    for file in settings.dense:
        if file.inputs != size:
            raise ModelLoadError(f"{file.path} takes vectors of {file.inputs} numbers, and gets {size}.")
        steps.append(_read_dense(file, device))
        size = file.outputs
    return Head(tuple(steps), size)


def decoder_head(
    settings: PoolingSettings, hidden_size: int, loader: WeightLoader, logits: Callable[[Tensor], Tensor]
) -> Head:
    """Return the head of a decoder: dense layers, a classifier, or the comparison of two tokens."""
    if settings.score_tokens is not None:
        return Head((TokenScore(logits, settings.score_tokens, loader.ops.dtype),), 1)
    if settings.num_labels is None:
        return embedding_head(settings, hidden_size, loader.ops.device)
    has_bias = loader.has("score.bias")
    shape = settings.num_labels, hidden_size
    return Head((dense_layer(loader, "score", shape, has_bias=has_bias),), settings.num_labels)


def _read_dense(file: DenseFile, device: torch.device) -> DenseLayer:
    try:
        tensors = load_file(file.path)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{file.path} cannot be read: {error}.", hint="Fetch the file again.") from error
    wanted: Sequence[tuple[str, tuple[int, ...]]] = [("linear.weight", (file.outputs, file.inputs))]
    if file.has_bias:
        wanted = [*wanted, ("linear.bias", (file.outputs,))]
    found = []
    for name, shape in wanted:
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != shape:
            raise ModelLoadError(f"{file.path} has no {name} of the shape {shape}.")
        found.append(tensor.float().to(device))
    return DenseLayer(found[0], found[1] if file.has_bias else None, file.activation)
