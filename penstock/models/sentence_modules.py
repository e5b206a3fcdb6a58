"""Reads the steps that sentence-transformers puts behind a model: a pooling, dense layers and norms, a normalization.
Imports no torch.

A step that is not known is refused by name: without the step, vectors would be silently wrong.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from penstock.core.errors import ModelLoadError
from penstock.core.request import Pooling
from penstock.models.config import Fields, read_settings

DenseActivation: TypeAlias = Literal["none", "tanh", "relu", "gelu", "silu", "sigmoid"]

_POOLINGS: dict[str, Pooling] = {
    "cls": "first",
    "cls_token": "first",
    "mean": "mean",
    "mean_tokens": "mean",
    "max": "max",
    "max_tokens": "max",
    "weightedmean": "weighted_mean",
    "weightedmean_tokens": "weighted_mean",
    "lasttoken": "last",
}
_ACTIVATIONS: dict[str, DenseActivation] = {
    "Identity": "none",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
_VECTOR, _SCORES = "sentence_embedding", "scores"  # what modules hand on


@dataclass(frozen=True, slots=True)
class DenseFile:
    """A dense layer after the pooling: its weights are in `path`."""

    path: Path
    inputs: int
    outputs: int
    has_bias: bool
    activation: DenseActivation
    has_residual: bool  # the vector is added to the result, through a matrix where the two differ in size
    scores: bool  # gives scores instead of a vector


@dataclass(frozen=True, slots=True)
class NormFile:
    """A layer norm after the pooling: its weights are in `path`."""

    path: Path
    inputs: int

    @property
    def outputs(self) -> int:
        return self.inputs


@dataclass(frozen=True, slots=True)
class Modules:
    pooling: Fields | None = None
    layers: tuple[DenseFile | NormFile, ...] = ()
    normalizes: bool = True
    score_tokens: tuple[int, int | None] | None = None

    @property
    def num_scores(self) -> int | None:
        """The number of scores that the layers give; None where they give a vector."""
        last = self.layers[-1] if self.layers else None
        return last.outputs if isinstance(last, DenseFile) and last.scores else None


def read_modules(folder: Path) -> Modules:
    listed = _read_list(folder / "modules.json")
    if listed is None:
        alone = folder / "1_Pooling" / "config.json"
        return Modules(pooling=optional_fields(alone)) if alone.exists() else Modules()
    found = Modules(normalizes=False)
    for module in listed:
        kind = str(module.get("type", "")).rpartition(".")[2]
        name = module.get("path", "")
        settings = optional_fields(_inside(folder, name) / "config.json") if name else None
        takes_vectors = found.pooling is not None and not found.normalizes and found.num_scores is None
        match kind, settings:
            case ("Transformer", None) | ("Dropout", _):
                pass
            case "Normalize", _ if settings is None or _input(settings) == _VECTOR:
                found = replace(found, normalizes=True)
            case "Pooling", Fields() if found.pooling is None and not found.layers:
                found = replace(found, pooling=settings)
            case "Dense", Fields() if takes_vectors:
                found = replace(found, layers=(*found.layers, _dense(settings)))
            case "LayerNorm", Fields() if takes_vectors:
                norm = NormFile(_weights(settings), settings.integer("dimension"))
                found = replace(found, layers=(*found.layers, norm))
            case "LogitScore", Fields():
                found = replace(found, score_tokens=_score_tokens(settings))
            case _:
                raise ModelLoadError(
                    f"{folder / 'modules.json'} has the module {kind!r} at {name!r}, which is not known there; known "
                    "are Transformer, Pooling, then Dense, LayerNorm and Normalize of its vector, or LogitScore."
                )
    return found


def _input(settings: Fields) -> str:
    return settings.text("module_input_name", _VECTOR)


def _score_tokens(settings: Fields) -> tuple[int, int | None]:
    true, false = settings.token_ids("true_token_id"), settings.token_ids("false_token_id")
    if not true:
        raise ModelLoadError(f"{settings.where} has no true_token_id.")
    return true[0], false[0] if false else None


def _dense(settings: Fields) -> DenseFile:
    named = settings.text("activation_function", "torch.nn.modules.activation.Tanh")
    activation = _ACTIVATIONS.get(named.rpartition(".")[2])
    output = settings.text("module_output_name", _VECTOR)
    if activation is None or _input(settings) != _VECTOR or output not in (_VECTOR, _SCORES):
        raise ModelLoadError(
            f"{settings.where} describes a dense layer with the activation {named!r}, an input or an output that is "
            f"not known; known activations are {', '.join(_ACTIVATIONS)}."
        )
    return DenseFile(
        _weights(settings),
        settings.integer("in_features"),
        settings.integer("out_features"),
        settings.flag("bias", True),
        activation,
        has_residual=settings.flag("use_residual", False),
        scores=output == _SCORES,
    )


def _weights(settings: Fields) -> Path:
    path = Path(settings.where).parent / "model.safetensors"
    if not path.exists():
        raise ModelLoadError(
            f"{path.parent} has no model.safetensors, the weights of a layer after the pooling."
        )
    return path


def pooling_mode(settings: Fields) -> Pooling:
    """Read the kind of a pooling."""
    modes = settings.raw("pooling_mode")
    if modes is None:
        prefix = "pooling_mode_"
        modes = [
            key.removeprefix(prefix)
            for key, value in settings.values.items()
            if key.startswith(prefix) and value is True
        ] or ["mean"]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelLoadError(
            f"{settings.where} asks for {' and '.join(map(str, modes))}; known is one of "
            "mean_tokens, cls_token, lasttoken, weightedmean_tokens and max_tokens."
        )
    if not settings.flag("include_prompt", True):
        raise ModelLoadError(f"{settings.where} leaves prompts out of the pooling, which is not done here.")
    return _POOLINGS[modes[0]]


def _inside(folder: Path, name: str) -> Path:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ModelLoadError(f"{folder / 'modules.json'} names the path {name!r} outside of the folder.")
    return folder / name


def _read_list(path: Path) -> list[dict[str, Any]] | None:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON.", hint="Fetch the file again.") from error
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ModelLoadError(f"{path} does not hold a list of modules.")
    return listed


def optional_fields(path: Path) -> Fields:
    """Return the fields of a file; none, when there is no such file."""
    return Fields(read_settings(path) or {}, str(path))
