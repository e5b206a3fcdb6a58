"""Reads the files that turn text into tokens and back from a Hugging Face folder.

Imports no torch. Encodes no text of users: the files travel to the gateway, which does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from penstock.core.errors import ModelLoadError
from penstock.models.config import Fields, read_settings
from penstock.models.generation import DEFAULT_TEMPLATE, folder_templates
from penstock.models.tokenizer_files import converted_tokenizer

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The fields of `core.messages.ModelCard` that concern text."""

    tokenizer_json: bytes
    chat_template: str | None
    special_tokens: dict[str, str]
    bos_token_id: int | None
    add_bos_token: bool
    eos_token_ids: tuple[int, ...]
    named_templates: dict[str, str] = field(default_factory=dict)  # further chat templates


def tokenizer_from_folder(folder: Path) -> TokenizerFiles | None:
    """Read the tokenizer of a folder; None when the folder has no tokenizer at all."""
    path = folder / "tokenizer.json"
    defaults: Mapping[str, Any] = {}
    if path.exists():
        tokenizer_json = path.read_bytes()
    else:
        converted = converted_tokenizer(folder, read_settings(folder / "tokenizer_config.json") or {})
        if converted is None:
            return None
        tokenizer_json, defaults = converted.tokenizer_json, converted.defaults
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
        raise ModelLoadError(
            f"{path} is not a valid tokenizer: {error}.", hint="Fetch the file again."
        ) from error
    settings = {**defaults, **(read_settings(folder / "tokenizer_config.json") or {})}
    config = read_settings(folder / "config.json") or {}
    special_tokens = _special_tokens(settings, read_settings(folder / "special_tokens_map.json") or {})
    bos_token_id = _bos_token_id(tokenizer, special_tokens, config)
    templates = folder_templates(folder, settings)
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        chat_template=templates.pop(DEFAULT_TEMPLATE, None),
        named_templates=templates,
        special_tokens=special_tokens,
        bos_token_id=bos_token_id,
        add_bos_token=bos_token_id is not None and _adds_bos(tokenizer, settings, bos_token_id),
        eos_token_ids=_eos_token_ids(folder, tokenizer, special_tokens, config),
    )


def numbered_tokenizer_json(vocab_size: int) -> bytes:
    """Return a `tokenizers` file in which token i is the word i, for models without a tokenizer, such as random
    weights."""
    vocabulary = {str(token_id): token_id for token_id in range(vocab_size)}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "0"},
        }
    ).encode()


def distinct(token_ids: Iterable[int | None]) -> tuple[int, ...]:
    """Return each id once, in order of first appearance."""
    return tuple(dict.fromkeys(token_id for token_id in token_ids if token_id is not None))


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for settings in sources:
        for name in _SPECIAL_NAMES:
            value = settings.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found.setdefault(name, value)
    return found


def _bos_token_id(
    tokenizer: Tokenizer, special_tokens: Mapping[str, str], config: Mapping[str, Any]
) -> int | None:
    if "bos_token" in special_tokens:
        return tokenizer.token_to_id(special_tokens["bos_token"])
    token_ids = Fields(config, "config.json").token_ids("bos_token_id")
    return token_ids[0] if token_ids else None


def _adds_bos(tokenizer: Tokenizer, settings: Mapping[str, Any], bos_token_id: int) -> bool:
    stated = settings.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    return tokenizer.encode("a", add_special_tokens=True).ids[:1] == [bos_token_id]


def _eos_token_ids(
    folder: Path, tokenizer: Tokenizer, special_tokens: Mapping[str, str], config: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the end tokens of all files: chat models often list the end of a turn in one and of a text in
    another."""
    generation = read_settings(folder / "generation_config.json") or {}
    text_config = config.get("text_config")
    listed = [
        Fields(values, name).token_ids("eos_token_id")
        for name, values in (
            ("generation_config.json", generation),
            ("config.json", config),
            ("config.json", text_config if isinstance(text_config, dict) else {}),
        )
    ]
    named = [tokenizer.token_to_id(special_tokens["eos_token"])] if "eos_token" in special_tokens else []
    return distinct([*(token_id for token_ids in listed for token_id in token_ids), *named])
