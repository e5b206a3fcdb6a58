"""Reads a GGUF file that holds the vision part of a model (`mmproj-….gguf`). Knows no projector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import DenseWeight
from penstock.models.config import Fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import GGUFSource

MMPROJ_ARCHITECTURE = "clip"
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


class MmprojFile:
    """An open file. Sizes that follow from tensors are read from these, because older converters wrote others."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        self._source = GGUFSource(self._file)
        self.name = self._file.path.name
        if self._file.architecture != MMPROJ_ARCHITECTURE:
            raise ModelLoadError(
                f"{self.name} is no vision part of a model: its architecture is {self._file.architecture!r}, not "
                f"{MMPROJ_ARCHITECTURE!r}.",
                hint="Give the model first, and its mmproj file with --mmproj.",
            )
        self.all_fields = Fields(self._file.metadata, self.name, prefix="clip.")
        self.fields = Fields(self._file.metadata, self.name, prefix="clip.vision.")
        # Older converters gave the two matrices of an MLP each other's names.
        down = self._file.tensors.get("v.blk.0.ffn_down.weight")
        self._is_swapped = down is not None and down.shape[-1] == self.hidden_size != down.shape[0]

    @property
    def projector_type(self) -> str:
        """Return the type of the projector of images. Raises ModelLoadError for a file that has none."""
        if not self.all_fields.flag("has_vision_encoder", self.has("v.patch_embd.weight")):
            what = "audio only" if self.all_fields.raw("has_audio_encoder") else "no images"
            raise ModelLoadError(f"{self.name} is for {what}, and models take text and images.")
        # A file for images and audio names a projector for each.
        return self.fields.text("projector_type", self.all_fields.raw("projector_type"))

    @property
    def hidden_size(self) -> int:
        return self.fields.integer("embedding_length")

    @property
    def num_layers(self) -> int:
        """Return the layers of the tower. The last one must be there, before a model of so many layers is made."""
        count = self.fields.integer("block_count")
        self.shape(f"v.blk.{count - 1}.ln1.weight")
        return count

    @property
    def intermediate_size(self) -> int:
        return self.shape("v.blk.0.ffn_up.weight")[0]

    def has(self, name: str) -> bool:
        return name in self._file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored(name)
        if stored not in self._file.tensors:
            raise ModelLoadError(f"{self.name} has no tensor {stored}.", hint="Fetch the file again.")
        return self._file.tensors[stored].shape

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return a tensor as float32. A stored one may have more or fewer axes of size 1."""
        stored = self.shape(name)
        if [size for size in stored if size > 1] != [size for size in shape if size > 1]:
            raise ModelLoadError(
                f"{self.name} has {self._stored(name)} of shape {list(stored)} where its metadata asks for "
                f"{list(shape)}."
            )
        if len(stored) == 1:
            return self._source.vector(self._stored(name), stored[0]).view(*shape)
        weight = self._source.matrix(self._stored(name), math.prod(stored[:-1]), stored[-1])
        values = weight.values.float() if isinstance(weight, DenseWeight) else weight.dequantize()
        return values.view(*shape)

    def _stored(self, name: str) -> str:
        if not self._is_swapped:
            return name
        return ".".join(_SWAPPED.get(part, part) for part in name.split("."))
