"""/v1/messages and /v1/messages/count_tokens: decode, submit, answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from penstock.api.anthropic.answers import PING, Message, MessageEvents, message
from penstock.api.anthropic.requests import GUARDED_FIELDS, CountTokensRequest, MessagesRequest
from penstock.api.foreign_fields import refuse_foreign
from penstock.api.http.answers import EventStream, answer_whole, json_response
from penstock.api.http.context import note_model, principal_of, request_id_of, with_context
from penstock.api.http.parsing import BodyDecoder
from penstock.api.http.routes import Operation
from penstock.api.http.translation import translated
from penstock.core.errors import InvalidRequest
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import AnswerStream
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import RequestWarning

# The later versions took temperature, top_p and top_k away; the models here have them, so they always work.
OLDEST_VERSION = "2023-06-01"
_VERSION = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


class TokenCount(msgspec.Struct, omit_defaults=True):
    input_tokens: int
    warnings: tuple[RequestWarning, ...] = ()


class AnthropicEndpoints:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = BodyDecoder(MessagesRequest, GUARDED_FIELDS, refuse_foreign)
        self._count_decoder = BodyDecoder(CountTokensRequest, GUARDED_FIELDS)

    def routes(self) -> list[Operation]:
        return [
            Operation(
                "POST /v1/messages", self.create_message, Message, request=MessagesRequest, streams=True
            ),
            Operation(
                "POST /v1/messages/count_tokens", self.count_tokens, TokenCount, request=CountTokensRequest
            ),
        ]

    async def create_message(self, request: Request) -> ASGIApp:
        check_version(request)
        wire = await self._decoder.read(request)
        generation = await translated(wire.messages, wire.to_generation)
        request_id = request_id_of(request)
        submitted = self._gateway.submit(with_context(request, generation, is_read_whole=not wire.stream))
        if wire.stream:
            events = MessageEvents(request_id)
            return await EventStream.open(
                request, submitted, lambda answer: events, events.failure, keep_alive=PING
            )

        def build(answer: AnswerStream, deltas: Sequence[Delta]) -> bytes:
            return msgspec.json.encode(message(answer, deltas[0]))

        return await answer_whole(request, submitted, build)

    async def count_tokens(self, request: Request) -> Response:
        check_version(request)
        wire = await self._count_decoder.read(request)
        note_model(request, wire.model)
        principal = principal_of(request)
        model = self._gateway.catalogue.permitted(principal, wire.model)
        async with self._gateway.accounts.errand(principal, model.card.name, "count_tokens"):
            prompt = await translated(wire.messages, wire.prompt)
            count = await self._gateway.count_tokens(model, prompt, principal)
        return json_response(TokenCount(count, wire.warnings))


def check_version(request: Request) -> None:
    """Check the API version. Versions differ in the requests that they accept; responses are the same in all
    supported versions."""
    version = request.headers.get("anthropic-version", OLDEST_VERSION)
    if not _VERSION.fullmatch(version) or version < OLDEST_VERSION:
        raise InvalidRequest(
            f"anthropic-version: {version[:40]!r} is not a version from {OLDEST_VERSION!r} on."
        )
