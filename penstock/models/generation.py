"""Reads what the makers of a model say about its use: sampling defaults and chat templates. Imports no torch.

Sampling defaults are in `generation_config.json`, or in the metadata `general.sampling.*` of a GGUF file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.engine_config import MAX_TEMPLATE_BYTES, ModelConfig, parse_sampling_override
from penstock.core.errors import ConfigError, ModelLoadError
from penstock.core.request import SamplingDefaults
from penstock.models.config import read_settings
from penstock.models.gguf_file import GGUFFile

logger = logging.getLogger(__name__)

AUTO, NOTHING = "auto", ("none", "vllm")
FILE = "generation_config.json"
DEFAULT_TEMPLATE = "default"
_GGUF_PREFIX = "general.sampling."
# By the name in GGUF metadata. A penalty over fewer than all tokens (penalty_last_n) has no like here.
_GGUF_NAMES = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def sampling_defaults(config: ModelConfig, path: Path) -> SamplingDefaults:
    """Return the sampling defaults of the model at `path`, as the flags of the server say. Raises ConfigError when
    the flags name a folder without the file."""
    stated: Mapping[str, Any] = {}
    where = config.generation_config
    if where == AUTO:
        stated = makers_defaults(path).stated()
    elif where not in NOTHING:
        folder = Path(where).expanduser()
        settings = read_settings(folder if folder.is_file() else folder / FILE)
        if settings is None:
            raise ConfigError(f"--generation-config names {where}, which has no {FILE}.")
        stated = _known(settings, where).stated()
    return msgspec.convert(
        {**stated, **parse_sampling_override(config.override_generation_config)}, SamplingDefaults
    )


def makers_defaults(path: Path) -> SamplingDefaults:
    """Return the sampling defaults in a model's files. An invalid value is skipped with a warning."""
    if path.is_dir():
        return _known(read_settings(path / FILE) or {}, FILE)
    metadata = GGUFFile(path).metadata
    given = {name: metadata.get(_GGUF_PREFIX + key) for key, name in _GGUF_NAMES.items()}
    return _known(given, path.name)


def _known(settings: Mapping[str, Any], where: str) -> SamplingDefaults:
    """Return the defaults among the settings. `do_sample: false` asks for the most probable token."""
    given: dict[str, Any] = {}
    for name in SamplingDefaults.__struct_fields__:
        value = settings.get(name)
        if value is None:
            continue
        try:
            msgspec.convert({name: value}, SamplingDefaults)
        except msgspec.ValidationError as error:
            logger.warning("%s: the sampling default %s is passed over: %s", where, name, error)
        else:
            given[name] = value
    if settings.get("do_sample") is False:
        given["temperature"] = 0.0
    return msgspec.convert(given, SamplingDefaults)


def folder_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a folder by name. Files win over the entry in tokenizer_config.json."""
    listed = settings.get("chat_template")
    if listed is None:
        listed = (read_settings(folder / "chat_template.json") or {}).get("chat_template")
    found: dict[str, str] = {}
    if isinstance(listed, str):
        found[DEFAULT_TEMPLATE] = listed
    elif isinstance(listed, list):
        pairs = ((each.get("name"), each.get("template")) for each in listed if isinstance(each, dict))
        found |= {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    elif isinstance(listed, dict):
        found |= {name: text for name, text in listed.items() if isinstance(text, str)}
    own = folder / "chat_template.jinja"
    named = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, file in {**named, **({DEFAULT_TEMPLATE: own} if own.is_file() else {})}.items():
        found[name] = _read_template(file)
    return _with_default(found)


def gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates in GGUF metadata by name."""
    prefix = "tokenizer.chat_template"
    found = {key[len(prefix) + 1 :]: text for key, text in metadata.items() if key.startswith(prefix + ".")}
    found[DEFAULT_TEMPLATE] = metadata.get(prefix)
    return _with_default({name: text for name, text in found.items() if isinstance(text, str)})


def _with_default(found: dict[str, str]) -> dict[str, str]:
    if len(found) == 1:  # whatever its name, it is the model's only one
        return dict.fromkeys((DEFAULT_TEMPLATE,), *found.values())
    return found


def _read_template(file: Path) -> str:
    if file.stat().st_size > MAX_TEMPLATE_BYTES:
        raise ModelLoadError(f"{file} is larger than any chat template.")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{file} is not a text in UTF-8.", hint="Fetch the file again.") from error
