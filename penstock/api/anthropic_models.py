"""The served models as Anthropic's clients expect them listed."""

from __future__ import annotations

import datetime

import msgspec

from penstock.core.messages import EngineReady


class ModelInfo(msgspec.Struct):
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    type: str = "model"
    lifecycle: str = "active"


class ModelPage(msgspec.Struct):
    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


def model_info(engine: EngineReady, created: float) -> ModelInfo:
    """`created` is when this server began to serve it, in Unix time."""
    card = engine.model
    return ModelInfo(card.name, card.name, timestamp(created), card.max_model_len, engine.max_output_tokens)


def model_page(models: list[ModelInfo]) -> ModelPage:
    ids = [model.id for model in models]
    return ModelPage(models, ids[0] if ids else None, ids[-1] if ids else None)


def timestamp(unix_time: float) -> str:
    """RFC 3339, in UTC."""
    moment = datetime.datetime.fromtimestamp(unix_time, datetime.UTC)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
