"""Reads and writes folders of heads: `config.json` beside `model.safetensors`, or the torch files of older releases.

Tensors get one set of names, whichever release wrote them: EAGLE's `midlayer.` is `layers.0.`, and Medusa's heads are
`blocks.0.layers.0` and `lm_heads.0`.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import DenseWeight, WeightData
from penstock.models.config import Fields
from penstock.models.weight_parts import Part, take_part

WEIGHTS = "model.safetensors"
_NAMES = (WEIGHTS, "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
_UNUSED = re.compile(r"rotary_emb|^t2d$")
_INDICES = ("d2t", "t2d")  # tensors of whole numbers: which tokens a head can draft
_MEDUSA = re.compile(r"^(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)$")


@dataclass(slots=True)
class HeadFolder:
    """The settings and tensors of a folder of heads. It is a `WeightSource`."""

    path: Path
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    bytes_read: int = 0

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    @property
    def fields(self) -> Fields:
        """Return the settings of the decoder layer, which the speculators library keeps one level down."""
        inner = self.settings.get("transformer_layer_config")
        return Fields(
            {**(inner if isinstance(inner, dict) else {}), **self.settings}, f"{self.path}/config.json"
        )

    def matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> WeightData:
        weight = DenseWeight(self.tensor(name, rows, columns))
        return weight if part is None else take_part(weight, part)

    def vector(self, name: str, size: int, part: range | None = None) -> Tensor:
        values = self.tensor(name, size).to(torch.float32)
        return values if part is None else values[part.start : part.stop]

    def tensor(self, name: str, *shape: int) -> Tensor:
        if name not in self.tensors:
            raise ModelLoadError(f"The heads in {self.path} have no tensor {name}.")
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"The heads in {self.path} have {name} of shape {list(tensor.shape)} where {list(shape)} is needed."
            )
        return tensor


def read_heads(folder: Path) -> HeadFolder:
    """Read a folder. A file that is damaged or missing is a ModelLoadError."""
    file = next((folder / name for name in _NAMES if (folder / name).is_file()), None)
    if file is None:
        raise ModelLoadError(
            f"{folder} holds no heads: it has neither {', '.join(_NAMES[:-1])} nor {_NAMES[-1]}.",
            hint="Give the folder of an EAGLE or Medusa release, or make one with `penstock draft train`.",
        )
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{folder}/config.json cannot be read: {error}.") from error
    try:
        if file.suffix == ".safetensors":
            stored: object = load_file(file)
        else:
            stored = torch.load(file, map_location="cpu", weights_only=True)
        tensors = _renamed(_checked(stored))
    except (
        SafetensorError,
        OSError,
        RuntimeError,
        EOFError,
        pickle.UnpicklingError,
        AttributeError,
        ValueError,
    ) as error:
        reason = (str(error) or "it ends too early").splitlines()[0].rstrip(".")
        raise ModelLoadError(f"{file} cannot be read: {reason}.", hint="Fetch the file again.") from error
    return HeadFolder(folder, settings, tensors, file.stat().st_size)


def write_heads(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write `config.json` and `model.safetensors`. Each file is complete or not there at all."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{WEIGHTS}.part"
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial)
    partial.chmod(0o644)
    partial.replace(folder / WEIGHTS)
    partial = folder / ".config.json.part"
    partial.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "config.json")


def _checked(stored: object) -> dict[str, Tensor]:
    """Check the contents of a file, because torch files can hold any objects. Raises ValueError unless they are
    tensors by name, dense, and with fractions where they are weights."""
    if not isinstance(stored, dict):
        raise ValueError("it does not hold tensors by name")
    for name, tensor in stored.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"it holds {str(name)[:80]}, which is not a tensor with a name")
        is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.dim() > 0
        if not is_dense or tensor.is_floating_point() == (name in _INDICES) or tensor.is_complex():
            kind = f"{tensor.layout} of {tensor.dtype} with {tensor.dim()} dimensions"
            raise ValueError(f"its tensor {name[:80]} is no dense matrix or vector of weights: {kind}")
        # Torch cannot examine formats of 8 bits.
        if tensor.is_floating_point() and tensor.itemsize > 1 and not torch.isfinite(tensor).all():
            raise ValueError(f"its tensor {name[:80]} has values that are not numbers")
    return stored


def _renamed(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    blocks = [match for match in map(_MEDUSA.match, stored) if match is not None and match[3] is not None]
    num_blocks = max((int(match[2]) + 1 for match in blocks), default=0)
    for name, tensor in stored.items():
        match = _MEDUSA.match(name)
        if match is not None and int(match[2]) < num_blocks:
            named[f"blocks.{match[1]}.layers.{match[2]}.{match[4]}"] = tensor
        elif match is not None:
            named[f"lm_heads.{match[1]}.{match[4]}"] = tensor
        elif not _UNUSED.search(name):
            name = name.removeprefix("medusa_heads.").removeprefix("model.")
            named[name.replace("midlayer.", "layers.0.", 1)] = tensor
    return named
