"""Reads from a model's own files how its hidden states become vectors or scores. Imports no torch.

Folders of sentence-transformers list the steps in `modules.json`, which `sentence_modules.py` reads. Classifiers name
their labels in `config.json`, and rerankers that are language models name the tokens of "yes" and "no".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from tokenizers import Tokenizer

from penstock.core.errors import ModelLoadError
from penstock.core.messages import PoolerCard
from penstock.core.request import Pooling
from penstock.models.config import Fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.sentence_modules import DenseFile, NormFile, optional_fields, pooling_mode, read_modules

CLASSIFIER_SUFFIX = "ForSequenceClassification"
BARE_SUFFIX = "Model"
HEAD_SUFFIX = "LMHeadModel"  # of older families

_GGUF_POOLINGS: dict[int, Pooling] = {1: "mean", 2: "first", 3: "last"}
_GGUF_RANK = 4
GGUF_CLASSIFIER = "cls.output.weight"
_YES_AND_NO = ["yes", "no"]
_NO_LIMIT = 1 << 24  # tokens
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
_DEFAULT_LABELS = 2  # of transformers, which leaves the default out of config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSettings:
    pooling: Pooling
    card: PoolerCard
    only_pools: bool = False  # the files say that the model was made for vectors or scores, not for text
    max_text_len: int | None = None  # tokens
    layers: tuple[DenseFile | NormFile, ...] = ()  # after the pooling
    num_labels: int | None = None  # of a classification head in the checkpoint
    score_tokens: tuple[int, int | None] | None = None  # a pair's logit is the first's, less the second's


def read_pooling(path: Path, fields: Fields, *, is_decoder: bool) -> PoolingSettings:
    """Read the settings of a folder, whose `config.json` is `fields`. A folder that names no pooling gets the mean of
    an encoder's tokens, or a decoder's last token."""
    if is_decoder and _sees_ahead(fields):
        raise ModelLoadError(
            f"{fields.where} describes a decoder whose tokens see the tokens behind them; known of this kind is only "
            "Gemma3TextModel."
        )
    modules = read_modules(path)
    sentences = optional_fields(path / "config_sentence_transformers.json")
    length = optional_fields(path / "sentence_bert_config.json")
    card = PoolerCard(
        normalizes=modules.normalizes,
        matryoshka=_matryoshka(fields, sentences),
        cut_to=sentences.integer("truncate_dim") if sentences.has("truncate_dim") else None,
        prompts=_prompts(sentences),
        default_prompt=sentences.text("default_prompt_name", ""),
        lower_cases=length.flag("do_lower_case", False),
        similarity=_similarity(sentences),
    )
    if card.default_prompt and card.default_prompt not in card.prompts:
        raise ModelLoadError(f"{sentences.where} has no prompt {card.default_prompt!r}, its default.")
    max_text_len = _max_text_len(path, length)
    classifies = any(name.endswith(CLASSIFIER_SUFFIX) for name in architectures(fields))
    score_tokens = modules.score_tokens or _score_tokens(path, fields)
    if classifies or score_tokens is not None:
        return _classifier(fields, sentences, card, max_text_len, score_tokens, is_decoder=is_decoder)
    pooling: Pooling = "last" if is_decoder else "mean"
    if modules.pooling is not None:
        pooling = pooling_mode(modules.pooling)
        source = str(Path(modules.pooling.where).relative_to(path))
        card = msgspec.structs.replace(card, source=source)
    if modules.num_scores is not None:
        card = _scoring(fields, sentences, card, tuple(f"LABEL_{n}" for n in range(modules.num_scores)))
    is_bare = any(generating_name(name) != name for name in architectures(fields))
    return PoolingSettings(
        pooling=pooling,
        card=card,
        only_pools=is_bare or modules.pooling is not None,
        max_text_len=max_text_len,
        layers=modules.layers,
    )


def gguf_pooling(file: GGUFFile, *, is_decoder: bool) -> PoolingSettings:
    key = f"{file.architecture}.pooling_type"
    kind = file.metadata.get(key)
    if not kind:  # absent, or 0: the file leaves the choice to its reader
        return PoolingSettings(pooling="last" if is_decoder else "mean", card=PoolerCard())
    if kind == _GGUF_RANK:
        return _gguf_ranking(file, is_decoder=is_decoder)
    if kind not in _GGUF_POOLINGS:
        raise ModelLoadError(
            f"{file.path.name} has {key} = {kind!r}; known are 1 (mean), 2 (first token), 3 (last token) and 4 "
            "(scores).",
            hint="Give the folder of the original checkpoint.",
        )
    return PoolingSettings(pooling=_GGUF_POOLINGS[kind], card=PoolerCard(source=key), only_pools=True)


def _gguf_ranking(file: GGUFFile, *, is_decoder: bool) -> PoolingSettings:
    """Return the settings of a reranker: an encoder with the two layers of RoBERTa's classifiers, or a language model
    that stores the rows of "yes" and "no" of its head."""
    rows = file.tensors.get(GGUF_CLASSIFIER)
    is_known = is_decoder or (file.architecture == "bert" and "cls.weight" in file.tensors)
    if rows is None or not is_known or (is_decoder and rows.shape[0] != len(_YES_AND_NO)):
        raise ModelLoadError(
            f"{file.path.name} scores texts with layers that are not known.",
            hint="Give the folder of the original checkpoint.",
        )
    count = 1 if is_decoder or len(rows.shape) == 1 else rows.shape[0]
    named = file.metadata.get(f"{file.architecture}.classifier.output_labels")
    labels = tuple(f"LABEL_{index}" for index in range(count))
    if not is_decoder and isinstance(named, list) and len(named) == count:
        labels = tuple(map(str, named))
    if is_decoder and named is not None and named != _YES_AND_NO:
        raise ModelLoadError(f"{file.path.name} compares {named!r}; known are {_YES_AND_NO!r}.")
    card = PoolerCard(
        source=f"{file.architecture}.pooling_type",
        normalizes=False,
        labels=labels,
        scores_pairs=count == 1,
        score_activation="sigmoid",
        asks_yes_or_no=is_decoder,
    )
    pooling: Pooling = "last" if is_decoder else "first"
    return PoolingSettings(pooling=pooling, card=card, only_pools=True, num_labels=count)


def _sees_ahead(fields: Fields) -> bool:
    text = fields.raw("text_config")
    return any(
        values.get("use_bidirectional_attention") is True or values.get("is_causal") is False
        for values in (fields.values, text if isinstance(text, dict) else {})
    )


def architectures(fields: Fields) -> tuple[str, ...]:
    named = fields.raw("architectures")
    return tuple(str(name) for name in named) if isinstance(named, list) else ()


def generating_name(name: str) -> str:
    """Return the name of the same decoder with a head for tokens: `Qwen3ForCausalLM` for `Qwen3Model`."""
    for suffix in (CLASSIFIER_SUFFIX, BARE_SUFFIX):
        if name.endswith(suffix) and not name.endswith(HEAD_SUFFIX):
            return f"{name.removesuffix(suffix).removesuffix('Text')}ForCausalLM"
    return name


def _classifier(
    fields: Fields,
    sentences: Fields,
    card: PoolerCard,
    max_text_len: int | None,
    score_tokens: tuple[int, int | None] | None,
    *,
    is_decoder: bool,
) -> PoolingSettings:
    """Return the settings of a model with a classification head, or one whose tokens "yes" and "no" are compared."""
    labels = ("LABEL_0",) if score_tokens is not None else _labels(fields)
    pooling: Pooling = "last" if is_decoder else "first"
    if not is_decoder and fields.raw("classifier_pooling") == "mean":
        pooling = "mean"
    card = _scoring(fields, sentences, card, labels)
    is_qwen3 = is_decoder and fields.text("model_type", "") == "qwen3"
    asks = score_tokens is not None or (card.scores_pairs and is_qwen3)
    card = msgspec.structs.replace(card, source="config.json", asks_yes_or_no=asks)
    return PoolingSettings(
        pooling=pooling,
        card=card,
        only_pools=True,
        max_text_len=max_text_len,
        num_labels=None if score_tokens is not None else len(labels),
        score_tokens=score_tokens,
    )


def _scoring(fields: Fields, sentences: Fields, card: PoolerCard, labels: tuple[str, ...]) -> PoolerCard:
    return msgspec.structs.replace(
        card,
        normalizes=False,
        labels=labels,
        is_multi_label=fields.raw("problem_type") == "multi_label_classification",
        scores_pairs=len(labels) == 1,
        score_activation=_score_activation(fields, sentences),
    )


def _max_text_len(path: Path, length: Fields) -> int | None:
    """Return the longest text in tokens, as sentence-transformers reads it: its newer files leave the length to the
    tokenizer. Lengths of tokenizers without a limit are far too large."""
    if length.has("max_seq_length") or not (path / "modules.json").exists():
        return length.integer("max_seq_length") if length.has("max_seq_length") else None
    stated = optional_fields(path / "tokenizer_config.json").raw("model_max_length")
    return stated if isinstance(stated, int) and 0 < stated < _NO_LIMIT else None


def _labels(fields: Fields) -> tuple[str, ...]:
    named = fields.raw("id2label")
    if not named:
        count = fields.integer("num_labels", _DEFAULT_LABELS)
        return tuple(f"LABEL_{index}" for index in range(count))
    try:
        by_id = {int(index): str(label) for index, label in named.items()}
    except (AttributeError, ValueError) as error:
        raise ModelLoadError(f"{fields.where} has an id2label that is no list of labels.") from error
    if sorted(by_id) != list(range(len(by_id))):
        raise ModelLoadError(f"{fields.where} has an id2label with gaps.")
    return tuple(by_id[index] for index in range(len(by_id)))


def _score_activation(fields: Fields, sentences: Fields) -> Literal["sigmoid", "none"]:
    nested = fields.raw("sentence_transformers")
    named = nested.get("activation_fn") if isinstance(nested, dict) else None
    named = named or fields.raw("sbert_ce_default_activation_function") or sentences.raw("activation_fn")
    if named is None:
        return "none" if fields.raw("problem_type") == "regression" else "sigmoid"
    kind = str(named).rpartition(".")[2]
    if kind == "Identity":
        return "none"
    if kind == "Sigmoid":
        return "sigmoid"
    raise ModelLoadError(
        f"{fields.where} asks for the activation {named!r} of scores; known: Identity, Sigmoid."
    )


def _score_tokens(path: Path, fields: Fields) -> tuple[int, int | None] | None:
    """Return the tokens "yes" and "no" of a reranker that is a language model, or None for another model. Files of
    Qwen3-Reranker look like those of a chat model, but for their name."""
    named = fields.raw("classifier_from_token")
    is_named_so = "qwen3-reranker" in str(path).lower()  # also in the hub's cache, below the model's name
    is_reranker = fields.flag("is_original_qwen3_reranker", is_named_so)  # which users of vLLM give
    if named is None:
        if not is_reranker or "Qwen3ForCausalLM" not in architectures(fields):
            return None
        named = ["no", "yes"]
    if not isinstance(named, list) or len(named) != 2 or not all(isinstance(each, str) for each in named):
        raise ModelLoadError(f"{fields.where} has a classifier_from_token that is not two tokens.")
    file = path / "tokenizer.json"
    if not file.exists():
        raise ModelLoadError(f"{path} has no tokenizer.json, in which to find the tokens {named}.")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
        raise ModelLoadError(
            f"{file} is not a valid tokenizer: {error}.", hint="Fetch the file again."
        ) from error
    false, true = (tokenizer.token_to_id(each) for each in named)
    if false is None or true is None:
        raise ModelLoadError(f"{file} does not have both of the tokens {named[0]!r} and {named[1]!r}.")
    return true, false


def _matryoshka(fields: Fields, sentences: Fields) -> tuple[int, ...] | None:
    for each in (fields, sentences):
        sizes = each.raw("matryoshka_dimensions")
        if isinstance(sizes, list) and all(isinstance(size, int) and size > 0 for size in sizes):
            return tuple(sorted(sizes))
        if sizes is not None:
            raise ModelLoadError(f"{each.where} has matryoshka_dimensions that are no list of sizes.")
    return () if fields.flag("is_matryoshka", False) else None


def _prompts(sentences: Fields) -> dict[str, str]:
    prompts = sentences.raw("prompts") or {}
    if not isinstance(prompts, dict):
        raise ModelLoadError(f"{sentences.where} has prompts that are not texts by name.")
    return {str(name): text for name, text in prompts.items() if isinstance(text, str)}


def _similarity(sentences: Fields) -> Any:
    named = sentences.text("similarity_fn_name", "cosine")
    if named not in _SIMILARITIES:
        raise ModelLoadError(
            f"{sentences.where} asks for the similarity {named!r}; known are {', '.join(_SIMILARITIES)}."
        )
    return named
