"""Reads tokenizers that are not in `tokenizer.json`: SentencePiece's `tokenizer.model`, Mistral's `tekken.json`,
tiktoken's ranks, and `vocab.json` with `merges.txt`. Each becomes a Hugging Face `tokenizers` file. Imports no torch,
and needs none of those libraries.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.errors import ModelLoadError
from penstock.models.split_rules import SPLIT_RULES, SplitRule
from penstock.models.tokenizer_build import (
    NORMAL,
    Json,
    SentencePieceSettings,
    added_tokens,
    byte_level,
    merges_from_scores,
    ranked_bytes,
    sentencepiece,
    unigram,
)

_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
# Classes whose tiktoken files come without the pattern that cuts text.
_TIKTOKEN_RULES = {
    "QWenTokenizer": "qwen2",
    "ChatGLM4Tokenizer": "chatglm-bpe",
    "TikTokenTokenizer": "kimi-k2",
}
# Classes that put the first token before a text unless they are told otherwise.
_ADD_BOS = ("Llama", "CodeLlama", "Gemma", "Mistral")


@dataclass(frozen=True, slots=True)
class Converted:
    tokenizer_json: bytes
    defaults: Mapping[str, Any]  # for what tokenizer_config.json does not say


def converted_tokenizer(folder: Path, settings: Mapping[str, Any]) -> Converted | None:
    """Convert the tokenizer of a folder without tokenizer.json; None if there is none. `settings` are those of
    tokenizer_config.json. Raises ModelLoadError for a tokenizer that cannot be converted."""
    readers: list[tuple[str, Callable[[Path, Mapping[str, Any]], Json]]] = [
        ("tekken.json", _tekken),
        ("tokenizer.model", _sentencepiece_or_ranks),
        ("spiece.model", _sentencepiece_or_ranks),
        ("sentencepiece.bpe.model", _sentencepiece_or_ranks),
        ("tiktoken.model", _tiktoken),
        ("vocab.json", _vocabulary_and_merges),
    ]
    readers += [(path.name, _tiktoken) for path in sorted(folder.glob("*.tiktoken"))]
    for name, read in readers:
        path = folder / name
        if path.is_file():
            try:
                built = read(path, settings)
            except (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error) as error:
                raise ModelLoadError(
                    f"{path} is not a valid tokenizer: {error}.", hint="Fetch the file again."
                ) from error
            _add_listed(built, folder, settings)
            return Converted(msgspec.json.encode(built), _defaults(built, settings))
    return None


def _defaults(built: Json, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first and last token by their usual names, and that the first one is added, as the libraries do."""
    known = {each["content"] for each in built["added_tokens"]}
    found = {
        name: next((token for token in tokens if token in known), None)
        for name, tokens in (("bos_token", ("<s>", "<bos>")), ("eos_token", ("</s>", "<eos>")))
    }
    is_named = str(settings.get("tokenizer_class", "LlamaTokenizer")).startswith(_ADD_BOS)
    return {**{name: token for name, token in found.items() if token}, "add_bos_token": is_named}


def _sentencepiece_or_ranks(path: Path, settings: Mapping[str, Any]) -> Json:
    # Llama 3 keeps tiktoken's lines of base64 under the name that SentencePiece had.
    is_ranks = re.match(rb"[A-Za-z0-9+/]+=* \d+\s", path.read_bytes()[:4096]) is not None
    return _tiktoken(path, settings) if is_ranks else _sentencepiece(path, settings)


def _sentencepiece(path: Path, settings: Mapping[str, Any]) -> Json:
    """Read SentencePiece's file, a protocol buffer: pieces (1), settings of the trainer (2) and normalizer (3)."""
    tokens, types, scores = list[str](), list[int](), list[float]()
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _message(path.read_bytes()):
        if number == 1:
            piece = dict(_message(value))
            tokens.append(piece[1].decode())
            scores.append(struct.unpack("<f", piece.get(2, b"\0\0\0\0"))[0])
            types.append(piece.get(3, NORMAL))
        elif number == 2:
            trainer = dict(_message(value))
        elif number == 3:
            normalizer = dict(_message(value))
    kind = _MODEL_TYPES.get(trainer.get(3, 1))
    prefixes_space = bool(normalizer.get(3, 1)) and settings.get("add_prefix_space") is not False
    match kind:
        case "bpe":
            merges = merges_from_scores(tokens, types, scores)
            built = sentencepiece(tokens, types, merges, prefixes_space=prefixes_space)
        case "unigram":
            prepares = SentencePieceSettings(
                normalizer.get(2, b""), prefixes_space, bool(normalizer.get(4, 1))
            )
            built = unigram(tokens, types, scores, prepares)
        case _:
            raise ModelLoadError(
                f"{path} is a SentencePiece model of {kind or 'unknown'} type; known are bpe and unigram."
            )
    built["added_tokens"] = added_tokens(tokens, types)
    return built


