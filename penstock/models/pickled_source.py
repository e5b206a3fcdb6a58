"""Reads weights from `pytorch_model.bin` and its shards, which are pickles. The reader of torch unpickles tensors and
plain containers and refuses everything else, so a file cannot run code."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.models.safetensors_source import SafetensorsSource


class PickledSource(SafetensorsSource):
    single_name = "pytorch_model.bin"
    index_name = "pytorch_model.bin.index.json"
    other_names = "pytorch_model*.bin"

    def _open(self, file: Path) -> _PickledFile:
        return _PickledFile(file)


class _PickledFile:
    """A file of tensors with the methods of an open safetensors file. Tensors are mapped, not read."""

    def __init__(self, file: Path) -> None:
        try:
            stored: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, UnpicklingError, EOFError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise ModelLoadError(
                f"{file} cannot be unpickled safely: {reason}.", hint="Ask for the model in safetensors."
            ) from error
        if not isinstance(stored, dict) or not all(isinstance(each, Tensor) for each in stored.values()):
            raise ModelLoadError(f"{file} does not hold tensors by name.")
        self._tensors: dict[str, Tensor] = stored

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name].contiguous()

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._tensors[name])


class _Slice:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, spans: tuple[slice, ...]) -> Tensor:
        return self._tensor[spans].contiguous()
