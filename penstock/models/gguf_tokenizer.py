"""Builds a Hugging Face `tokenizers` file from the vocabulary inside a GGUF file. Imports no torch.

Five kinds are read: byte-level BPE with merges ("gpt2"), which splits text by a rule that GGUF only names;
SentencePiece ("llama"), which stores scores in place of merges; SentencePiece's pieces with merges ("gemma4");
SentencePiece's unigram model ("t5"); and WordPiece ("bert").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.core.errors import ModelLoadError
from penstock.models.config import Fields
from penstock.models.generation import DEFAULT_TEMPLATE, gguf_templates
from penstock.models.gguf_file import GGUFFile
from penstock.models.split_rules import SPLIT_RULES
from penstock.models.tokenizer import TokenizerFiles, distinct
from penstock.models.tokenizer_build import (
    CONTROL,
    NORMAL,
    SentencePieceSettings,
    added_tokens,
    byte_level,
    ends_template,
    merge_pairs,
    merges_from_scores,
    sentencepiece,
    unigram,
    wordpiece,
)

# Control tokens that end an answer in any vocabulary; metadata often names only one.
_END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<turn|>",
    "<|tool_response>",  # Gemma 4 waits for the result of a tool
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<EOT>",
    "_<EOT>",
    "<eos>",  # some files of Gemma name only the end of a turn
    "[EOT]",
    "[EOS]",
    "[e~[",
)
# In vocabularies with these pairs of tokens, "<|end|>" ends a message within an answer.
_ENDS_OF_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
# Ids in SentencePiece vocabularies whose file does not state them.
_USUAL_IDS = {"bos_token_id": 1, "eos_token_id": 2}


def tokenizer_from_gguf(file: GGUFFile) -> TokenizerFiles:
    fields = Fields(file.metadata, file.path.name, prefix="tokenizer.ggml.")
    tokens = _strings(fields, "tokens")
    types = (
        _per_token(fields, "token_type", int, tokens) if fields.has("token_type") else [NORMAL] * len(tokens)
    )
    kind = fields.text("model")
    if kind == "llama" and len(tokens) > max(_USUAL_IDS.values()):
        usual = {f"tokenizer.ggml.{key}": token_id for key, token_id in _USUAL_IDS.items()}
        fields = Fields({**usual, **file.metadata}, fields.where, prefix="tokenizer.ggml.")
    if kind == "gpt2":
        pre = fields.text("pre", "default")
        if pre not in SPLIT_RULES:
            raise ModelLoadError(
                f"{fields.where} splits text by the rule {pre!r}; known are {', '.join(SPLIT_RULES)}."
            )
        rule = SPLIT_RULES[pre]
        tokenizer, adds_bos = (
            byte_level(tokens, _strings(fields, "merges"), rule, fields.where),
            rule.adds_bos,
        )
    elif kind == "llama":
        scores = _per_token(fields, "scores", float, tokens)
        prefixes_space = fields.flag("add_space_prefix", True)
        merges = merges_from_scores(tokens, types, scores)
        tokenizer, adds_bos = sentencepiece(tokens, types, merges, prefixes_space=prefixes_space), True
    elif kind == "gemma4":
        merges = merge_pairs(set(tokens), _strings(fields, "merges"), fields.where)
        tokenizer, adds_bos = sentencepiece(tokens, types, merges, prefixes_space=False), True
    elif kind == "t5":
        scores = _per_token(fields, "scores", float, tokens)
        tokenizer, adds_bos = unigram(tokens, types, scores, _sentencepiece_settings(fields)), False
    elif kind == "bert":
        tokens, tokenizer = wordpiece(tokens, fields.where)
        adds_bos = False  # the file adds its first and last token itself
    else:
        raise ModelLoadError(
            f"{fields.where} has a tokenizer of kind {kind!r}; known are gpt2, llama, gemma4, t5 and bert."
        )
    tokenizer["added_tokens"] = added_tokens(tokens, types)
    is_causal = file.metadata.get(f"{file.architecture}.attention.causal") is not False
    if kind in ("gpt2", "t5") and not is_causal:
        tokenizer["post_processor"] = _ends(fields, tokens, numbers_texts=file.architecture == "modern-bert")
    elif kind != "bert" and fields.flag("add_eos_token", False):  # decoders that were made for vectors
        tokenizer["post_processor"] = _ends(fields, tokens, numbers_texts=False, adds_bos=adds_bos)
    bos_token_id = _token_id(fields, "bos_token_id", tokens)
    templates = gguf_templates(file.metadata)
    return TokenizerFiles(
        tokenizer_json=msgspec.json.encode(tokenizer),
        chat_template=templates.pop(DEFAULT_TEMPLATE, None),
        named_templates=templates,
        special_tokens=_special_tokens(fields, tokens),
        bos_token_id=bos_token_id,
        # Some files of Gemma 4 deny the first token, without which the model writes nonsense.
        add_bos_token=bos_token_id is not None
        and (kind == "gemma4" or fields.flag("add_bos_token", adds_bos)),
        eos_token_ids=_eos_token_ids(fields, tokens, types),
    )


def _sentencepiece_settings(fields: Fields) -> SentencePieceSettings:
    table = fields.raw("precompiled_charsmap") or []
    if not isinstance(table, list) or not all(isinstance(byte, int) and -129 < byte < 256 for byte in table):
        raise ModelLoadError(f"{fields.where} has a precompiled_charsmap that is not a list of bytes.")
    return SentencePieceSettings(
        characters=bytes(byte & 0xFF for byte in table),
        prefixes_space=fields.flag("add_space_prefix", True),
        removes_extra_spaces=fields.flag("remove_extra_whitespaces", True),
    )


def _ends(
    fields: Fields, tokens: Sequence[str], *, numbers_texts: bool, adds_bos: bool = True
) -> dict[str, Any]:
    """Return the template of a model for vectors, whose texts begin and end with tokens."""
    firsts = (_token_id(fields, key, tokens) for key in ("bos_token_id", "cls_token_id"))
    lasts = (_token_id(fields, key, tokens) for key in ("eos_token_id", "seperator_token_id"))
    first, last = (next((each for each in ids if each is not None), None) for ids in (firsts, lasts))
    if not fields.flag("add_bos_token", adds_bos):
        first = None
    if not fields.flag("add_eos_token", True) and not fields.flag("add_sep_token", False):
        last = None
    names = [None if each is None else tokens[each] for each in (first, last)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return ends_template(vocabulary, *names, numbers_texts=numbers_texts)


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
    named = [_token_id(fields, key, tokens) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens) if types[token_id] == CONTROL}
    found = [*named, *(vocabulary.get(token) for token in _END_TOKENS)]
    if any(pair <= vocabulary.keys() for pair in _ENDS_OF_MESSAGES):
        found = [token_id for token_id in found if token_id is None or tokens[token_id] != "<|end|>"]
    return distinct(found)


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
