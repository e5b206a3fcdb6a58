"""Describes a decoder that was loaded: its card for the gateway, and what its KV blocks depend on."""

from __future__ import annotations

from pathlib import Path

from penstock.core.engine_config import EngineConfig
from penstock.core.messages import ModelCard
from penstock.engine.device import (
    first_gpu,
)
from penstock.engine.grammar import GrammarCompiler, build_compiler
from penstock.kernels.interface import KVStore, Ops
from penstock.models.generation import sampling_defaults
from penstock.models.load import (
    load_tokenizer,
    weights_identity,
)
from penstock.models.mmproj import mmproj_path
from penstock.models.model import Model
from penstock.models.tokenizer import numbered_tokenizer_json

_MMPROJ_HINT = (
    "A GGUF model takes images with the file of its vision part: put mmproj-….gguf beside the model, or name it with "
    "--mmproj."
)


def describe(
    config: EngineConfig, model_path: Path, model: Model, ops: Ops
) -> tuple[ModelCard, GrammarCompiler | None]:
    """Describe the model, with the longest context that it allows, and build its grammar compiler."""
    card = _model_card(config, model_path, model, ops)
    return card, build_compiler(card)


def _model_card(config: EngineConfig, model_path: Path, model: Model, ops: Ops) -> ModelCard:
    architecture = model.config
    tokenizer = load_tokenizer(model_path)
    ends = tokenizer.eos_token_ids if tokenizer else architecture.eos_token_ids
    return ModelCard(
        name=config.model.served_model_name or config.model.model,
        architecture=architecture.architecture,
        vocab_size=architecture.vocab_size,
        max_model_len=model.max_model_len,
        tokenizer_json=(
            tokenizer.tokenizer_json if tokenizer else numbered_tokenizer_json(architecture.vocab_size)
        ),
        chat_template=tokenizer.chat_template if tokenizer else None,
        named_templates=tokenizer.named_templates if tokenizer else {},
        sampling_defaults=sampling_defaults(config.model, model_path),
        special_tokens=tokenizer.special_tokens if tokenizer else {},
        bos_token_id=tokenizer.bos_token_id if tokenizer else None,
        add_bos_token=tokenizer.add_bos_token if tokenizer else False,
        eos_token_ids=tuple(token_id for token_id in ends if token_id < architecture.vocab_size),
        weight_bytes=model.weight_bytes,
        num_parameters=model.num_parameters,
        dtype=str(ops.dtype).removeprefix("torch."),
        quantization=config.model.quantization,
        rounding=ops.rounding,
        device=first_gpu().describe() if ops.device.type == "cuda" else "",
        implementation=model.implementation,
        weights_id=_weights_id(config, model_path),
        images_hint=_MMPROJ_HINT if model_path.is_file() else "",
    )


def kv_facts(
    config: EngineConfig, card: ModelCard, model: Model, ops: Ops, kv: KVStore
) -> tuple[object, ...]:
    """Return the facts that the bytes of a KV block depend on, besides its tokens and its tenant."""
    formats = card.dtype, card.quantization, str(ops.kv_dtype), ops.name, kv.block_bytes
    return card.weights_id, card.architecture, card.implementation, model.max_model_len, *formats


def _weights_id(config: EngineConfig, model_path: Path) -> str:
    if config.model.load_format == "random":
        return f"random-{config.model.seed}"
    vision = mmproj_path(model_path, config.model.mmproj)
    parts = [model_path] if vision is None else [model_path, vision]
    return "-".join(weights_identity(each) for each in parts)
