"""The served models, as Ollama's API lists them: /api/tags, /api/ps, /api/show, /api/version. /api/pull succeeds at
once for a served model."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from penstock import __version__
from penstock.api.http.answers import json_response
from penstock.api.http.context import principal_of
from penstock.api.http.routes import Operation
from penstock.api.ollama.requests import ModelRequest
from penstock.core.errors import InvalidRequest, ModelNotFound, quoted
from penstock.gateway.gateway import Gateway
from penstock.gateway.models.catalogue import AnsweringModel, ListedModel
from penstock.gateway.models.served_model import ServedModel

# The version of Ollama whose API this is. Clients compare it before they use what came with a version.
OLLAMA_VERSION = "0.12.6"
_NEVER = "2318-01-01T00:00:00Z"  # a served model is not unloaded
_TAG = ":latest"
_UNIT = 1000.0


class ModelDetails(msgspec.Struct):
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    parent_model: str = ""
    format: str = ""


class TaggedModel(msgspec.Struct, kw_only=True):
    """`name` and `model` are the same, for clients of different age."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    modified_at: str | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class TaggedModels(msgspec.Struct):
    models: list[TaggedModel]


class ShownModel(msgspec.Struct, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Version(msgspec.Struct):
    version: str
    penstock: str


class PullStatus(msgspec.Struct):
    status: str


def model_name(gateway: Gateway, asked: str | None) -> str | None:
    """Return the name as the catalogue knows it. The tag `:latest`, which clients add by themselves, may be left
    out."""
    if not asked or not asked.endswith(_TAG):
        return asked or None
    try:
        gateway.catalogue.answering(asked)
    except ModelNotFound:
        return asked.removesuffix(_TAG)
    return asked


class OllamaModelEndpoints:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started = datetime.now(UTC).isoformat().replace("+00:00", "Z")

    def routes(self) -> list[Operation]:
        return [
            Operation("GET /api/tags", self.list_models, TaggedModels),
            Operation("GET /api/ps", self.list_loaded_models, TaggedModels),
            Operation("POST /api/show", self.show_model, ShownModel, reads=ModelRequest),
            Operation("GET /api/version", self.version, Version),
            Operation("POST /api/pull", self.pull_model, PullStatus, reads=ModelRequest),
        ]

    async def list_models(self, request: Request) -> Response:
        return json_response(
            TaggedModels([self._tagged(each, modified_at=self._started) for each in self._listed(request)])
        )

    async def list_loaded_models(self, request: Request) -> Response:
        loaded = [
            self._tagged(each, expires_at=_NEVER, context_length=each.model.max_model_len or UNSET)
            for each in self._listed(request)
        ]
        return json_response(TaggedModels(loaded))

    async def show_model(self, request: Request, wire: ModelRequest) -> Response:
        listed = self._asked_for(request, wire)
        model, card = listed.model, listed.model.card if isinstance(listed.model, ServedModel) else None
        return json_response(
            ShownModel(
                modelfile=f"# Served by Penstock.\nFROM {listed.name}\n",
                parameters="",
                template=(card.chat_template or "") if card else "",
                details=_details(listed),
                model_info=_model_info(model),
                capabilities=_capabilities(model),
                modified_at=self._started,
            )
        )

    async def version(self, request: Request) -> Response:
        return json_response(Version(OLLAMA_VERSION, __version__))

    async def pull_model(self, request: Request, wire: ModelRequest) -> Response:
        self._asked_for(request, wire)
        return json_response(PullStatus("success"))

    def _listed(self, request: Request) -> list[ListedModel]:
        return self._gateway.catalogue.listed(principal_of(request))

    def _asked_for(self, request: Request, wire: ModelRequest) -> ListedModel:
        asked = model_name(self._gateway, wire.model or wire.name)
        if asked is None:
            raise InvalidRequest("model is missing.", param="model")
        found = next((each for each in self._listed(request) if each.name == asked), None)
        if found is None:
            raise ModelNotFound(f"The model {quoted(asked)} is not served here.", param="model")
        return found

    def _tagged(self, listed: ListedModel, **more: Any) -> TaggedModel:
        model = listed.model
        return TaggedModel(
            name=listed.name,
            model=listed.name,
            size=model.card.weight_bytes if isinstance(model, ServedModel) else 0,
            digest=hashlib.sha256(model.fingerprint).hexdigest(),
            details=_details(listed),
            **more,
        )


def _details(listed: ListedModel) -> ModelDetails:
    if not isinstance(listed.model, ServedModel):
        return ModelDetails("external", ["external"], "", "")
    card = listed.model.card
    return ModelDetails(
        card.architecture,
        [card.architecture],
        _size(card.num_parameters),
        card.quantization or card.dtype,
        listed.parent or "",
    )


def _model_info(model: AnsweringModel) -> dict[str, Any]:
    """Under the names of GGUF files, which clients look up by the architecture."""
    if not isinstance(model, ServedModel):
        length = {} if model.max_model_len is None else {"external.context_length": model.max_model_len}
        return {"general.architecture": "external", **length}
    card = model.card
    info: dict[str, Any] = {
        "general.architecture": card.architecture,
        "general.basename": card.name,
        "general.parameter_count": card.num_parameters,
        f"{card.architecture}.context_length": card.max_model_len,
        f"{card.architecture}.vocab_size": card.vocab_size,
    }
    if card.embedding_size:
        info[f"{card.architecture}.embedding_length"] = card.embedding_size
    return info


def _capabilities(model: AnsweringModel) -> list[str]:
    if not isinstance(model, ServedModel):
        return ["completion"]
    if not model.card.generates:
        return ["embedding"]
    tools = ["tools"] if model.dialect.tool_format is not None else []
    sees = ["vision"] if model.card.vision is not None else []
    insert = ["insert"] if model.can_infill else []
    thinks = ["thinking"] if model.dialect.reasoning is not None else []
    return ["completion", *sees, *tools, *insert, *thinks]


def _size(num_parameters: int) -> str:
    """Return a number of parameters as Ollama writes it: 134.52M, 1.5B."""
    amount = float(num_parameters)
    for unit in ("", "K", "M", "B"):
        if amount < _UNIT:
            return f"{amount:.4g}{unit}"
        amount /= _UNIT
    return f"{amount:.4g}T"
