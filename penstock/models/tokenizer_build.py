"""Builds Hugging Face `tokenizers` files from vocabularies: byte-level BPE with merges or ranks, and SentencePiece's
pieces with scores. Imports no torch, and opens no file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import ModelLoadError
from penstock.models.split_rules import SplitRule

# Kinds of tokens, as SentencePiece and GGUF number them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"  # SentencePiece's space

Json = dict[str, Any]


def byte_level(tokens: Sequence[str], merges: Sequence[str], rule: SplitRule, where: str) -> Json:
    """Build a byte-level BPE. A merge is two tokens with a space between them."""
    vocabulary = _vocabulary(tokens)
    pairs = merge_pairs(vocabulary, merges, where)
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    steps: list[Json] = [by_bytes]
    if rule.isolate_digits:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    if rule.patterns:
        splits: list[Json] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in rule.patterns
        ]
        steps = [*splits, {**by_bytes, "use_regex": False}]
    return {
        "version": "1.0",
        "normalizer": {"type": "NFC"} if rule.normalize else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": by_bytes,
        "model": _bpe(vocabulary, pairs, ignore_merges=rule.whole_words),
    }


def merge_pairs(
    vocabulary: Mapping[str, int] | Set[str], merges: Sequence[str], where: str
) -> list[tuple[str, str]]:
    """Cut merges, each of which is two tokens with a space between them."""
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelLoadError(f"{where} merges {merge!r}, which is not in its vocabulary.")
        pairs.append((left, right))
    return pairs


def sentencepiece(
    tokens: Sequence[str], types: Sequence[int], merges: list[tuple[str, str]], *, prefixes_space: bool
) -> Json:
    """Build the BPE of SentencePiece pieces."""
    vocabulary = _vocabulary(tokens)
    normalizers: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixes_space:
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((token for token, type_ in zip(tokens, types, strict=True) if type_ == UNKNOWN), None)
    return {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown),
    }


def wordpiece(tokens: Sequence[str], where: str) -> tuple[list[str], Json]:
    """Build BERT's WordPiece from GGUF's form of a vocabulary, in which "▁" begins the tokens that begin a word.
    Returns BERT's form of the tokens too. Only a vocabulary without capitals is for text in lower case."""
    own = [
        token
        if token.startswith("[") and token.endswith("]")
        else token.removeprefix(_SPACE)
        if token.startswith(_SPACE)
        else f"##{token}"
        for token in tokens
    ]
    vocabulary = _vocabulary(own)
    missing = {"[UNK]", "[CLS]", "[SEP]"} - vocabulary.keys()
    if missing:
        raise ModelLoadError(f"{where} has no token {min(missing)}, which WordPiece needs.")
    tokenizer = {
        "version": "1.0",
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": not any(token != token.lower() for token in own if not token.startswith("[")),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": ends_template(vocabulary, "[CLS]", "[SEP]", numbers_texts=True),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocabulary,
        },
    }
    return own, tokenizer


def ends_template(
    vocabulary: Mapping[str, int], first: str | None, last: str | None, *, numbers_texts: bool
) -> Json:
    """Return the template that puts tokens around a text, or two. BERT numbers the texts, and has one token between
    them; RoBERTa does not, and has two."""

    def token(name: str | None, text: int = 0) -> list[Json]:
        return [] if name is None else [{"SpecialToken": {"id": name, "type_id": text}}]

    text, second = (
        {"Sequence": {"id": name, "type_id": int(name == "B" and numbers_texts)}} for name in "AB"
    )
    between = token(last) if numbers_texts else token(last) * 2
    return {
        "type": "TemplateProcessing",
        "single": [*token(first), text, *token(last)],
        "pair": [*token(first), text, *between, second, *token(last, int(numbers_texts))],
        "special_tokens": {
            name: {"id": name, "ids": [vocabulary[name]], "tokens": [name]}
            for name in (first, last)
            if name is not None
        },
    }


def merges_from_scores(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return SentencePiece's scores as merges. SentencePiece joins the neighbours whose union scores best: the merges
    are all ways to cut a piece into two pieces, the best pieces first."""
    vocabulary = _vocabulary(tokens)
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, type_, score in zip(tokens, types, scores, strict=True):
        if type_ not in (NORMAL, USER_DEFINED):
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


def _added(token_id: int, token: str, *, is_special: bool = True) -> Json:
    return {
        "id": token_id,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": is_special,
    }


def added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[Json]:
    return [
        _added(token_id, token, is_special=type_ != USER_DEFINED)
        for token_id, (token, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


@dataclass(frozen=True, slots=True)
class SentencePieceSettings:
    """SentencePiece's settings for the normalization of text."""

    characters: bytes = b""  # its compiled table of characters that stand for others
    prefixes_space: bool = True
    removes_extra_spaces: bool = True


def unigram(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], settings: SentencePieceSettings
) -> Json:
    """Build SentencePiece's unigram model, which takes the most probable pieces."""
    normalizers: list[Json] = []
    if settings.characters:
        charsmap = base64.b64encode(settings.characters).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if settings.removes_extra_spaces:
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
        normalizers.append({"type": "Strip", "strip_left": True, "strip_right": True})
    scheme = "always" if settings.prefixes_space else "never"
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": True}
    unknown = next((index for index, type_ in enumerate(types) if type_ == UNKNOWN), None)
    return {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": metaspace,
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": list(zip(tokens, scores, strict=True)),
            "byte_fallback": BYTE in types,
        },
    }


def _byte_letters() -> list[str]:
    """Return the letters that stand for bytes in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    return [letters[byte] if byte in letters else chr(256 + others.index(byte)) for byte in range(256)]


_LETTERS = _byte_letters()


def ranked_bytes(
    ranks: Mapping[bytes, int], specials: Mapping[str, int], rule: SplitRule, where: str, first_id: int = 0
) -> Json:
    """Build a byte-level BPE from ranked byte sequences, as tiktoken stores them: the pair whose union has the lowest
    rank is merged first. The token of rank 0 gets `first_id`."""
    if sorted(ranks.values()) != list(range(len(ranks))) or any(
        bytes([byte]) not in ranks for byte in range(256)
    ):
        raise ModelLoadError(f"{where} does not rank all bytes and their unions from 0 on.")
    letters = {token: "".join(_LETTERS[byte] for byte in token) for token in ranks}
    in_order = sorted(ranks, key=ranks.__getitem__)
    merges = []
    for token in in_order:
        parts = _parts_below(token, ranks[token], ranks)
        if len(parts) == 2:  # a longer rest means a token that no merges lead to
            merges.append(f"{letters[parts[0]]} {letters[parts[1]]}")
    built = byte_level([letters[token] for token in in_order], merges, rule, where)
    # Added tokens keep their ids only if the vocabulary has them.
    built["model"]["vocab"] = {**specials, **{letters[token]: first_id + ranks[token] for token in in_order}}
    built["added_tokens"] = [_added(token_id, token) for token, token_id in specials.items()]
    return built


def _parts_below(token: bytes, rank: int, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Cut a token into the parts that merges of lower ranks leave."""
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        unions = [(ranks.get(parts[at] + parts[at + 1], rank), at) for at in range(len(parts) - 1)]
        lowest, at = min(unions)
        if lowest >= rank:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
