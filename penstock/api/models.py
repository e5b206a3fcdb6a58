"""/v1/models in both APIs' shapes: every name that the caller may ask for."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.anthropic.endpoints import model_info, model_page
from penstock.api.http.answers import json_response
from penstock.api.http.context import principal_of
from penstock.api.http.errors import is_anthropic
from penstock.api.http.routes import Operation
from penstock.core.errors import ModelNotFound, quoted
from penstock.gateway.external.models import ExternalModel
from penstock.gateway.gateway import Gateway
from penstock.gateway.models.catalogue import ListedModel
from penstock.gateway.models.served_model import ServedModel


class ModelEntry(msgspec.Struct):
    """`root` is the model that answers, which an alias only stands for; `parent` the one that an adapter changes."""

    id: str
    created: int
    max_model_len: int | None  # None where an external server does not tell
    root: str
    parent: str | None
    # Of requests that do not say; empty where an external server decides.
    sampling_defaults: dict[str, float | int]
    object: str = "model"
    owned_by: str = "penstock"
    input_modalities: list[str] | msgspec.UnsetType = msgspec.UNSET  # of a model that takes more than text


class ModelList(msgspec.Struct):
    data: list[ModelEntry]
    object: str = "list"


class ModelsEndpoints:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started = int(time.time())

    def routes(self) -> list[Operation]:
        return [
            Operation("GET /v1/models", self.list_models, ModelList),
            Operation("GET /v1/models/{name:path}", self.show_model, ModelEntry),
        ]

    async def list_models(self, request: Request) -> Response:
        self._gateway.catalogue.answering(None)  # raises when no model is ready
        models = self._gateway.catalogue.listed(principal_of(request))
        if is_anthropic(request.scope):
            return json_response(model_page([model_info(model, self._started) for model in models]))
        return json_response(ModelList([self._entry(model) for model in models]))

    async def show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._gateway.catalogue.answering(None)
        listed = self._gateway.catalogue.listed(principal_of(request))
        found = next((model for model in listed if model.name == name), None)
        if found is None:  # without a word about models that this key does not see
            raise ModelNotFound(f"The model {quoted(name)} is not served here.", param="model")
        if is_anthropic(request.scope):
            return json_response(model_info(found, self._started))
        return json_response(self._entry(found))

    def _entry(self, listed: ListedModel) -> ModelEntry:
        model = listed.model
        owner = "external" if isinstance(model, ExternalModel) else "penstock"
        stated = model.card.sampling_defaults.stated() if isinstance(model, ServedModel) else {}
        sees = isinstance(model, ServedModel) and model.card.vision is not None
        return ModelEntry(
            listed.name,
            self._started,
            model.max_model_len,
            model.name,
            listed.parent,
            stated,
            owned_by=owner,
            input_modalities=["text", "image"] if sees else msgspec.UNSET,
        )
