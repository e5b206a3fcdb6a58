"""/v1/responses: create, stream, look up, list input, cancel and delete.

The gateway stores responses as JSON; `StoredBodies` and `Conversation` read them back.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.api.http.answers import EventStream, WholeAnswer, answer_whole
from penstock.api.http.context import note_model, principal_of, with_context
from penstock.api.http.errors import named_params
from penstock.api.http.parsing import BodyDecoder, read_body
from penstock.api.openai.responses_answers import (
    PARAMS,
    ResponseBody,
    ResponseError,
    ResponseEvents,
    new_response,
)
from penstock.api.openai.responses_items import InputItem, input_items, response_id_of
from penstock.api.openai.responses_requests import ResponseRequest
from penstock.core.errors import InvalidRequest, NotFound
from penstock.core.identity import Principal
from penstock.gateway.answers.stream import AnswerStream
from penstock.gateway.responses.service import Responses
from penstock.gateway.responses.store import HistoryBound

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


class StoredBodies:
    """Changes stored bodies; implements `ResponseFormat`."""

    def failed(self, body: bytes) -> bytes:
        response = _decode_body(body)
        response.status = "failed"
        message = "The server stopped before this response was finished."
        response.error = ResponseError("server_error", message)
        return _to_json(response)

    def cancelled(self, body: bytes) -> bytes | None:
        response = _decode_body(body)
        response.status = "cancelled"
        return _to_json(response) if response.background else None


class _StoredOutput(msgspec.Struct):
    """The part of a stored body that a conversation continues from."""

    output: list[InputItem]


_decode_body = msgspec.json.Decoder(ResponseBody).decode
_decode_output = msgspec.json.Decoder(_StoredOutput).decode
_decode_items = msgspec.json.Decoder(list[InputItem]).decode


class Conversation:
    """Gathers the items of a request: those of the responses that it continues, and its own."""

    def __init__(self, responses: Responses, principal: Principal) -> None:
        self._responses = responses
        self._principal = principal

    async def earlier_items(self, previous_id: str | None) -> list[InputItem]:
        items: list[InputItem] = []
        if previous_id is not None:
            for response in await self._responses.history(self._principal, previous_id):
                items += _decode_items(response.input_items)
                items += _decode_output(response.body).output
        return items

    async def own_items(self, wire: str | list[InputItem]) -> list[InputItem]:
        """The items of the request, with the items in place that it only refers to."""
        outputs: dict[str, dict[str | None, InputItem]] = {}  # of the responses referred to, by item id
        bound = HistoryBound("input")
        items: list[InputItem] = []
        for position, item in enumerate(input_items(wire)):
            if item.type != "item_reference":
                items.append(item)
                continue
            response_id = response_id_of(item.id or "")
            if response_id is not None and response_id not in outputs:
                outputs[response_id] = await self._output_of(response_id, bound)
            referred = outputs.get(response_id or "", {}).get(item.id)
            if referred is None:
                raise NotFound(f"There is no item with the id {item.id!r}.", param=f"input[{position}].id")
            bound.add(len(_to_json(referred)), num_responses=0)
            items.append(referred)
        return items

    async def _output_of(self, response_id: str, bound: HistoryBound) -> dict[str | None, InputItem]:
        try:
            found = await self._responses.find(self._principal, response_id)
        except NotFound:
            return {}
        bound.add(len(found.body))
        return {item.id: item for item in _decode_output(found.body).output} if found.is_final else {}


class ResponsesEndpoints:
    def __init__(self, responses: Responses, max_body_bytes: int) -> None:
        self._responses = responses
        self._max_body_bytes = max_body_bytes
        self._decoder = BodyDecoder(ResponseRequest)

    def routes(self) -> list[Route]:
        one = "/v1/responses/{response_id}"
        return [
            Route("/v1/responses", named_params(self.create, PARAMS), methods=["POST"]),
            Route(
                "/v1/responses/input_tokens", named_params(self.count_input_tokens, PARAMS), methods=["POST"]
            ),
            Route(one, self.retrieve, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
            Route(f"{one}/input_items", self.list_input_items, methods=["GET"]),
        ]

    async def create(self, request: Request) -> ASGIApp:
        wire = await self._read(request)
        conversation = Conversation(self._responses, principal_of(request))
        own_items = await conversation.own_items(wire.input)
        items = [*await conversation.earlier_items(wire.previous_response_id), *own_items]
        events: ResponseEvents

        def build(answer: AnswerStream) -> ResponseEvents:
            nonlocal events
            events = ResponseEvents(
                new_response(wire, answer), wants_logprobs=wire.wants_logprobs, custom_tools=wire.custom_tools
            )
            events.note_warnings(answer)
            return events

        answer = await self._responses.submit(
            with_context(request, wire.to_generation(items)),
            build,
            input_items=_to_json(own_items),
            previous_id=wire.previous_response_id,
            is_stored=wire.is_stored,
            in_background=bool(wire.background),
        )
        if wire.background:
            return WholeAnswer(events.to_json(answer.model), answer.rate_limits)
        if wire.stream:
            return await EventStream.open(answer, request.receive, events)
        return await answer_whole(answer, request.receive, lambda deltas, usage: _to_json(events.body))

    async def count_input_tokens(self, request: Request) -> Response:
        wire = await self._read(request)
        principal = principal_of(request)
        gateway = self._responses.gateway
        model = gateway.catalogue.permitted(principal, wire.model)
        async with gateway.accounts.errand(principal, model.card.name, "count_tokens"):
            conversation = Conversation(self._responses, principal)
            own_items = await conversation.own_items(wire.input)
            items = [*await conversation.earlier_items(wire.previous_response_id), *own_items]
            return _json(InputTokens(len(await model.token_ids(wire.chat_prompt(items)))))

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
        found = await self._responses.find(principal_of(request), request.path_params["response_id"])
        items = _decode_items(found.input_items)
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
        wire.check()
        return wire


def _limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_PAGE
    if not given.isascii() or not given.isdecimal() or len(given) > 3 or not 1 <= int(given) <= MAX_PAGE:
        raise InvalidRequest(f"limit must be between 1 and {MAX_PAGE}.", param="limit")
    return int(given)


def _json(shape: msgspec.Struct) -> Response:
    return Response(_to_json(shape), media_type="application/json")
