"""Builds a Hugging Face `tokenizers` file from the vocabulary inside a GGUF file. Imports no torch.

Two kinds exist: byte-level BPE with merges ("gpt2"), which splits text by a rule that GGUF only names; and
SentencePiece ("llama"), which stores scores in place of merges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.core.errors import ModelLoadError
from penstock.models.config import Fields
from penstock.models.generation import DEFAULT_TEMPLATE, gguf_templates
from penstock.models.gguf_file import GGUFFile
from penstock.models.tokenizer import TokenizerFiles, distinct

# GGUF token types.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

# Control tokens that end an answer in any vocabulary; metadata often names only one.
_END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
)
_SPACE = "▁"  # SentencePiece's space

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _SplitRule:
    """The rule that cuts text before merging: a pattern, or GPT-2's own, perhaps after isolating digits."""

    pattern: str | None = None
    isolate_digits: bool = False
    normalize: bool = False  # Unicode NFC
    whole_words: bool = False  # a piece that is in the vocabulary is not built by merges
    adds_bos: bool = False  # unless the metadata says otherwise


def _words_then(digits: str, *, words: str = r"\p{L}+", after_symbols: str = r"[\r\n]*") -> str:
    """Return a pattern of the family that began with GPT-4: contractions, words, digits, symbols, line ends,
    spaces."""
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    return "|".join(
        [
            contractions,
            rf"[^\r\n\p{{L}}\p{{N}}]?{words}",
            digits,
            rf" ?[^\s\p{{L}}\p{{N}}]+{after_symbols}",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    )


_LLAMA3 = _SplitRule(pattern=_words_then(r"\p{N}{1,3}"), whole_words=True, adds_bos=True)
_QWEN2 = _SplitRule(pattern=_words_then(r"\p{N}"), normalize=True)
_GPT2 = _SplitRule()
_DIGITS_THEN_GPT2 = _SplitRule(isolate_digits=True)
_SPLIT_RULES: Mapping[str, _SplitRule] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def tokenizer_from_gguf(file: GGUFFile) -> TokenizerFiles:
    fields = Fields(file.metadata, file.path.name, prefix="tokenizer.ggml.")
    tokens = _strings(fields, "tokens")
    types = (
        _per_token(fields, "token_type", int, tokens) if fields.has("token_type") else [_NORMAL] * len(tokens)
    )
    kind = fields.text("model")
    if kind == "gpt2":
        pre = fields.text("pre", "default")
        if pre not in _SPLIT_RULES:
            raise ModelLoadError(
                f"{fields.where} splits text by the rule {pre!r}; known are {', '.join(_SPLIT_RULES)}."
            )
        rule = _SPLIT_RULES[pre]
        tokenizer, adds_bos = _byte_level(fields, tokens, rule), rule.adds_bos
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(fields, tokens, types), True
    else:
        raise ModelLoadError(f"{fields.where} has a tokenizer of kind {kind!r}; known are gpt2 and llama.")
    tokenizer["added_tokens"] = _added_tokens(tokens, types)
    bos_token_id = _token_id(fields, "bos_token_id", tokens)
    templates = gguf_templates(file.metadata)
    return TokenizerFiles(
        tokenizer_json=msgspec.json.encode(tokenizer),
        chat_template=templates.pop(DEFAULT_TEMPLATE, None),
        named_templates=templates,
        special_tokens=_special_tokens(fields, tokens),
        bos_token_id=bos_token_id,
        add_bos_token=bos_token_id is not None and fields.flag("add_bos_token", adds_bos),
        eos_token_ids=_eos_token_ids(fields, tokens, types),
    )


def _byte_level(fields: Fields, tokens: Sequence[str], rule: _SplitRule) -> Json:
    vocabulary = _vocabulary(tokens)
    merges = []
    for merge in _strings(fields, "merges"):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelLoadError(f"{fields.where} merges {merge!r}, which is not in its vocabulary.")
        merges.append((left, right))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    steps: list[Json] = [byte_level]
    if rule.isolate_digits:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    if rule.pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": rule.pattern}, "behavior": "Isolated", "invert": False}
        steps = [split, {**byte_level, "use_regex": False}]
    return {
        "version": "1.0",
        "normalizer": {"type": "NFC"} if rule.normalize else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": byte_level,
        "model": _bpe(vocabulary, merges, ignore_merges=rule.whole_words),
    }


def _sentencepiece(fields: Fields, tokens: Sequence[str], types: Sequence[int]) -> Json:
    scores = _per_token(fields, "scores", float, tokens)
    vocabulary = _vocabulary(tokens)
    normalizers: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if fields.flag("add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((token for token, type_ in zip(tokens, types, strict=True) if type_ == _UNKNOWN), None)
    merges = _merges_from_scores(tokens, types, scores, vocabulary)
    return {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown),
    }


def _merges_from_scores(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Return SentencePiece's scores as merges. SentencePiece joins the neighbours whose union scores best: the merges
    are all ways to cut a piece into two pieces, the best pieces first."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, type_, score in zip(tokens, types, scores, strict=True):
        if type_ not in (_NORMAL, _USER_DEFINED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-score, vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _bpe(vocabulary: Mapping[str, int], merges: list[tuple[str, str]], **settings: Any) -> Json:
    common = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {**common, **settings, "vocab": vocabulary, "merges": merges}


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocabulary.setdefault(token, token_id)
    return vocabulary


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[Json]:
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": type_ != _USER_DEFINED,
        }
        for token_id, (token, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _special_tokens(fields: Fields, tokens: Sequence[str]) -> dict[str, str]:
    keys = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    found = {name: _token_id(fields, key, tokens) for name, key in keys.items()}
    return {name: tokens[token_id] for name, token_id in found.items() if token_id is not None}


def _eos_token_ids(fields: Fields, tokens: Sequence[str], types: Sequence[int]) -> tuple[int, ...]:
    named = [_token_id(fields, key, tokens) for key in ("eos_token_id", "eot_token_id")]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens) if types[token_id] == _CONTROL}
    return distinct([*named, *(vocabulary.get(token) for token in _END_TOKENS)])


def _token_id(fields: Fields, key: str, tokens: Sequence[str]) -> int | None:
    token_ids = fields.token_ids(key)
    if not token_ids:
        return None
    if token_ids[0] >= len(tokens):
        raise ModelLoadError(f"{fields.where} has {key} {token_ids[0]}, past its {len(tokens)} tokens.")
    return token_ids[0]


def _strings(fields: Fields, key: str) -> list[str]:
    values = fields.raw(key)
    if not isinstance(values, list) or not values or not isinstance(values[0], str):
        raise ModelLoadError(f"{fields.where} has no list of {key} for its tokenizer.")
    return values


def _per_token(fields: Fields, key: str, kind: type, tokens: Sequence[str]) -> list[Any]:
    values = fields.raw(key)
    if not isinstance(values, list) or len(values) != len(tokens) or not isinstance(values[0], kind):
        raise ModelLoadError(f"{fields.where} has no {key} for each of its {len(tokens)} tokens.")
    return values
