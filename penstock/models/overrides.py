"""Settings that a user puts in the place of those in a model's `config.json`: `--hf-overrides`.

Many readers want the file: families, encoders, tokenizers, and the code of transformers. They all get a folder of
links to the model's files, in which `config.json` alone is another one.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from penstock.core.engine_config import ModelConfig, parse_hf_overrides
from penstock.core.errors import ConfigError, ModelLoadError
from penstock.models.config import read_settings, recorded_reads
from penstock.models.encoders.load import encoder_for, is_encoder
from penstock.models.load import open_any_checkpoint
from penstock.models.pooling import read_pooling
from penstock.models.sentence_modules import optional_fields
from penstock.models.transformers_config import rope_settings
from penstock.models.transformers_load import TransformersCheckpoint

_FLAG = "--hf-overrides"
_ROPE = ("rope_parameters", "rope_scaling")  # the newer and the older name of the same settings
_BASE = "rope_theta"
_PART = "_config"  # the end of the name of a part, of which the settings are replaced one by one
_TEXT_PARTS = ("text_config", "llm_config")


def overridden(path: Path, model: ModelConfig) -> Path:
    """Return a folder with the model's files and the user's settings, which lasts as long as the process; `path`
    where the user has none. Raises ConfigError for a setting that nothing reads, ModelLoadError for a wrong value."""
    overrides = parse_hf_overrides(model.hf_overrides)
    if not overrides:
        return path
    stated = read_settings(path / "config.json") if path.is_dir() else None
    if stated is None:
        raise ConfigError(
            f"{_FLAG} changes settings of a config.json, and {path.name} has none.",
            hint="Give the model's folder in Hugging Face form.",
        )
    home = Path(mkdtemp(prefix="penstock-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    folder = home.joinpath(*path.resolve().parts[1:])  # some models are known by the names of their folders
    shutil.copytree(path.resolve(), folder, copy_function=os.symlink)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(merged(stated, overrides)), encoding="utf-8")
    try:
        known = _settings_read(folder, model)
    except ModelLoadError as error:
        raise ModelLoadError(
            error.message.replace(str(folder), str(path)),
            hint=error.hint or f"Settings that {_FLAG} changes: {', '.join(overrides)}.",
        ) from error
    _refuse_unknown(overrides, stated, known)
    return folder


def merged(stated: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the file with those of the user in their place. Those of a part, such as `text_config`,
    are replaced one by one."""
    made = {**stated, **overrides}
    for key, value in overrides.items():
        old = stated.get(key)
        if key.endswith(_PART) and isinstance(old, dict) and isinstance(value, dict):
            made[key] = merged(old, value)
    if overrides.keys().isdisjoint((*_ROPE, _BASE)):
        return made
    name = next((key for key in _ROPE if stated.get(key)), _ROPE[1])  # that the file has for settings of rope
    rope = _merged_rope(stated.get(name) or {}, overrides)
    if _BASE in rope and _BASE not in stated:
        made.pop(_BASE, None)
    return {key: value for key, value in made.items() if key not in _ROPE} | {name: rope or None}


def _merged_rope(stated: Any, overrides: Mapping[str, Any]) -> Any:
    """Return the settings of rope. They keep what all kinds of rope have, and do not say how long a context is."""
    given = next((overrides[key] for key in _ROPE if key in overrides), stated)
    if not isinstance(stated, dict) or not isinstance(given, dict | None):
        return given
    rope = {key: stated[key] for key in (_BASE, "partial_rotary_factor") if key in stated} | (given or {})
    if _BASE in overrides and any(isinstance(each, dict) for each in rope.values()):
        raise ConfigError(
            f"{_FLAG} has one {_BASE}, and the model has one for each kind of layer.",
            hint="Give rope_parameters with the settings of every kind.",
        )
    return rope | ({_BASE: overrides[_BASE]} if _BASE in overrides and _BASE in rope else {})


def _settings_read(folder: Path, model: ModelConfig) -> set[str]:
    """Read the settings as the engine will, and return the names of all that were looked for."""
    with recorded_reads() as names:
        names |= {*_ROPE, _BASE}
        if is_encoder(folder):
            fields = optional_fields(folder / "config.json")
            read_pooling(folder, fields, is_decoder=False)
            if (encoder := encoder_for(fields)) is not None:
                encoder.read_config(fields)
            return names
        opened = open_any_checkpoint(
            folder, model.model_implementation, trust_remote_code=model.trust_remote_code
        )
    if isinstance(opened, TransformersCheckpoint):
        names |= rope_settings()
        for settings in (opened.settings, opened.settings.get_text_config()):
            names |= {*dir(type(settings)), *getattr(settings, "attribute_map", ())}
    return names


def _refuse_unknown(overrides: Mapping[str, Any], stated: Mapping[str, Any], known: set[str]) -> None:
    """Refuse settings that the file does not have and nothing reads. A model with parts has the settings of its
    language model in one of them."""
    parts = {name: each for name, each in stated.items() if name.endswith(_PART) and isinstance(each, dict)}
    for key, value in overrides.items():
        if key in stated or (key in known and not parts.keys() & {*_TEXT_PARTS}):
            if isinstance(value, dict) and (key in parts or key in _ROPE):
                _refuse_unknown(value, parts.get(key, {}), known)
            continue
        where = [
            name for name, part in parts.items() if key in part or (key in known and name in _TEXT_PARTS)
        ]
        if where:
            raise ConfigError(
                f"{_FLAG} has {key}, which this model has in its {where[0]}.",
                hint=f'Write {{"{where[0]}": {{"{key}": …}}}}.',
            )
        raise ConfigError(f"{_FLAG} has the setting {key!r}, which nothing reads of this model.")
