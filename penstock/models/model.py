"""The engine's interface of a model. Knows no architecture and no file format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.kernels.interface import AttentionBatch, KVStore, Ops
from penstock.kernels.states import StateShapes
from penstock.models.config import ArchitectureConfig
from penstock.models.weights import NamedProduct


class Model(Protocol):
    config: ArchitectureConfig
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # positions the model was loaded for
    num_parameters: int
    weight_bytes: int  # as packed by the backend
    products: Sequence[NamedProduct]  # its matrices, for LoRA
    implementation: str  # whose code runs the model: native or transformers
    records_graphs: bool  # whether CUDA graphs may record its forward pass

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: KVStore) -> Tensor:
        """Compute int32 [T] → [T, hidden], after the final norm. Writes the tokens' keys and values to `kv`."""
        ...

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """Compute the logits of rows of `forward`'s result: [S, hidden] → float32 [S, V]."""
        ...

    def argmax(self, hidden_rows: Tensor) -> Tensor | None:
        """Compute the argmax of the logits, [S, hidden] → int64 [S]; None if that is not quicker than `logits`."""
        ...

    def with_ops(self, ops: Ops) -> Model:
        """Return a model with the same weights, run by other operations."""
        ...

    def with_distinct_layers(self) -> Model:
        """Return a model with one layer of each kind, which needs every kernel of the model."""
        ...


@runtime_checkable
class StagedModel(Model, Protocol):
    """A model whose forward pass can be taken apart, for a pipeline: `embed`, `run_layers`, `normed`."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Compute the input of the first layer: int32 [T] → [T, hidden]."""
        ...

    def run_layers(self, residual: Tensor, batch: AttentionBatch, kv: KVStore) -> None:
        """Run this rank's layers, in place."""
        ...

    def normed(self, residual: Tensor) -> Tensor:
        """Return the output of the last layer after the final norm."""
        ...


def staged(model: Model) -> StagedModel:
    """Return a model whose forward pass can be taken apart. Raises ConfigError for any other."""
    if isinstance(model, StagedModel):
        return model
    raise ConfigError(
        f"{model.config.architecture} runs by the code of transformers, which cannot be taken apart for drafting "
        "heads or ranks.",
        hint="Leave these settings out, or take a native architecture.",
    )


@runtime_checkable
class HasStates(Protocol):
    """A model with layers that keep a fixed state for each request, beside or instead of layers with keys and
    values."""

    num_kv_layers: int  # layers with keys and values
    state_layers: Sequence[StateShapes]  # the tensors of each layer with a state


def num_kv_layers(model: Model) -> int:
    """Return the number of layers for which a model needs keys and values."""
    return model.num_kv_layers if isinstance(model, HasStates) else model.num_layers


def state_layers(model: Model) -> Sequence[StateShapes]:
    """Return the tensors of each layer with a state; nothing for models without such layers."""
    return model.state_layers if isinstance(model, HasStates) else ()


class LayerWindow(NamedTuple):
    """The tokens that a layer attends to: the newest `size` ones; or, with `in_chunks`, those of the token's own
    chunk."""

    size: int
    in_chunks: bool = False


def layer_windows(model: Model) -> list[LayerWindow | None]:
    """Return the window of each layer with keys and values; None for a layer with full attention."""
    num_layers = num_kv_layers(model)
    if isinstance(model, HasStates | HasLatents):
        return [None] * num_layers
    config = model.config
    chunk = getattr(config, "attention_chunk", None)
    if chunk is not None:
        whole = config.unrotated_layers
        return [None if index in whole else LayerWindow(chunk, in_chunks=True) for index in range(num_layers)]
    return [None if size is None else LayerWindow(size) for size in config.windows[:num_layers]]


@runtime_checkable
class HasLatents(Protocol):
    """A model whose attention layers cache one vector of this width for each token, instead of keys and values."""

    latent_width: int


@runtime_checkable
class TappedModel(Protocol):
    """A model that can return the hidden states between its layers, for heads that draft."""

    def forward_tapped(
        self, token_ids: Tensor, batch: AttentionBatch, kv: KVStore, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return `forward`'s result, and the inputs of the layers `taps` side by side: [T, len(taps) × hidden]. The
        layer after the last one stands for the output of the last one."""
        ...
