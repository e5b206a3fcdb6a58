"""/v1/models, /v1/completions and /v1/chat/completions: decode, submit, answer."""

from __future__ import annotations

import time
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.api.answers import EventStream, answer_whole
from penstock.api.anthropic_models import model_info, model_page
from penstock.api.body import BodyDecoder, read_body
from penstock.api.context import principal_of
from penstock.api.errors import is_anthropic
from penstock.api.openai_answers import AnswerHeader, chat_completion, completion
from penstock.api.openai_chunks import ChatChunks, CompletionChunks
from penstock.api.openai_requests import EXTENSION_FIELDS, ChatCompletionRequest, CompletionRequest
from penstock.api.wishes import signed_wish
from penstock.core.errors import ModelNotFound
from penstock.gateway.gateway import Gateway, ServedModel
from penstock.gateway.prompts import GenerationRequest
from penstock.gateway.stream import AnswerStream


class ModelEntry(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "penstock"


class ModelList(msgspec.Struct):
    data: list[ModelEntry]
    object: str = "list"


class OpenAIEndpoints:
    def __init__(self, gateway: Gateway, max_body_bytes: int) -> None:
        self._gateway = gateway
        self._max_body_bytes = max_body_bytes
        self._started = int(time.time())
        self._chat_decoder = BodyDecoder(ChatCompletionRequest, EXTENSION_FIELDS)
        self._completion_decoder = BodyDecoder(CompletionRequest, EXTENSION_FIELDS)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.show_model, methods=["GET"]),
            Route("/v1/completions", self.create_completion, methods=["POST"]),
            Route("/v1/chat/completions", self.create_chat_completion, methods=["POST"]),
        ]

    async def list_models(self, request: Request) -> Response:
        """Those that the caller may use."""
        model = self._gateway.model()
        models = [model] if principal_of(request).may_use(model.card.name) else []
        if is_anthropic(request.scope):
            return _json(model_page([model_info(model.engine, self._started) for model in models]))
        return _json(ModelList([self._model_entry(model) for model in models]))

    async def show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        hidden = ModelNotFound(f"The model {name!r} is not served here.", param="model")
        try:
            model = self._gateway.model(name)
        except ModelNotFound as error:
            raise hidden from error  # which must not name models that this key does not see
        if not principal_of(request).may_use(model.card.name):
            raise hidden
        if is_anthropic(request.scope):
            return _json(model_info(model.engine, self._started))
        return _json(self._model_entry(model))

    async def create_completion(self, request: Request) -> ASGIApp:
        wire = self._completion_decoder.decode(await read_body(request, self._max_body_bytes))
        generation = await self._submit(request, wire.to_generation())
        header = AnswerHeader.of(
            generation, wants_logprobs=wire.logprobs is not None, includes_usage=wire.includes_usage
        )
        if wire.stream:
            return await EventStream.open(generation, request.receive, CompletionChunks(header))
        return await answer_whole(generation, request.receive, partial(completion, header))

    async def create_chat_completion(self, request: Request) -> ASGIApp:
        wire = self._chat_decoder.decode(await read_body(request, self._max_body_bytes))
        generation = await self._submit(request, wire.to_generation())
        header = AnswerHeader.of(
            generation, wants_logprobs=bool(wire.logprobs), includes_usage=wire.includes_usage
        )
        if wire.stream:
            return await EventStream.open(generation, request.receive, ChatChunks(header))
        return await answer_whole(generation, request.receive, partial(chat_completion, header))

    async def _submit(self, request: Request, wish: GenerationRequest) -> AnswerStream:
        return await self._gateway.submit(signed_wish(request, wish))

    def _model_entry(self, model: ServedModel) -> ModelEntry:
        return ModelEntry(model.card.name, self._started, model.card.max_model_len)


def _json(shape: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(shape), media_type="application/json")
