"""Reads tensors from Hugging Face folders: one `model.safetensors`, shards with an index, or files of other names.
Knows no architecture and no quantization. The system is asked to read a file that is opened, and the one after it,
into the page cache before they are needed: the disk works in parallel with the loader, with many requests at a time.

`pytorch_model.bin` and its shards are pickles. The reader of torch unpickles tensors and plain containers and refuses
everything else, so a file cannot run code."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import DenseWeight
from penstock.models.weight_parts import Part
from penstock.models.weights import Stacked

_LEAST_MAPPED = 16 << 20  # bytes
_READABLE = (torch.float32, torch.float16, torch.bfloat16)


def _text_name(name: str) -> str:
    """Return the name of a tensor of a text model as it is in a checkpoint of the text model alone."""
    name = name.removeprefix("thinker.")  # of models that also speak
    return name.replace("model.text_model.", "model.", 1).replace("language_model.", "", 1)


class SafetensorsSource:
    """Reads tensors from disk when asked for. One file at a time is open and mapped. The file is unmapped and mapped
    again after an eighth of it was read, so that pages of unused tensors leave the process. The pages stay in the
    page cache. While a file is read, the system reads the next one."""

    single_name = "model.safetensors"
    index_name = "model.safetensors.index.json"
    other_names = "*.safetensors"  # of folders with neither
    no_weights = ("adapter_",)  # beginnings of names of files that hold no weights of the model

    def __init__(self, folder: Path) -> None:
        self._opened: tuple[Path, Any] | None = None
        self._mapped_until = 0  # of `bytes_read`, after which the mapping is released
        self._ahead: ReadAhead | None = None
        self.bytes_read = 0
        # Multimodal checkpoints keep their text model one level down; its tensors get the names they would have
        # in a checkpoint of the text model alone.
        places = self._locate(folder)
        self._stored = {_text_name(name): (file, name) for name, file in places.items()}
        self._ahead = ReadAhead(sorted(set(places.values())))
        self._folder = folder

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> DenseWeight:
        spans = None if part is None else (part.rows, part.columns)
        return DenseWeight(self._read(name, (rows, columns), spans))

    def vector(self, name: str, size: int, part: range | None = None) -> Tensor:
        return self._read(name, (size,), None if part is None else (part,)).to(torch.float32)

    def indices(self, name: str, rows: int, columns: int) -> Tensor:
        found = self.tensor(name, (rows, columns))
        if found.dtype not in (torch.int64, torch.int32, torch.int16):
            raise ModelLoadError(f"{name} is in {found.dtype} where whole numbers are expected.")
        return found.to(torch.int64)

    def stacked_matrix(self, place: Stacked, rows: int, columns: int, part: Part) -> DenseWeight:
        index = range(place.index, place.index + 1)
        if not place.transposed:
            shape, spans = (place.count, rows, columns), (index, part.rows, part.columns)
            return DenseWeight(self._read(place.name, shape, spans)[0])
        shape, spans = (place.count, columns, rows), (index, part.columns, part.rows)
        return DenseWeight(self._read(place.name, shape, spans)[0].T.contiguous())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as stored."""
        if name not in self._stored:
            raise ModelLoadError(f"The model in {self._folder} has no tensor {name}.")
        file, stored_name = self._stored[name]
        return tuple(self._guarded(file, lambda opened: opened.get_slice(stored_name)).get_shape())

    def tensor(
        self, name: str, shape: tuple[int, ...] | None = None, spans: tuple[range, ...] | None = None
    ) -> Tensor:
        """Return a tensor as stored, of any type. With `spans`, one for each dimension, only those are read."""
        if name not in self._stored:
            raise ModelLoadError(f"The model in {self._folder} has no tensor {name}.")
        file, stored_name = self._stored[name]
        stored = self._guarded(file, lambda opened: opened.get_slice(stored_name))
        stored_shape = stored.get_shape()
        if shape is not None and len(shape) == 1 < len(stored_shape) and _is_vector(stored_shape, *shape):
            whole = self.tensor(name).flatten()
            return whole if spans is None else whole[spans[0].start : spans[0].stop]
        if shape is not None and len(shape) == 2 and _is_stack(stored_shape, *shape):
            whole = self.tensor(name).flatten(0, 1)
            return whole if spans is None else whole[tuple(slice(span.start, span.stop) for span in spans)]
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
        index = folder / self.index_name
        if index.exists():
            files = _read_index(index)
            for file in sorted(set(files.values())):
                if not file.exists():
                    raise ModelLoadError(
                        f"{folder} lacks {file.name}, which its {index.name} names.",
                        hint="Fetch the missing file again.",
                    )
            return files
        single = folder / self.single_name
        if single.exists():
            return dict.fromkeys(self._guarded(single, lambda opened: opened.keys()), single)
        return self._locate_in_all(folder)

    def _locate_in_all(self, folder: Path) -> Mapping[str, Path]:
        """Return the file of each tensor of a folder without an index whose files have names of their own."""
        files = sorted(
            file for file in folder.glob(self.other_names) if not file.name.startswith(self.no_weights)
        )
        # Mistral's own format of the same weights lies beside that of Hugging Face.
        files = [file for file in files if not file.name.startswith("consolidated")] or files
        if not files:
            has_pickles = any(folder.glob("pytorch_model*.bin"))
            raise ModelLoadError(
                f"{folder} has neither {self.single_name} nor {self.index_name}.",
                hint="Read its .bin files with --load-format pt." if has_pickles else None,
            )
        places: dict[str, Path] = {}
        for file in files:
            for name in self._guarded(file, lambda opened: opened.keys()):
                if name in places:
                    raise ModelLoadError(
                        f"{folder} has {name} in both {places[name].name} and {file.name}.",
                        hint=f"Keep the files of one model, or call the right file {self.single_name}.",
                    )
                places[name] = file
        return places

    def _open(self, file: Path) -> Any:
        return safe_open(file, framework="pt")

    def _guarded(self, file: Path, read: Callable[[Any], Any]) -> Any:
        try:
            if self._opened is None or self._opened[0] != file or self.bytes_read > self._mapped_until:
                self._opened = None
                self._opened = file, self._open(file)
                self._mapped_until = self.bytes_read + max(file.stat().st_size // 8, _LEAST_MAPPED)
                if self._ahead is not None:
                    self._ahead.opened(file)
            return read(self._opened[1])
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


def _is_stack(shape: Sequence[int], rows: int, columns: int) -> bool:
    """Return whether a tensor is several matrices, which are one matrix when they stand one below the other. The
    matrices of a convolution have a row each."""
    return len(shape) == 3 and (shape[0] * shape[1], shape[2]) == (rows, columns)


def _is_vector(shape: Sequence[int], size: int) -> bool:
    """Return whether a tensor is a vector of this size but for further dimensions of 1."""
    return max(shape) == prod(shape) == size


class ReadAhead:
    """Takes the files in the order in which they are read. Each is asked for once."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        self._asked: set[Path] = set()

    def opened(self, file: Path) -> None:
        if not hasattr(os, "posix_fadvise") or file not in self._files:
            return
        index = self._files.index(file)
        wanted = [each for each in self._files[index : index + 2] if each not in self._asked]
        self._asked.update(wanted)
        if wanted:  # the call waits where the disk's queue is full
            threading.Thread(target=_ask_for, args=(wanted,), name="read-ahead", daemon=True).start()


def _ask_for(files: Sequence[Path]) -> None:
    for file in files:
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError:
            return  # the loader says what is wrong with the file
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError:
            return  # some file systems know no hints
        finally:
            os.close(descriptor)


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
