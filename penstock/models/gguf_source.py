"""Reads weights from a GGUF file, under Hugging Face names. Knows no architecture beyond a table of names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import DenseWeight, WeightData
from penstock.models.gguf_blocks import decode_matrix
from penstock.models.gguf_file import GGUFFile, TensorInfo
from penstock.models.weight_parts import Part, take_columns

_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "model.rope_divisors",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """What an architecture does its own way in GGUF files."""

    layer_names: Mapping[str, str] = field(default_factory=dict)  # replaces entries of the common table
    # Heads of Q and K whose rows are stored in the order of interleaved rotary pairs, (0, 1), (2, 3), …; the
    # kernels rotate pairs half a head apart.
    interleaved_heads: Mapping[str, int] = field(
        default_factory=dict
    )  # by the name within a layer, such as "attn_q"


class GGUFSource:
    def __init__(self, file: GGUFFile, layout: GGUFLayout) -> None:
        self._file = file
        self._layout = layout
        self._stored = {
            translated: name
            for name in file.tensors
            if (translated := _translate(name, {**_LAYER_NAMES, **layout.layer_names})) is not None
        }
        self._bytes = np.frombuffer(file.buffer, dtype=np.uint8)
        self.bytes_read = 0

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> WeightData:
        tensor = self._find(name, (rows, columns))
        wanted = part or Part(range(rows), range(columns))
        # Whole blocks are read; what they hold beyond the columns is dropped once they are decoded.
        size, num_bytes = tensor.format.block_size, tensor.format.block_bytes
        first, last = wanted.columns.start // size, -(-wanted.columns.stop // size)
        raw = self._raw_rows(tensor, wanted.rows)[:, first * num_bytes : last * num_bytes]
        raw = np.ascontiguousarray(raw)
        self.bytes_read += raw.nbytes
        if tensor.format.name in _DENSE:
            return DenseWeight(torch.from_numpy(raw).view(_DENSE[tensor.format.name]))
        in_blocks = range(wanted.columns.start - first * size, wanted.columns.stop - first * size)
        return take_columns(decode_matrix(raw, tensor.format), in_blocks)

    def vector(self, name: str, size: int, part: range | None = None) -> Tensor:
        tensor = self._find(name, (size,))
        if tensor.format.name not in _DENSE:
            raise ModelLoadError(
                f"{self._file.path.name} has {tensor.name} in {tensor.format.name}, not as floats."
            )
        raw = self._raw_rows(tensor, part or range(size))
        self.bytes_read += raw.nbytes
        values = torch.from_numpy(raw).view(_DENSE[tensor.format.name])
        return values.flatten().to(torch.float32, copy=True)

    def _find(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        if name not in self._stored:
            raise ModelLoadError(f"{self._file.path.name} has no tensor for {name}.")
        tensor = self._file.tensors[self._stored[name]]
        if tensor.shape != shape:
            raise ModelLoadError(
                f"{self._file.path.name} has {tensor.name} of shape {list(tensor.shape)} "
                f"where its metadata asks for {list(shape)}."
            )
        return tensor

    def _raw_rows(self, tensor: TensorInfo, rows: range) -> NDArray[np.uint8]:
        """uint8 [rows, bytes of a row], a view into the file unless rows had to be reordered. A vector's elements
        count as its rows."""
        raw = self._bytes[tensor.offset : tensor.offset + tensor.num_bytes].reshape(tensor.shape[0], -1)
        parts = tensor.name.split(".")
        heads = self._layout.interleaved_heads.get(parts[2]) if len(parts) == 4 else None
        if heads is None:
            return raw[rows.start : rows.stop]
        return raw[_order_without_interleaving(tensor.shape[0], heads)[rows.start : rows.stop]]


def _order_without_interleaving(rows: int, heads: int) -> NDArray[np.int64]:
    """Of each head, first the even rows, then the odd ones."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).ravel()


def _translate(name: str, layer_names: Mapping[str, str]) -> str | None:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; None for a tensor that no model uses."""
    match name.split("."):
        case ["blk", index, part, kind] if part in layer_names:
            return f"model.layers.{index}.{layer_names[part]}.{kind}"
        case [part, kind] if part in _TOP_NAMES:
            return f"{_TOP_NAMES[part]}.{kind}"
        case _:
            return None
