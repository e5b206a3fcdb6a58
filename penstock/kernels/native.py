"""The fast CPU backend: tensors in, calls to the compiled library, tensors out.

Knows the C interface (`library.py`); what the library keeps between calls is in `native_storage.py`. Every call
here is on the path of each token, so there is one cheap check per activation, and none of what a model decides at
load.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, pointer
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.blocks import ComposedOps
from penstock.kernels.chunks import within_chunks
from penstock.kernels.interface import (
    Activation,
    AttentionBatch,
    AttentionLayer,
    GatedLayer,
    GroupQuantWeight,
    KVStore,
    RunLayers,
    SamplingBatch,
    WeightData,
    with_common_order,
)
from penstock.kernels.library import (
    AttentionBatchStruct,
    AttentionLayerStruct,
    DecoderLayerStruct,
    Library,
    NormStruct,
    SamplingStruct,
)
from penstock.kernels.native_storage import (
    MAX_HEAD_DIM,
    NativeEmbedding,
    NativeKVStore,
    NativeLinear,
    check_kv_shape,
)
from penstock.kernels.reference import TorchKVStore, TorchOps, gated_reference

# Numbers shared with cpu/common.h.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATION_CODES: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}

UNLIMITED_WINDOW = 2**62


class NativeOps(ComposedOps):
    name = "native"
    device = torch.device("cpu")

    def __init__(
        self,
        library: Library,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        *,
        integer_products: bool = False,
    ) -> None:
        """Keys and values are cached in `dtype`, or in int8. With `integer_products`, quantized matrices are
        multiplied as integers: the weights as they come, the activations as 16-bit integers, with scales for
        every 32."""
        if dtype not in DTYPE_CODES:
            raise ValueError(f"the native CPU backend computes in float32 or bfloat16, not {dtype}")
        if kv_dtype not in (None, dtype, torch.int8):
            raise ValueError(
                f"the native CPU backend caches keys and values in {dtype} or int8, not {kv_dtype}"
            )
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self._rounded_kv = kv_dtype == torch.int8
        self._library = library
        self._dtype_code = DTYPE_CODES[dtype]
        self._integer_products = integer_products
        self._has_integer_products = False
        self._torch = TorchOps(self.device, dtype, kv_dtype)  # for heads that are too large
        self._layers: dict[int, tuple[AttentionLayerStruct, AttentionLayer, list[Tensor | None]]] = {}
        self._batch: AttentionBatch | None = None
        self._batch_struct = AttentionBatchStruct()

    def pack_linear(self, parts: Sequence[WeightData], bias: Tensor | None = None) -> NativeLinear:
        packed = NativeLinear(self._library, parts[0].shape[1])
        parts, packed.input_order = with_common_order(parts)
        quantized = [part for part in parts if isinstance(part, GroupQuantWeight)]
        if self._integer_products and len(quantized) == len(parts):
            packed.add_integers(quantized)
            self._has_integer_products = True
        else:
            packed.add(parts, self.dtype, narrows_float8=self._integer_products)
        if bias is not None:
            packed.set_bias(bias)
        return packed

    @property
    def rounding(self) -> str:
        if self._has_integer_products:
            return "activations of quantized layers rounded to 16 bits, in groups of 32"
        return "products rounded to bfloat16" if self.dtype == torch.bfloat16 else ""

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        return self._multiply(x, weight, self.dtype)

    def pack_embedding(self, weight: WeightData, tied: Any | None = None) -> NativeEmbedding:
        if tied is not None:
            return NativeEmbedding(tied, shared=True)
        table = NativeLinear(self._library, weight.shape[1])
        table.add([weight], self.dtype)
        return NativeEmbedding(table, shared=False)

    def embed(self, token_ids: Tensor, table: Any) -> Tensor:
        ids = token_ids.to(torch.int32).contiguous()
        matrix = table.table
        y = torch.empty((ids.shape[0], matrix.in_features), dtype=self.dtype)
        if not self._library.embed(
            matrix.handle, self._dtype_code, ids.shape[0], ids.data_ptr(), y.data_ptr()
        ):
            raise IndexError(f"a token id is outside the vocabulary of {matrix.out_features}")
        return y

    def logits(self, x: Tensor, head: Any) -> Tensor:
        return self._multiply(x, head, torch.float32)

    def argmax(self, x: Tensor, head: Any) -> Tensor:
        x = self._input_of(x, head)
        tokens = torch.empty(x.shape[0], dtype=torch.int64)
        self._library.largest(head.handle, self._dtype_code, x.shape[0], x.data_ptr(), tokens.data_ptr())
        return tokens

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = self._fitted(x)
        rows, width = x.shape
        y = torch.empty_like(x)
        self._library.rms_norm(
            self._dtype_code,
            rows,
            width,
            x.data_ptr(),
            DTYPE_CODES[weight.dtype],
            weight.data_ptr(),
            eps,
            y.data_ptr(),
        )
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = self._fitted(x)
        self._check_residual(residual)
        rows, width = x.shape
        y = torch.empty_like(x)
        self._library.add_rms_norm(
            self._dtype_code,
            rows,
            width,
            x.data_ptr(),
            residual.data_ptr(),
            DTYPE_CODES[weight.dtype],
            weight.data_ptr(),
            eps,
            y.data_ptr(),
        )
        return y

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        if activation not in ACTIVATION_CODES:
            return gated_reference(gate_up, activation)
        gate_up = self._fitted(gate_up)
        rows, double_width = gate_up.shape
        width = double_width // 2
        y = torch.empty((rows, width), dtype=self.dtype)
        self._library.gated(
            self._dtype_code, ACTIVATION_CODES[activation], rows, width, gate_up.data_ptr(), y.data_ptr()
        )
        return y

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> KVStore:
        if head_dim > MAX_HEAD_DIM:  # of Gemma 4, say: torch attends
            entries = num_layers, num_blocks, block_size, num_kv_heads, head_dim
            return TorchKVStore(entries, self.kv_dtype, self.device)
        check_kv_shape(block_size, head_dim)
        block_bytes = self._library.cache_block_bytes(
            self._dtype_code, self._rounded_kv, block_size, num_kv_heads, head_dim
        )
        shape = self._dtype_code, self._rounded_kv, num_kv_heads, head_dim
        return NativeKVStore(self._library, num_layers, num_blocks, block_size, block_bytes, shape)

    def attend(self, qkv: Tensor, layer: AttentionLayer, cache: Any, batch: AttentionBatch) -> Tensor:
        if layer.head_dim > MAX_HEAD_DIM:
            return self._torch.attend(qkv, layer, cache, batch)
        qkv = self._fitted(qkv)
        out = torch.empty((qkv.shape[0], layer.num_heads * layer.head_dim), dtype=self.dtype)
        self._library.attend(*self._attention_of(layer, batch, cache), qkv.data_ptr(), out.data_ptr())
        return out

    def attention(
        self, x: Tensor, qkv: Any, output: Any, layer: AttentionLayer, cache: Any, batch: AttentionBatch
    ) -> Tensor:
        if _is_attended_apart(layer, qkv, output):
            return self.linear(self.attend(self.linear(x, qkv), layer, cache, batch), output)
        x = self._fitted(x)
        y = torch.empty((x.shape[0], output.out_features), dtype=self.dtype)
        attention = self._attention_of(layer, batch, cache)
        self._library.attention(qkv.handle, output.handle, *attention, x.data_ptr(), y.data_ptr())
        return y

    def mlp(self, x: Tensor, gate_up: Any, down: Any, activation: Activation) -> Tensor:
        if _is_not_fused(gate_up, down, activation):
            return self.linear(self.gated(self.linear(x, gate_up), activation), down)
        x = self._fitted(x)
        y = torch.empty((x.shape[0], down.out_features), dtype=self.dtype)
        self._library.mlp(
            gate_up.handle,
            down.handle,
            self._dtype_code,
            ACTIVATION_CODES[activation],
            x.shape[0],
            x.data_ptr(),
            y.data_ptr(),
        )
        return y

    def attention_block(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        qkv: Any,
        output: Any,
        layer: AttentionLayer,
        cache: Any,
        batch: AttentionBatch,
    ) -> None:
        if _is_attended_apart(layer, qkv, output):
            normed = self.rms_norm(residual, norm, eps)
            residual.add_(self.attention(normed, qkv, output, layer, cache, batch))
            return
        self._check_residual(residual)
        self._library.attention_block(
            qkv.handle,
            output.handle,
            *self._attention_of(layer, batch, cache),
            DTYPE_CODES[norm.dtype],
            norm.data_ptr(),
            eps,
            residual.data_ptr(),
        )

    def mlp_block(
        self, residual: Tensor, norm: Tensor, eps: float, gate_up: Any, down: Any, activation: Activation
    ) -> None:
        if _is_not_fused(gate_up, down, activation):
            residual.add_(self.mlp(self.rms_norm(residual, norm, eps), gate_up, down, activation))
            return
        self._check_residual(residual)
        self._library.mlp_block(
            gate_up.handle,
            down.handle,
            self._dtype_code,
            ACTIVATION_CODES[activation],
            DTYPE_CODES[norm.dtype],
            norm.data_ptr(),
            eps,
            residual.shape[0],
            residual.data_ptr(),
        )

    def join_layers(
        self, layers: Sequence[GatedLayer], eps: float, activation: Activation, kv: KVStore
    ) -> RunLayers | None:
        if (
            not isinstance(kv, NativeKVStore)
            or activation not in ACTIVATION_CODES
            or any(_is_reordered(layer) or layer.attention.chunk for layer in layers)
        ):
            return None
        structs = (DecoderLayerStruct * len(layers))(*map(self._describe_decoder_layer, layers))
        run, activation_code = self._library.decoder_layers, ACTIVATION_CODES[activation]
        pointed_to = tuple(layers)

        def run_layers(residual: Tensor, batch: AttentionBatch) -> None:
            self._check_residual(residual)
            if batch is not self._batch:
                self._describe_batch(batch)
            run(
                structs,
                len(pointed_to),
                self._batch_struct,
                self._dtype_code,
                activation_code,
                eps,
                self._rounded_kv,
                kv.block_size,
                kv.address,
                kv.layer_bytes,
                residual.data_ptr(),
            )

        return run_layers

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        logits = logits.contiguous()
        rows, vocabulary = logits.shape
        settings = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seed, batch.position)
        struct = SamplingStruct(rows, vocabulary, *(setting.data_ptr() for setting in settings))
        tokens = torch.empty(rows, dtype=torch.int64)
        self._library.sample(byref(struct), logits.data_ptr(), tokens.data_ptr())
        return tokens

    def _multiply(self, x: Tensor, weight: Any, dtype: torch.dtype) -> Tensor:
        x = self._input_of(x, weight)
        y = torch.empty((x.shape[0], weight.out_features), dtype=dtype)
        codes = self._dtype_code, DTYPE_CODES[dtype]
        self._library.linear(weight.handle, codes[0], x.shape[0], x.data_ptr(), codes[1], y.data_ptr())
        return y

    def _input_of(self, x: Tensor, weight: Any) -> Tensor:
        """Activations in the order of the weight's columns, contiguous."""
        if weight.input_order is not None:
            x = x[:, weight.input_order]
        return self._fitted(x)

    def _fitted(self, x: Tensor) -> Tensor:
        if x.dtype is self.dtype and x.is_contiguous():
            return x
        if x.dtype is not self.dtype:
            raise TypeError(f"activations are {x.dtype} where the backend computes in {self.dtype}")
        return x.contiguous()

    def _check_residual(self, residual: Tensor) -> None:
        if residual.dtype is not self.dtype or not residual.is_contiguous():
            raise ValueError("the residual is updated in place and must be contiguous, of the backend's type")

    def _attention_of(self, layer: AttentionLayer, batch: AttentionBatch, cache: Any) -> tuple[Any, ...]:
        """Return the arguments of the library's functions for the attention of one layer."""
        batch = within_chunks(batch, layer.chunk, cache.block_size)
        if batch is not self._batch:
            self._describe_batch(batch)
        codes = self._dtype_code, self._rounded_kv
        return self._describe_layer(layer), self._batch_struct, *codes, cache.block_size, cache.address

    def _describe_layer(self, layer: AttentionLayer) -> AttentionLayerStruct:
        """Return the C form of a layer, made once. Holds the layer, so that its id stays its own, and the tensors."""
        known = self._layers.get(id(layer))
        if known is not None:
            return known[0]
        tables = [
            None if table is None else table.to(torch.float32).contiguous()
            for table in (layer.rope, layer.q_norm, layer.k_norm, layer.sinks)
        ]
        struct = AttentionLayerStruct(
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            UNLIMITED_WINDOW if layer.window is None else layer.window,
            *(None if table is None else table.data_ptr() for table in tables),
            layer.scale,
            layer.softcap or 0.0,
            layer.norm_eps,
        )
        self._layers[id(layer)] = (struct, layer, tables)
        return struct

    def _describe_decoder_layer(self, layer: GatedLayer) -> DecoderLayerStruct:
        products: tuple[Any, ...] = (layer.qkv, layer.output, layer.gate_up, layer.down)
        norms = (
            NormStruct(norm.data_ptr(), DTYPE_CODES[norm.dtype])
            for norm in (layer.attention_norm, layer.mlp_norm)
        )
        attention = pointer(self._describe_layer(layer.attention))
        return DecoderLayerStruct(*(product.handle for product in products), attention, *norms)

    def _describe_batch(self, batch: AttentionBatch) -> None:
        """The C form of a batch, reused by all layers of its step."""
        tensors = batch.positions, batch.slots, batch.query_starts, batch.context_lens, batch.block_tables
        self._batch_struct = AttentionBatchStruct(
            batch.positions.shape[0],
            batch.num_requests,
            batch.max_context_len,
            batch.block_tables.stride(0),
            *(tensor.data_ptr() for tensor in tensors),
            batch.halves_blocks,
        )
        self._batch = batch


def _is_attended_apart(layer: AttentionLayer, qkv: Any, output: Any) -> bool:
    """Return whether the library has no single call for attention with the products around it."""
    return qkv.input_order is not None or output.input_order is not None or layer.head_dim > MAX_HEAD_DIM


def _is_not_fused(gate_up: Any, down: Any, activation: Activation) -> bool:
    """Return whether the library has no single call for an MLP."""
    reordered = gate_up.input_order is not None or down.input_order is not None
    return reordered or activation not in ACTIVATION_CODES


def _is_reordered(layer: GatedLayer) -> bool:
    products: tuple[Any, ...] = (layer.qkv, layer.output, layer.gate_up, layer.down)
    return any(product.input_order is not None for product in products)
