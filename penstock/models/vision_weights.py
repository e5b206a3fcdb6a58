"""Fills the vision tower and the projector of a folder: plain weights are read by transformers, quantized ones by our
own sources, which need no package of the method and unpack them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import DenseWeight, Ops
from penstock.models.config import Fields
from penstock.models.quantized_floats import open_folder
from penstock.models.quantized_source import QuantizedSource
from penstock.models.stored_quantization import StoredQuantization, folder_quantization

# Tensors of text models, by the names that sources give them.
_OF_TEXT = re.compile(
    r"(model\.)?(layers|embed_tokens\w*|norm)\.|lm_head\.|audio_tower\.|talker\.|code2wav\."
)
_PACKED = re.compile(r"\.(qweight|weight_packed|W_q)$")  # what stands for `weight` in quantized layouts
_KEPT = ("weight", "bias")  # of a quantized matrix, beside which its scales and codes are stored
_OTHER_PARTS = ("language_model", "text_model", "audio_tower", "embed_audio")


def load_tower(path: Path, fields: Fields, config: Any, ops: Ops, *, is_random: bool) -> Any:
    """Load the tower and the projector, without the layers of the text model. Raises ModelLoadError."""
    from transformers import AutoModelForImageTextToText

    without_text = _without_text(config)
    if is_random:
        whole = AutoModelForImageTextToText.from_config(without_text, dtype=ops.dtype)
        return placed_tower(whole, ops.device)
    stored = folder_quantization(path, fields)
    options: dict[str, Any] = {"config": without_text, "dtype": ops.dtype, "output_loading_info": True}
    try:
        if stored is None:
            whole, report = AutoModelForImageTextToText.from_pretrained(path, **options)
        else:
            kind = AutoModelForImageTextToText._model_mapping[type(without_text)]
            tensors = unpacked_tensors(path, stored, ops.dtype)
            whole, report = kind.from_pretrained(None, state_dict=tensors, **options)
    except ModelLoadError:
        raise
    except Exception as error:  # transformers and torch raise errors of all kinds for files that do not fit
        said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
        raise ModelLoadError(f"The vision tower of {path} cannot be loaded: {said:.200}.") from error
    tower = placed_tower(whole, ops.device)
    prefix = "" if tower is whole else "model."
    missing = sorted({f"{prefix}{name}" for name in tower.state_dict()} & set(report["missing_keys"]))
    if missing:
        raise ModelLoadError(
            f"The model in {path} has no tensor {missing[0]} of its vision tower.",
            hint="Fetch the folder again, or take preprocessor_config.json out to serve the model for texts.",
        )
    return tower


def _without_text(config: Any) -> Any:
    """Return settings of the same model without layers of text, and without a method of quantization."""
    changed = type(config).from_dict(config.to_dict())
    text = changed.get_text_config()
    text.num_hidden_layers = 0
    for name in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if getattr(text, name, None):
            setattr(text, name, 0)
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    for settings in (changed, text):
        if hasattr(settings, "quantization_config"):
            del settings.quantization_config
    return changed


def placed_tower(whole: Any, device: torch.device) -> Any:
    """Return the vision part of a model of transformers, on the device."""
    tower = whole.model if "model" in whole._modules else whole
    for name in _OTHER_PARTS:
        if name in tower._modules:
            del tower._modules[name]
    return tower.to(device).eval().requires_grad_(False)


def unpacked_tensors(path: Path, stored: StoredQuantization, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a quantized folder that are not of its text model, unpacked."""
    source = open_folder(path, stored)
    assert isinstance(source, QuantizedSource)
    names = [name for name in source.names() if not _OF_TEXT.match(name)]
    matrices = {
        _PACKED.sub(".weight", name) for name in names if _PACKED.search(name) or name.endswith("weight")
    }
    quantized = {name.removesuffix("weight") for name in matrices if source.is_quantized(name)}
    tensors = {}
    for name in (*matrices, *names):
        stem, _, last = name.rpartition(".")
        if name in tensors or (f"{stem}." in quantized and last not in _KEPT) or _is_beside(stem, quantized):
            continue
        if name in matrices and f"{stem}." in quantized:
            weight = source.matrix(name, *source.shape(name))
            tensor = weight.values if isinstance(weight, DenseWeight) else weight.dequantize()
        else:
            tensor = source.files.tensor(name)
        tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return tensors


def _is_beside(stem: str, quantized: set[str]) -> bool:
    """Return whether a tensor belongs to a quantized one, as `weight.absmax` does."""
    return stem.endswith(".weight") and stem.removesuffix("weight") in quantized
