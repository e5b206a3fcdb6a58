"""Serves a decoder by the code of the transformers library, with Penstock's paged attention and products.

The modules run as transformers wrote them, with three exceptions: attention uses `Ops.attend` and the KV store,
linear layers use `Ops.linear` (so that quantized weights and LoRA work), and the embedding uses `Ops.embed`. All
tokens of a step are one row of token ids with their own positions; only attention knows which request a token belongs
to. A model whose layers mix tokens in any other way is found out at load (transformers_probe.py) and refused.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import (
    AttentionBatch,
    AttentionLayer,
    KVStore,
    Ops,
    PackedEmbedding,
    PackedLinear,
)
from penstock.models.config import ArchitectureConfig
from penstock.models.weights import NamedProduct

PAGED = "penstock"  # the name of our attention in transformers' registry
# What attention may get beside queries, keys and values: sinks, and what keys are rotated by already.
_KNOWN_TENSORS = ("s_aux", "position_ids", "cache_position")


class NeedsWeight(Exception):
    """Raised by a packed layer when the model's code reads the weight itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Runtime(threading.local):
    """The objects that the modules of a model use during one forward pass of this thread."""

    ops: Ops
    attention: Callable[..., tuple[Tensor, None]]


RUNTIME = Runtime()


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *rest: Any, **options: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: [1, heads, T, D] → [1, T, heads, D]."""
    return RUNTIME.attention(module, query, key, value, mask, *rest, **options)


class PackedModule(nn.Module):
    """A linear layer whose matrix a backend has packed."""

    def __init__(self, name: str, packed: PackedLinear, *, is_head: bool = False) -> None:
        super().__init__()
        self.name = name
        self.packed = packed
        self.is_head = is_head
        self.in_features, self.out_features = packed.in_features, packed.out_features
        self.num_rows = 0  # of the latest call: layers that see a choice of tokens take no adapters

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        self.num_rows = rows.shape[0]
        if self.num_rows == 0:
            return x.new_empty((*x.shape[:-1], self.out_features))
        ops = RUNTIME.ops
        made = ops.logits(rows, self.packed) if self.is_head else ops.linear(rows, self.packed)
        return made.view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        raise NeedsWeight(self.name)


class PackedTable(nn.Module):
    """The embedding of tokens, packed by a backend."""

    def __init__(self, name: str, packed: PackedEmbedding) -> None:
        super().__init__()
        self.name = name
        self.packed = packed

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = RUNTIME.ops.embed(token_ids.reshape(-1).to(torch.int32), self.packed)
        return rows.view(*token_ids.shape, -1)

    @property
    def weight(self) -> Tensor:
        raise NeedsWeight(self.name)


class PackedNorm(nn.Module):
    """An RMS norm that a backend computes in one step, in place of a module that takes several."""

    def __init__(self, inner: nn.Module, factors: Tensor, eps: float) -> None:
        super().__init__()
        self.inner = inner
        self.weight = inner.weight  # as the model's code knows it
        self.factors = factors
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        ops = RUNTIME.ops
        if x.dtype != ops.dtype:
            made: Tensor = self.inner(x)
            return made
        return ops.rms_norm(x.reshape(-1, x.shape[-1]), self.factors, self.eps).view(x.shape)


def pack_norms(network: nn.Module, ops: Ops) -> None:
    """Replace the modules that compute an RMS norm. A trial shows which modules these are."""
    for name, module in list(network.named_modules()):
        if (packed := _packed_norm(module, ops)) is not None:
            owner, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(owner), leaf, packed)


def _packed_norm(module: nn.Module, ops: Ops) -> PackedNorm | None:
    weights, names = list(module.parameters()), ("variance_epsilon", "eps", "norm_eps")
    eps = next((each for name in names if isinstance(each := getattr(module, name, None), float)), None)
    if eps is None or len(weights) != 1 or weights[0].ndim != 1 or not hasattr(module, "weight"):
        return None
    # Rows of another mean than 0, and rows so small that it shows where the module adds `eps`.
    rows = torch.randn(4, len(weights[0]), generator=torch.Generator().manual_seed(0)) + 0.5
    rows = (rows * torch.tensor([[3.0], [1.0], [1e-3], [1e-4]])).to(ops.device, ops.dtype)
    tolerance = 1e-5 if ops.dtype == torch.float32 else 2e-2
    with torch.inference_mode():
        try:
            expected = module(rows)
        except Exception:  # a module that takes more than rows
            return None
        if not isinstance(expected, Tensor) or (expected.shape, expected.dtype) != (rows.shape, rows.dtype):
            return None
        for offset in (0.0, 1.0):
            factors = weights[0].float() + offset
            made = ops.rms_norm(rows, factors, eps)
            if torch.allclose(made.float(), expected.float(), rtol=tolerance, atol=tolerance):
                return PackedNorm(module, factors, eps)
    return None


class DecoderOutput:
    """The result of a decoder for its head: the hidden states, and None for everything else."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class GivenStates(nn.Module):
    """Stands in for the decoder below the head, and returns hidden states that are already computed. Whatever else
    a head asks for is the decoder's."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.states = torch.empty(0)
        self.__dict__["_given_for"] = decoder  # not a part of this module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given_for, name)

    def forward(self, *_: Any, **__: Any) -> DecoderOutput:
        return DecoderOutput(self.states)

    @property
    def decoder(self) -> GivenStates:  # some heads call the decoder inside the model that they belong to
        return self


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention in the forward pass, as the model makes it."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None = None


class PagedCalls:
    """The attention layers of a model: call i of a forward pass uses layer i of the KV store.

    All layers share the largest head size and number of KV heads: smaller heads are padded with zeros, which change
    neither scores nor sums."""

    def __init__(self, calls: Sequence[AttentionCall], device: torch.device) -> None:
        self.num_kv_heads = max(call.num_kv_heads for call in calls)
        largest = max(max(call.key_dim, call.value_dim) for call in calls)
        self.head_dim = largest + largest % 2
        self.num_heads = max(self._padded_heads(call) for call in calls)
        # Keys come rotated: the table has one row, of angle zero, for all positions.
        rope = torch.cat([torch.ones(self.head_dim // 2), torch.zeros(self.head_dim // 2)]).view(1, -1)
        rope = rope.to(device)
        self.calls = tuple(calls)
        self.layers = [self._layer(call, rope) for call in calls]

    def _padded_heads(self, call: AttentionCall) -> int:
        return call.num_heads // call.num_kv_heads * self.num_kv_heads

    def _layer(self, call: AttentionCall, rope: Tensor) -> AttentionLayer:
        heads = self._padded_heads(call)
        sinks = None if call.sinks is None else F.pad(call.sinks, (0, heads - call.num_heads))
        return AttentionLayer(
            num_heads=heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=call.scale,
            rope=rope,
            window=call.window,
            softcap=call.softcap,
            sinks=sinks,
        )


class PagedPass:
    """The attention of one forward pass over the KV store."""

    def __init__(self, paged: PagedCalls, ops: Ops, batch: AttentionBatch, kv: KVStore) -> None:
        self._paged = paged
        self._ops = ops
        at_zero = torch.zeros_like(batch.positions)
        parts = tuple(replace(part, positions=at_zero) for part in batch.parts)
        self._batch = replace(batch, positions=at_zero, parts=parts)
        self._kv = kv
        self._next = 0

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        index, self._next = self._next, self._next + 1
        call, layer = self._paged.calls[index], self._paged.layers[index]
        tokens = query.shape[2]
        rows = torch.cat(
            [
                self._fitted(query, layer.num_heads),
                self._fitted(key, layer.num_kv_heads),
                self._fitted(value, layer.num_kv_heads),
            ],
            dim=1,
        )
        rows = rows.to(self._ops.dtype).view(tokens, -1)
        made = self._ops.attend(rows, layer, self._kv.layer(index), self._batch.of_layer(index))
        by_head = made.to(value.dtype).view(1, tokens, layer.num_heads, layer.head_dim)
        return by_head[:, :, : call.num_heads, : call.value_dim], None

    def _fitted(self, states: Tensor, num_heads: int) -> Tensor:
        """[1, heads, T, D] → [T, num_heads, head_dim], padded with zeros."""
        by_token = states[0].transpose(0, 1)
        missing_heads, missing = num_heads - by_token.shape[1], self._paged.head_dim - by_token.shape[2]
        return F.pad(by_token, (0, missing, 0, missing_heads)) if missing or missing_heads else by_token

    def check_complete(self) -> None:
        """A layer that was left out has no keys and values of this pass, which later passes would read."""
        if self._next != len(self._paged.calls):
            raise ModelLoadError("The model does not call attention the same number of times in every pass.")


def decoder_name(network: Any) -> str | None:
    """Return the attribute of a causal language model that holds all but its head; None if there is no such one."""
    if hasattr(network, network.base_model_prefix):
        return str(network.base_model_prefix)
    inner = [name for name, module in network.named_children() if hasattr(module, "base_model_prefix")]
    return inner[0] if len(inner) == 1 else None


class TransformersModel:
    """A decoder of the transformers library behind the engine's interface."""

    implementation = "transformers"

    def __init__(
        self,
        network: Any,
        config: ArchitectureConfig,
        ops: Ops,
        *,
        max_model_len: int,
        num_parameters: int,
        weight_bytes: int,
    ) -> None:
        """`network` is a causal language model of transformers with its weights in place; `bind` comes next."""
        self.config = config
        self.max_model_len = max_model_len
        self.num_parameters = num_parameters
        self.weight_bytes = weight_bytes
        self.products: Sequence[NamedProduct] = ()
        self.records_graphs = False  # until a probe shows that the forward pass never waits for the GPU
        self.network = network
        name = decoder_name(network)
        assert name is not None, "a network without a decoder was refused"
        self._decoder_name = name
        self.decoder = getattr(network, name)
        self._ops = ops

    def bind(self, calls: Sequence[AttentionCall]) -> None:
        """Take the attention calls of a recorded pass, and cut the head off the decoder."""
        self.paged = PagedCalls(calls, self._ops.device)
        self.num_layers = len(calls)
        self.num_kv_heads = self.paged.num_kv_heads
        self.head_dim = self.paged.head_dim
        self.config = replace(
            self.config,
            num_layers=self.num_layers,
            num_heads=self.paged.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            windows=tuple(call.window for call in calls),
        )
        self._given = GivenStates(self.decoder)
        setattr(self.network, self._decoder_name, self._given)

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: KVStore) -> Tensor:
        RUNTIME.ops = self._ops
        attention = RUNTIME.attention = PagedPass(self.paged, self._ops, batch, kv)
        outputs = self.decoder(
            input_ids=token_ids.long().unsqueeze(0),
            position_ids=batch.positions.long().unsqueeze(0),
            use_cache=False,
            return_dict=True,
        )
        attention.check_complete()
        states: Tensor = outputs.last_hidden_state[0]
        return states

    def logits(self, hidden_rows: Tensor) -> Tensor:
        RUNTIME.ops = self._ops
        self._given.states = hidden_rows.unsqueeze(0)
        ids = torch.zeros((1, hidden_rows.shape[0]), dtype=torch.int64, device=hidden_rows.device)
        logits: Tensor = self.network(input_ids=ids, use_cache=False, return_dict=True).logits
        return logits[0].float()

    def argmax(self, hidden_rows: Tensor) -> Tensor | None:
        return None  # the model's own code may change the logits

    def with_ops(self, ops: Ops) -> Self:
        twin = copy.copy(self)
        twin._ops = ops
        return twin

    def with_distinct_layers(self) -> Self:
        return self


def attention_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, window: int | None, options: dict[str, Any]
) -> AttentionCall:
    """Describe a call that a model makes. Raises ModelLoadError for attention that a KV store cannot serve."""
    name = type(module).__name__
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise ModelLoadError(f"{name} attends to states other than those of its own tokens.")
    stated = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if stated is None else stated):
        raise ModelLoadError(f"{name} is not causal: a token would see the tokens behind it.")
    sinks = options.get("s_aux")
    unknown = [
        key for key, value in options.items() if isinstance(value, Tensor) and key not in _KNOWN_TENSORS
    ]
    if unknown:  # which keys a token sees, say, or biases
        raise ModelLoadError(f"{name} gives attention {unknown[0]}, which paged attention does not know.")
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        raise ModelLoadError(
            f"{name} has {query.shape[1]} query, {key.shape[1]} key and {value.shape[1]} value heads."
        )
    scale = options.get("scaling")
    return AttentionCall(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        scale=float(scale) if scale is not None else 1 / math.sqrt(query.shape[3]),
        window=window,
        softcap=options.get("softcap"),
        sinks=None if sinks is None else sinks.detach().float(),
    )
