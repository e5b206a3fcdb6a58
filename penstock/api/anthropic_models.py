"""The served models as Anthropic's clients expect them listed."""

from __future__ import annotations

import datetime

import msgspec

from penstock.gateway.catalogue import ListedModel


class ModelInfo(msgspec.Struct):
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None  # None where an external server does not tell
    max_tokens: int | None
    type: str = "model"
    lifecycle: str = "active"


class ModelPage(msgspec.Struct):
    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


def model_info(listed: ListedModel, created: float) -> ModelInfo:
    """`created` is when this server began to serve it, in Unix time."""
    model = listed.model
    return ModelInfo(
        listed.name,
        model.name,
        timestamp(created),
        model.max_model_len,
        model.max_output_tokens,
    )


def model_page(models: list[ModelInfo]) -> ModelPage:
    ids = [model.id for model in models]
    return ModelPage(models, ids[0] if ids else None, ids[-1] if ids else None)


def timestamp(unix_time: float) -> str:
    """RFC 3339, in UTC."""
    moment = datetime.datetime.fromtimestamp(unix_time, datetime.UTC)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