def _message(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protocol buffer: numbers as int, and all else as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        size, at = _varint(data, at) if wire == 2 else ({1: 8, 5: 4}.get(wire, len(data)), at)
        if at + size > len(data):
            raise ValueError("it ends inside a field")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number in it is too long")


def _tekken(path: Path, settings: Mapping[str, Any]) -> Json:
    """Read Mistral's file: special tokens come first, then `default_vocab_size` tokens less those."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    config = stored["config"]
    num_special = int(config["default_num_special_tokens"])
    named = {int(each["rank"]): str(each["token_str"]) for each in stored.get("special_tokens") or []}
    specials = {named.get(index, f"<SPECIAL_{index}>"): index for index in range(num_special)}
    count = int(config["default_vocab_size"]) - num_special
    ranks = {base64.b64decode(each["token_bytes"]): int(each["rank"]) for each in stored["vocab"][:count]}
    rule = SplitRule((str(config["pattern"]),), whole_words=True)
    return ranked_bytes(ranks, specials, rule, str(path), first_id=num_special)


def _tiktoken(path: Path, settings: Mapping[str, Any]) -> Json:
    """Read lines of a token in base64 and its rank."""
    name = str(settings.get("tokenizer_class", ""))
    if name not in _TIKTOKEN_RULES:
        raise ModelLoadError(
            f"{path} has ranks alone, and the pattern that cuts text is in the code of {name or 'the model'}.",
            hint="Load the tokenizer with transformers and save it again; that writes tokenizer.json.",
        )
    lines = [line.split() for line in path.read_bytes().splitlines() if line.strip()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    return ranked_bytes(ranks, {}, SPLIT_RULES[_TIKTOKEN_RULES[name]], str(path))


def _vocabulary_and_merges(path: Path, settings: Mapping[str, Any]) -> Json:
    """Read GPT-2's two files."""
    merges_file = path.with_name("merges.txt")
    if not merges_file.is_file():
        raise ModelLoadError(f"{path.parent} has vocab.json and no merges.txt.")
    vocabulary = {
        str(token): int(token_id) for token, token_id in json.loads(path.read_text("utf-8")).items()
    }
    merges = [
        line
        for line in merges_file.read_text("utf-8").splitlines()
        if line and not line.startswith("#version")
    ]
    rule = SPLIT_RULES["qwen2" if settings.get("tokenizer_class") == "Qwen2Tokenizer" else "gpt-2"]
    built = byte_level(sorted(vocabulary, key=vocabulary.__getitem__), merges, rule, str(path))
    built["model"]["vocab"] = vocabulary
    return built


def _add_listed(built: Json, folder: Path, settings: Mapping[str, Any]) -> None:
    """Add the tokens that tokenizer_config.json or added_tokens.json lists."""
    added = {each["id"]: each for each in built.setdefault("added_tokens", [])}
    listed = settings.get("added_tokens_decoder")
    for token_id, entry in listed.items() if isinstance(listed, dict) else ():
        flags = {
            name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")
        }
        is_special = bool(entry.get("special", True))
        added[int(token_id)] = {
            "id": int(token_id),
            "content": entry["content"],
            "special": is_special,
            **flags,
        }
    more = folder / "added_tokens.json"
    for token, token_id in json.loads(more.read_text("utf-8")).items() if more.is_file() else ():
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        added.setdefault(int(token_id), {"id": int(token_id), "content": token, **flags})
    built["added_tokens"] = [added[token_id] for token_id in sorted(added)]
    vocabulary = built["model"]["vocab"]
    if isinstance(vocabulary, dict):  # added tokens keep their ids only if the vocabulary has them
        for each in built["added_tokens"]:
            vocabulary.setdefault(each["content"], each["id"])
