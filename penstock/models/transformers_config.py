"""Reads a folder's settings with the transformers library, and describes the model by them."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

from penstock.core.errors import ModelLoadError
from penstock.models.config import ArchitectureConfig, Fields, RopeConfig
from penstock.models.transformers_model import (
    PAGED,
    attend,
)
from penstock.models.transformers_probe import RECORDING, recorded_mask

_OLDEST = 5  # the first major version that names its conversions of checkpoints


def library() -> Any:
    """Import transformers, with our attention in its registry. Raises ModelLoadError if it is not installed."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ModelLoadError(
            "This architecture is not native, and the package transformers, which may know it, is not installed.",
            hint="Install penstock-llm[transformers].",
        ) from error
    if int(transformers.__version__.partition(".")[0]) < _OLDEST:
        raise ModelLoadError(
            f"Transformers {transformers.__version__} is too old to serve models with; {_OLDEST}.0 is needed.",
            hint="Install penstock-llm[transformers].",
        )
    transformers.AttentionInterface.register(PAGED, attend)
    transformers.AttentionInterface.register(RECORDING, attend)
    transformers.AttentionMaskInterface.register(RECORDING, recorded_mask)
    return transformers


def read_config(folder: Path, *, trust_remote_code: bool) -> Any:
    """Read a folder's settings as transformers does. Raises ModelLoadError where it has no decoder for them."""
    transformers = library()
    raw = Fields(transformers.PretrainedConfig.get_config_dict(folder)[0], str(folder / "config.json"))
    model_type = raw.raw("model_type")
    own_code = raw.raw("auto_map")
    known = isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING
    if not known and own_code and not trust_remote_code:
        raise ModelLoadError(
            f"The model in {folder} brings Python code of its own, which is not run unasked.",
            hint="Read the code, then add --trust-remote-code.",
        )
    named = raw.raw("architectures")
    classes = [str(name) for name in named] if isinstance(named, list) else []
    if classes and not own_code and not any(hasattr(transformers, name) for name in classes):
        raise ModelLoadError(f"Transformers {transformers.__version__} has no class {classes[0]}.")
    if not known and not own_code:
        raise ModelLoadError(
            f"Transformers {transformers.__version__} does not know the model type {model_type!r}."
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers' code may raise any error for odd settings
        raise ModelLoadError(
            f"Transformers cannot read {folder / 'config.json'}: {first_line(error)}."
        ) from error
    is_decoder = auto_class(config) is not None or bool(own_code)
    settings = (config, config.get_text_config())
    if not is_decoder or any(getattr(each, "is_encoder_decoder", False) for each in settings):
        raise ModelLoadError(f"Transformers has no decoder for the model type {model_type!r}.")
    return config


def rope_settings() -> frozenset[str]:
    """Return the names of the settings of rope that transformers knows."""
    return frozenset(
        importlib.import_module("transformers.modeling_rope_utils").RopeParameters.__annotations__
    )


def auto_class(config: Any) -> Any:
    """Return the class of transformers that makes a decoder of the settings: one of texts, else one of texts and
    images, which gets texts alone; None where there is neither."""
    transformers = library()
    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    return next((kind for kind in kinds if type(config) in kind._model_mapping), None)


def architecture_config(config: Any, where: str) -> ArchitectureConfig:
    """Describe the model by its settings. A recorded forward pass replaces the counts of layers and heads later."""
    text = config.get_text_config()
    fields = Fields({**text.to_dict(), **_mapped(text)}, where)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads", 1)
    num_layers = fields.integer("num_hidden_layers")
    head_dim = max(2, hidden_size // num_heads // 2 * 2)
    if fields.raw("head_dim") != 0:  # of heads that are not rotated at all
        head_dim = fields.integer("head_dim", head_dim)
    bos_token_ids = fields.token_ids("bos_token_id")
    return ArchitectureConfig(
        architecture=fields.text("model_type"),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,  # unused: the modules have their own
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        max_positions=fields.integer("max_position_embeddings", 2048),
        norm_eps=1e-6,
        rope=RopeConfig(1.0),
        windows=(None,) * num_layers,
        attention_scale=head_dim**-0.5,
        tie_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        checkpoint_dtype=str(text.dtype).removeprefix("torch.") if getattr(text, "dtype", None) else None,
    )


# Settings that some configurations keep under other names.
_MAPPED = (
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def _mapped(text: Any) -> dict[str, Any]:
    """Return the settings of `_MAPPED` that exist. Transformers raises errors of its own for settings that differ
    between layers."""
    found = {}
    for name in _MAPPED:
        with contextlib.suppress(Exception):
            found[name] = getattr(text, name, None)
    return found


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
