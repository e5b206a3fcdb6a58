"""Reads the facts of a model on disk: architecture, parameters, quantization, context, template, licence.

Reads headers and settings only, without torch: also of a model that this version cannot load.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.errors import ModelLoadError
from penstock.models.generation import DEFAULT_TEMPLATE, folder_templates, gguf_templates, makers_defaults
from penstock.models.gguf_choice import split_parts
from penstock.models.gguf_file import GGUFFile

_MAX_HEADER_BYTES = 128 << 20
_HEADER_LENGTH = struct.Struct("<Q")
_PACKED = ("qweight", "weight_packed")  # several weights in each stored number
_NOT_WEIGHTS = (
    "qzeros",
    "scales",
    "g_idx",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "input_scale",
)
_PACKED_BITS = 32


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a model; None for a fact that the files do not state."""

    path: str
    format: str  # gguf or safetensors
    num_bytes: int
    architecture: str | None
    num_parameters: int
    quantization: str | None
    context_length: int | None
    embedding_length: int | None
    license: str | None
    template: str | None
    sampling_defaults: dict[str, float | int]  # that the makers recommend


def model_facts(path: Path) -> ModelFacts:
    """Read the facts of a model. Raises ModelLoadError for files that cannot be read."""
    return _facts_of_gguf(path) if path.is_file() else _facts_of_folder(path)


def _facts_of_gguf(path: Path) -> ModelFacts:
    file = GGUFFile(path)
    metadata = file.metadata
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.format.name] += math.prod(tensor.shape)
    architecture = metadata.get("general.architecture")
    return ModelFacts(
        path=str(path),
        format="gguf",
        num_bytes=sum(part.stat().st_size for part in split_parts(path)),
        architecture=_text(architecture),
        num_parameters=sizes.total(),
        quantization=", ".join(_common(sizes)) or None,
        context_length=_count(metadata.get(f"{architecture}.context_length")),
        embedding_length=_count(metadata.get(f"{architecture}.embedding_length")),
        license=_text(metadata.get("general.license")),
        template=gguf_templates(metadata).get(DEFAULT_TEMPLATE),
        sampling_defaults=makers_defaults(path).stated(),
    )


def _common(sizes: Counter[str]) -> list[str]:
    """Return the formats of more than a hundredth of the parameters, the most common first."""
    return [name for name, size in sizes.most_common() if size * 100 > sizes.total()]


def _facts_of_folder(folder: Path) -> ModelFacts:
    config = _read_json(folder / "config.json")
    if config is None:
        raise ModelLoadError(f"{folder} has no readable config.json.")
    inner = config.get("text_config")
    text_config = inner if isinstance(inner, dict) else config
    quantization = config.get("quantization_config")
    bits = _count(quantization.get("bits")) if isinstance(quantization, dict) else None
    sizes: Counter[str] = Counter()
    for file in sorted(folder.glob("*.safetensors")):
        sizes += _sizes(file, bits or 4)
    architectures = config.get("architectures")
    named = (
        architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    )
    return ModelFacts(
        path=str(folder),
        format="safetensors",
        num_bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        architecture=_text(named),
        num_parameters=sizes.total(),
        quantization=_quantization(quantization, bits) or ", ".join(_common(sizes)) or None,
        context_length=_count(text_config.get("max_position_embeddings")),
        embedding_length=_count(text_config.get("hidden_size")),
        license=_text(config.get("license")),
        template=folder_templates(folder, _read_json(folder / "tokenizer_config.json") or {}).get(
            DEFAULT_TEMPLATE
        ),
        sampling_defaults=makers_defaults(folder).stated(),
    )


def _quantization(settings: Any, bits: int | None) -> str | None:
    if not isinstance(settings, dict):
        return None
    method = _text(settings.get("quant_method")) or "quantized"
    return f"{method}, {bits} bits" if bits else method


def _sizes(file: Path, bits: int) -> Counter[str]:
    """Count the parameters in each type of numbers."""
    sizes: Counter[str] = Counter()
    for name, entry in _safetensors_header(file).items():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(shape, list) or name.endswith(_NOT_WEIGHTS):
            continue
        size = math.prod(length for length in shape if isinstance(length, int))
        sizes[str(entry.get("dtype"))] += size * (_PACKED_BITS // bits) if name.endswith(_PACKED) else size
    return sizes


def _safetensors_header(path: Path) -> dict[str, Any]:
    damaged = ModelLoadError(f"{path} is not a safetensors file.", hint="Fetch the file again.")
    with path.open("rb") as file:
        start = file.read(_HEADER_LENGTH.size)
        length = _HEADER_LENGTH.unpack(start)[0] if len(start) == _HEADER_LENGTH.size else 0
        if not 0 < length <= min(_MAX_HEADER_BYTES, path.stat().st_size):
            raise damaged
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise damaged from error
    if not isinstance(header, dict):
        raise damaged
    return header


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
