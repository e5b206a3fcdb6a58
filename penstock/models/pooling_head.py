"""Layers after the pooling, which turn a pooled state into an embedding or into logits of labels. Knows no files but
those of dense layers; knows no tokens.

A head works on one row at a time: the result for a row does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from penstock.core.errors import ModelLoadError
from penstock.models.pooling import GGUF_CLASSIFIER, PoolingSettings
from penstock.models.sentence_modules import DenseActivation, DenseFile, NormFile
from penstock.models.weights import WeightLoader

_ACTIVATIONS: dict[DenseActivation, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}

Step = Callable[[Tensor], Tensor]
_NORM_EPS = 1e-5  # of layer norms after the pooling


@dataclass(frozen=True, slots=True)
class DenseLayer:
    weight: Tensor  # float32 [outputs, inputs]
    bias: Tensor | None
    activation: DenseActivation = "none"
    residual: Step | None = None  # of the input, added to the result

    def __call__(self, row: Tensor) -> Tensor:
        made = functional.linear(row, self.weight, self.bias)
        made = made if self.activation == "none" else _ACTIVATIONS[self.activation](made)
        return made if self.residual is None else made + self.residual(row)


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
    """Return the layers that the model's files put after the pooling."""
    steps: list[Step] = []
    size = hidden_size
    for file in settings.layers:
        if file.inputs != size:
            raise ModelLoadError(f"{file.path} takes vectors of {file.inputs} numbers, and gets {size}.")
        steps.append(_read_dense(file, device) if isinstance(file, DenseFile) else _read_norm(file, device))
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


def yes_or_no_head(hidden_size: int, loader: WeightLoader) -> Head:
    """Return the comparison of "yes" and "no", whose rows of the head a GGUF file stores in this order."""
    rows = loader.table(GGUF_CLASSIFIER, 2, hidden_size)
    return Head((DenseLayer(rows[:1] - rows[1:], None),), 1)


def _read_dense(file: DenseFile, device: torch.device) -> DenseLayer:
    inputs, outputs = file.inputs, file.outputs
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (outputs, inputs)}
    if file.has_bias:
        shapes["linear.bias"] = (outputs,)
    if file.has_residual and inputs != outputs:
        shapes["residual.weight"] = (outputs, inputs)
    found = _read_tensors(file.path, shapes, device)
    residual: Step | None = None
    if file.has_residual:
        matrix = found.get("residual.weight")
        residual = _unchanged if matrix is None else DenseLayer(matrix, None)
    return DenseLayer(found["linear.weight"], found.get("linear.bias"), file.activation, residual)


def _unchanged(row: Tensor) -> Tensor:
    return row


def _read_norm(file: NormFile, device: torch.device) -> LayerNorm:
    shapes = dict.fromkeys(("norm.weight", "norm.bias"), (file.inputs,))
    found = _read_tensors(file.path, shapes, device)
    return LayerNorm(found["norm.weight"], found["norm.bias"], _NORM_EPS)


def _read_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], device: torch.device
) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.", hint="Fetch the file again.") from error
    for name, shape in shapes.items():
        if name not in tensors or tensors[name].shape != shape:
            raise ModelLoadError(f"{path} has no {name} of the shape {shape}.")
    return {name: tensors[name].float().to(device) for name in shapes}
