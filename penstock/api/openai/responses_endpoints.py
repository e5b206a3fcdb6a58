"""/v1/responses: create, stream, look up, list input, cancel and delete."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.api.http.answers import EventStream, WholeAnswer, answer_whole
from penstock.api.http.context import note_model, principal_of, signed_wish
from penstock.api.http.parsing import BodyDecoder, read_body
from penstock.api.openai.responses_items import InputItem
from penstock.api.openai.responses_requests import ResponseRequest
from penstock.api.openai.responses_service import Responses
from penstock.core.errors import InvalidRequest

DEFAULT_PAGE = 20
MAX_PAGE = 100

_to_json = msgspec.json.Encoder().encode


class DeletedResponse(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class InputItemList(msgspec.Struct):
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: str = "response.input_tokens"


class ResponsesEndpoints:
    def __init__(self, responses: Responses, max_body_bytes: int) -> None:
        self._responses = responses
        self._max_body_bytes = max_body_bytes
        self._decoder = BodyDecoder(ResponseRequest)

    def routes(self) -> list[Route]:
        one = "/v1/responses/{response_id}"
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.count_input_tokens, methods=["POST"]),
            Route(one, self.retrieve, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
            Route(f"{one}/input_items", self.list_input_items, methods=["GET"]),
        ]

    async def create(self, request: Request) -> ASGIApp:
        wire = await self._read(request)
        answer = await self._responses.create(wire, principal_of(request), partial(signed_wish, request))
        if wire.background:
            return WholeAnswer(_to_json(answer.events.body), answer.rate_limits)
        if wire.stream:
            return await EventStream.open(answer, request.receive, answer.events)
        return await answer_whole(answer, request.receive, lambda deltas, usage: _to_json(answer.events.body))

    async def count_input_tokens(self, request: Request) -> Response:
        wire = await self._read(request)
        return _json(InputTokens(await self._responses.count_tokens(wire, principal_of(request))))

    async def retrieve(self, request: Request) -> Response:
        if request.query_params.get("stream", "false").lower() == "true":
            raise InvalidRequest("A stored response cannot be streamed again.", param="stream")
        found = await self._responses.find(principal_of(request), request.path_params["response_id"])
        return Response(found.body, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        await self._responses.delete(principal_of(request), response_id)
        return _json(DeletedResponse(response_id))

    async def cancel(self, request: Request) -> Response:
        body = await self._responses.cancel(principal_of(request), request.path_params["response_id"])
        return Response(body, media_type="application/json")

    async def list_input_items(self, request: Request) -> Response:
        items = await self._responses.list_items(principal_of(request), request.path_params["response_id"])
        query = request.query_params
        if query.get("order", "desc") == "desc":
            items.reverse()
        elif query["order"] != "asc":
            raise InvalidRequest("order must be asc or desc.", param="order")
        if (after := query.get("after")) is not None:
            ids = [item.id for item in items]
            if after not in ids:
                raise InvalidRequest(f"There is no input item with the id {after!r}.", param="after")
            items = items[ids.index(after) + 1 :]
        limit = _limit(query.get("limit"))
        page = items[:limit]
        first_id, last_id = (page[0].id, page[-1].id) if page else (None, None)
        return _json(InputItemList(page, first_id, last_id, len(items) > limit))

    async def _read(self, request: Request) -> ResponseRequest:
        wire = self._decoder.decode(await read_body(request, self._max_body_bytes))
        note_model(request, wire.model)
        return wire


def _limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_PAGE
    if not given.isascii() or not given.isdecimal() or len(given) > 3 or not 1 <= int(given) <= MAX_PAGE:
        raise InvalidRequest(f"limit must be between 1 and {MAX_PAGE}.", param="limit")
    return int(given)


def _json(shape: msgspec.Struct) -> Response:
    return Response(_to_json(shape), media_type="application/json")
