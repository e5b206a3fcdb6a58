"""Reads from a model's own files how its hidden states become vectors or scores. Imports no torch.

Folders of sentence-transformers list the steps in `modules.json`: a transformer, a pooling, dense layers, a
normalization. Classifiers name their labels in `config.json`, and rerankers that are language models name the
tokens of "yes" and "no". A step that is not known is refused by name: without the step, vectors would be silently
wrong.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from tokenizers import Tokenizer

from penstock.core.errors import ModelLoadError
from penstock.core.messages import PoolerCard
from penstock.core.request import Pooling
from penstock.models.config import Fields, read_settings
from penstock.models.gguf_file import GGUFFile

DenseActivation: TypeAlias = Literal["none", "tanh", "relu", "gelu", "silu", "sigmoid"]

CLASSIFIER_SUFFIX = "ForSequenceClassification"
BARE_SUFFIX = "Model"
HEAD_SUFFIX = "LMHeadModel"  # of older families

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
_GGUF_POOLINGS: dict[int, Pooling] = {1: "mean", 2: "first", 3: "last"}
_ACTIVATIONS: dict[str, DenseActivation] = {
    "Identity": "none",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
_DEFAULT_LABELS = 2  # of transformers, which leaves the default out of config.json


@dataclass(frozen=True, slots=True)
class DenseFile:
    """A dense layer after the pooling: its weights are in `path`."""

    path: Path
    inputs: int
    outputs: int
    has_bias: bool
    activation: DenseActivation


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSettings:
    pooling: Pooling
    card: PoolerCard
    only_pools: bool = False  # the files say that the model was made for vectors or scores, not for text
    max_text_len: int | None = None  # tokens
    dense: tuple[DenseFile, ...] = ()
    num_labels: int | None = None  # of a classification head in the checkpoint
    score_tokens: tuple[int, int | None] | None = None  # a pair's logit is the first's, less the second's


@dataclass(frozen=True, slots=True)
class _Modules:
    pooling: Fields | None = None
    dense: tuple[DenseFile, ...] = ()
    normalizes: bool = True
    score_tokens: tuple[int, int | None] | None = None


def read_pooling(path: Path, fields: Fields, *, is_decoder: bool) -> PoolingSettings:
    """Read the settings of a folder, whose `config.json` is `fields`. A folder that names no pooling gets the mean of
    an encoder's tokens, or a decoder's last token."""
    if is_decoder and _sees_ahead(fields):
        raise ModelLoadError(
            f"{fields.where} describes a decoder whose tokens see the tokens behind them; known of this kind is only "
            "Gemma3TextModel."
        )
    modules = _read_modules(path)
    sentences = _fields(path / "config_sentence_transformers.json")
    length = _fields(path / "sentence_bert_config.json")
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
    max_text_len = length.integer("max_seq_length") if length.has("max_seq_length") else None
    classifies = any(name.endswith(CLASSIFIER_SUFFIX) for name in architectures(fields))
    score_tokens = modules.score_tokens or _score_tokens(path, fields)
    if classifies or score_tokens is not None:
        return _classifier(fields, sentences, card, max_text_len, score_tokens, is_decoder=is_decoder)
    pooling: Pooling = "last" if is_decoder else "mean"
    if modules.pooling is not None:
        pooling = _pooling(modules.pooling)
        source = str(Path(modules.pooling.where).relative_to(path))
        card = msgspec.structs.replace(card, source=source)
    is_bare = any(generating_name(name) != name for name in architectures(fields))
    return PoolingSettings(
        pooling=pooling,
        card=card,
        only_pools=is_bare or modules.pooling is not None,
        max_text_len=max_text_len,
        dense=modules.dense,
    )


def gguf_pooling(file: GGUFFile, *, is_decoder: bool) -> PoolingSettings:
    key = f"{file.architecture}.pooling_type"
    kind = file.metadata.get(key)
    if not kind:  # absent, or 0: the file leaves the choice to its reader
        return PoolingSettings(pooling="last" if is_decoder else "mean", card=PoolerCard())
    if kind not in _GGUF_POOLINGS:
        raise ModelLoadError(
            f"{file.path.name} has {key} = {kind!r}; known are 1 (mean), 2 (first token) and 3 (last token).",
            hint="Give the folder of the original checkpoint.",
        )
    return PoolingSettings(pooling=_GGUF_POOLINGS[kind], card=PoolerCard(source=key), only_pools=True)


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
    source = "config.json"
    pooling: Pooling = "last" if is_decoder else "first"
    if not is_decoder and fields.raw("classifier_pooling") == "mean":
        pooling = "mean"
    is_pair = len(labels) == 1
    family = fields.text("model_type", "")
    card = msgspec.structs.replace(
        card,
        source=source,
        normalizes=False,
        labels=labels,
        is_multi_label=fields.raw("problem_type") == "multi_label_classification",
        scores_pairs=is_pair,
        score_activation=_score_activation(fields, sentences),
        asks_yes_or_no=score_tokens is not None or (is_pair and is_decoder and family == "qwen3"),
    )
    return PoolingSettings(
        pooling=pooling,
        card=card,
        only_pools=True,
        max_text_len=max_text_len,
        num_labels=None if score_tokens is not None else len(labels),
        score_tokens=score_tokens,
    )


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
    if named is None:
        is_reranker = "qwen3-reranker" in str(path).lower()  # also in the hub's cache, below the model's name
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


def _read_modules(folder: Path) -> _Modules:
    listed = _read_list(folder / "modules.json")
    if listed is None:
        alone = folder / "1_Pooling" / "config.json"
        return _Modules(pooling=_fields(alone)) if alone.exists() else _Modules()
    found = _Modules(normalizes=False)
    for module in listed:
        kind = str(module.get("type", "")).rpartition(".")[2]
        name = module.get("path", "")
        settings = _fields(_inside(folder, name) / "config.json") if name else None
        match kind, settings:
            case ("Transformer", None) | ("Dropout", _):
                pass
            case "Normalize", _:
                found = replace(found, normalizes=True)
            case "Pooling", Fields() if found.pooling is None and not found.dense:
                found = replace(found, pooling=settings)
            case "Dense", Fields() if found.pooling is not None and not found.normalizes:
                found = replace(found, dense=(*found.dense, _dense(settings)))
            case "LogitScore", Fields():
                false = settings.token_ids("false_token_id")
                tokens = settings.token_ids("true_token_id")[0], false[0] if false else None
                found = replace(found, score_tokens=tokens)
            case _:
                raise ModelLoadError(
                    f"{folder / 'modules.json'} has the module {kind!r} at {name!r}, which is not known there; known "
                    "are Transformer, Pooling, then Dense and Normalize, or LogitScore."
                )
    return found


def _dense(settings: Fields) -> DenseFile:
    named = settings.text("activation_function", "torch.nn.modules.activation.Tanh")
    activation = _ACTIVATIONS.get(named.rpartition(".")[2])
    if (
        activation is None
        or settings.raw("use_residual")
        or settings.text("module_input_name", "sentence_embedding") != "sentence_embedding"
    ):
        raise ModelLoadError(
            f"{settings.where} describes a dense layer with the activation {named!r}, a residual or an input that is "
            f"not known; known activations are {', '.join(_ACTIVATIONS)}."
        )
    path = Path(settings.where).parent / "model.safetensors"
    if not path.exists():
        raise ModelLoadError(f"{path.parent} has no model.safetensors, the weights of a dense layer.")
    inputs, outputs = settings.integer("in_features"), settings.integer("out_features")
    return DenseFile(path, inputs, outputs, settings.flag("bias", True), activation)


def _pooling(settings: Fields) -> Pooling:
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


def _fields(path: Path) -> Fields:
    """Return the fields of a file; none, when there is no such file."""
    return Fields(read_settings(path) or {}, str(path))
