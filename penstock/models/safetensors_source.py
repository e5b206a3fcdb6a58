"""Reads weights from a Hugging Face folder: one `model.safetensors`, or shards with an index. Knows no
architecture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import DenseWeight
from penstock.models.weights import Part

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_READABLE = (torch.float32, torch.float16, torch.bfloat16)


class SafetensorsSource:
    """Reads tensors from disk when asked for. A file is opened, and mapped, with its first tensor."""

    def __init__(self, folder: Path) -> None:
        self._open_files: dict[Path, Any] = {}
        self.bytes_read = 0
        # Multimodal checkpoints keep their text model one level down; its tensors get the names they would have
        # in a checkpoint of the text model alone.
        self._stored = {
            name.replace("language_model.", "", 1): (file, name)
            for name, file in self._locate(folder).items()
        }
        self._folder = folder

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> DenseWeight:
        spans = None if part is None else (part.rows, part.columns)
        return DenseWeight(self._read(name, (rows, columns), spans))

    def vector(self, name: str, size: int, part: range | None = None) -> Tensor:
        return self._read(name, (size,), None if part is None else (part,)).to(torch.float32)

    def tensor(
        self, name: str, shape: tuple[int, ...] | None = None, spans: tuple[range, ...] | None = None
    ) -> Tensor:
        """Return a tensor as stored, of any type. With `spans`, one for each dimension, only those are read."""
        if name not in self._stored:
            raise ModelLoadError(f"The model in {self._folder} has no tensor {name}.")
        file, stored_name = self._stored[name]
        stored = self._guarded(file, lambda opened: opened.get_slice(stored_name))
        stored_shape = stored.get_shape()
        if shape is not None and tuple(stored_shape) != shape:
            raise ModelLoadError(
                f"{file.name} has {stored_name} of shape {stored_shape} "
                f"where config.json asks for {list(shape)}."
            )
        tensor: Tensor
        if spans is None:
            tensor = self._guarded(file, lambda opened: opened.get_tensor(stored_name))
        else:
            wanted = tuple(slice(span.start, span.stop) for span in spans)
            tensor = self._guarded(file, lambda _: stored[wanted])
        self.bytes_read += tensor.nbytes
        return tensor

    def _read(self, name: str, shape: tuple[int, ...], spans: tuple[range, ...] | None = None) -> Tensor:
        tensor = self.tensor(name, shape, spans)
        if tensor.dtype not in _READABLE:
            file, stored_name = self._stored[name]
            raise ModelLoadError(f"{file.name} has {stored_name} in {tensor.dtype}, which cannot be read.")
        return tensor

    def _locate(self, folder: Path) -> Mapping[str, Path]:
        """Return the file of each tensor."""
        index = folder / _INDEX
        if index.exists():
            files = _read_index(index)
            for file in sorted(set(files.values())):
                if not file.exists():
                    raise ModelLoadError(
                        f"{folder} lacks {file.name}, which its {_INDEX} names.",
                        hint="Fetch the missing file again.",
                    )
            return files
        single = folder / _SINGLE
        if not single.exists():
            raise ModelLoadError(f"{folder} has neither {_SINGLE} nor {_INDEX}.")
        return dict.fromkeys(self._guarded(single, lambda opened: opened.keys()), single)

    def _guarded(self, file: Path, read: Callable[[Any], Any]) -> Any:
        try:
            if file not in self._open_files:
                self._open_files[file] = safe_open(file, framework="pt")
            return read(self._open_files[file])
        except (SafetensorError, OSError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ModelLoadError(f"{file} cannot be read: {reason}.", hint="Fetch the file again.") from error


def _read_index(index: Path) -> dict[str, Path]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        # Only the last part of a name counts, so that an index cannot point out of the folder.
        return {str(name): index.parent / Path(file).name for name, file in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"{index} is not a valid index of shards.", hint="Fetch the file again."
        ) from error
