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
from penstock.api.body import BodyDecoder, read_body
from penstock.api.context import principal_of, request_id_of
from penstock.api.openai_requests import EXTENSION_FIELDS, ChatCompletionRequest, CompletionRequest
from penstock.api.openai_responses import (
    AnswerHeader,
    ChatChunks,
    CompletionChunks,
    chat_completion,
    completion,
)
from penstock.gateway.gateway import Gateway
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
        return _json(ModelList([self._model_entry(None)]))

    async def show_model(self, request: Request) -> Response:
        return _json(self._model_entry(request.path_params["name"]))

    async def create_completion(self, request: Request) -> ASGIApp:
        wire = self._completion_decoder.decode(await read_body(request, self._max_body_bytes))
        generation = await self._submit(request, wire.to_generation())
        header = AnswerHeader(
            generation_id=generation.id,
            model=generation.model,
            wants_logprobs=wire.logprobs is not None,
            includes_usage=wire.includes_usage,
            service_tier=wire.service_tier,
        )
        if wire.stream:
            return await EventStream.open(
                generation, request.receive, CompletionChunks(header), includes_usage=wire.includes_usage
            )
        return await answer_whole(generation, request.receive, partial(completion, header))

    async def create_chat_completion(self, request: Request) -> ASGIApp:
        wire = self._chat_decoder.decode(await read_body(request, self._max_body_bytes))
        generation = await self._submit(request, wire.to_generation())
        header = AnswerHeader(
            generation_id=generation.id,
            model=generation.model,
            wants_logprobs=bool(wire.logprobs),
            includes_usage=wire.includes_usage,
            service_tier=wire.service_tier,
        )
        if wire.stream:
            return await EventStream.open(
                generation, request.receive, ChatChunks(header), includes_usage=wire.includes_usage
            )
        return await answer_whole(generation, request.receive, partial(chat_completion, header))

    async def _submit(self, request: Request, wish: GenerationRequest) -> AnswerStream:
        return await self._gateway.submit(
            msgspec.structs.replace(wish, principal=principal_of(request), request_id=request_id_of(request))
        )

    def _model_entry(self, name: str | None) -> ModelEntry:
        card = self._gateway.model(name).card
        return ModelEntry(card.name, self._started, card.max_model_len)


def _json(shape: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(shape), media_type="application/json")
