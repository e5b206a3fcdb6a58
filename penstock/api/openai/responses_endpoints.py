"""/v1/responses: create, stream, look up, list input, compact, cancel and delete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp

from penstock.api.extensions import EXTENSION_FIELDS, refuse_foreign
from penstock.api.http.answers import (
    EventStream,
    ObjectList,
    WholeAnswer,
    answer_whole,
    json_response,
    while_present,
)
from penstock.api.http.context import note_model, principal_of, request_id_of, with_context
from penstock.api.http.errors import named_params
from penstock.api.http.parsing import BodyDecoder, choice_of, integer_of, translated
from penstock.api.http.routes import PAGE, Operation
from penstock.api.openai.requests import ServiceTier
from penstock.api.openai.responses_answers import (
    PARAMS,
    ResponseBody,
    ResponseEvents,
    ResponseUsage,
    new_response,
    response_usage,
)
from penstock.api.openai.responses_history import History, input_items_of, page_of
from penstock.api.openai.responses_items import InputItem, compaction_item
from penstock.api.openai.responses_requests import ResponseRequest
from penstock.api.openai.tools import Toolbox
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.request import SamplingDefaults
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import AnswerStream, EmptyAnswer, WrappedAnswer
from penstock.gateway.prompts import RequestWarning
from penstock.gateway.responses.objects import ObjectStore
from penstock.gateway.responses.service import Responses
from penstock.gateway.responses.store import StoredResponse

DEFAULT_PAGE = 20
MAX_PAGE = 100
MAX_EVENTS = 100_000_000  # larger than the number of any event

_to_json = msgspec.json.Encoder().encode


class DeletedResponse(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class InputItemList(ObjectList[InputItem]): ...


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: str = "response.input_tokens"


MAX_SUMMARY_TOKENS = 2048
_ASK = (
    "Summarize the conversation so far, so that it can be continued from the summary alone. Keep the goals, the "
    "decisions, the facts, the names of files and functions, the results of tools, and what is still to be done."
)


class CompactRequest(msgspec.Struct):
    model: str | None = None
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    service_tier: ServiceTier | None = None


class CompactedResponse(msgspec.Struct, kw_only=True):
    id: str
    created_at: int
    output: list[InputItem]
    usage: ResponseUsage
    warnings: tuple[RequestWarning, ...] | msgspec.UnsetType = msgspec.UNSET
    object: str = "response.compaction"


@dataclass(frozen=True, slots=True)
class BegunResponse:
    answer: AnswerStream
    events: ResponseEvents
    # JSON: the items of responses that are not stored, then the request's own items.
    input_items: bytes
    previous_id: str | None  # of a stored response
    is_stored: bool


class FollowedAnswer(WrappedAnswer):
    """A response that runs in the background. Its reader waits for no token of it, and may leave."""

    def __init__(self, answer: AnswerStream, events: AsyncIterator[bytes]) -> None:
        super().__init__(answer)
        self.events = events

    async def __anext__(self) -> list[Delta]:
        return []

    def cancel(self) -> None:
        """Does nothing: `Responses` owns the answer."""


class FollowedStream(EventStream):
    """The events of a response that runs in the background, as its log has them."""

    async def _send_events(self) -> bytes:
        assert isinstance(self._answer, FollowedAnswer)
        self._departure.take_back()
        try:
            async for events in self._answer.events:
                await self._write(events)
        except asyncio.CancelledError:
            self._departure.check()
            raise
        return b""


class ResponsesEndpoints:
    def __init__(self, responses: Responses, objects: ObjectStore) -> None:
        self._responses = responses
        self._objects = objects
        self._decoder = BodyDecoder(ResponseRequest, EXTENSION_FIELDS, refuse_foreign)
        self._compact_decoder = BodyDecoder(CompactRequest)

    def routes(self) -> list[Operation]:
        one = "/v1/responses/{response_id}"
        return [
            Operation(
                "POST /v1/responses",
                named_params(self.create, PARAMS),
                ResponseBody,
                request=ResponseRequest,
                streams=True,
            ),
            Operation(
                "POST /v1/responses/input_tokens",
                named_params(self.count_input_tokens, PARAMS),
                InputTokens,
                request=ResponseRequest,
            ),
            Operation(
                "POST /v1/responses/compact",
                named_params(self.compact, PARAMS),
                CompactedResponse,
                request=CompactRequest,
            ),
            Operation(
                f"GET {one}", self.retrieve, ResponseBody, query=("stream", "starting_after"), streams=True
            ),
            Operation(f"DELETE {one}", self.delete, DeletedResponse),
            Operation(f"POST {one}/cancel", self.cancel, ResponseBody, takes_body=False),
            Operation(f"GET {one}/input_items", self.list_input_items, InputItemList, query=(*PAGE, "order")),
        ]

    async def create(self, request: Request) -> ASGIApp:
        wire = await self._read(request)
        if wire.background and not wire.stream:
            begun = await self.begin(request, wire)
            return WholeAnswer(begun.events.to_json(begun.answer.model), begun.answer.rate_limits)
        events: ResponseEvents | None = None

        async def submit() -> AnswerStream:
            nonlocal events
            begun = await self.begin(request, wire)
            events = begun.events
            if not wire.background:
                return begun.answer
            found = await self._responses.find(principal_of(request), events.response_id)
            return FollowedAnswer(begun.answer, self._responses.follow(found, 0))

        def written(answer: AnswerStream) -> ResponseEvents:
            assert events is not None
            return events

        def failure(error: PenstockError) -> bytes:
            refused = EmptyAnswer(request_id_of(request), wire.model or "")
            return ResponseEvents(new_response(wire, refused), wants_logprobs=False).failure(error)

        if wire.stream:
            kind = FollowedStream if wire.background else EventStream
            return await kind.open(request, submit(), written, failure)
        return await answer_whole(request, submit(), lambda answer, _: _to_json(written(answer).body))

    async def begin(
        self,
        connection: HTTPConnection,
        wire: ResponseRequest,
        recent: Mapping[str, StoredResponse] | None = None,
    ) -> BegunResponse:
        """Submit a request. `recent` are responses that are not stored and that it may continue with."""
        history = History(self._responses, self._objects, principal_of(connection), recent)
        own_items, earlier = await self._items_of(connection, wire, history)
        toolbox = Toolbox(wire.tools)
        items = [*earlier, *own_items]
        generation = await translated(items, lambda: wire.to_generation(items, toolbox))
        generation = with_context(connection, generation)
        events: ResponseEvents

        def build(answer: AnswerStream) -> ResponseEvents:
            nonlocal events
            events = ResponseEvents(
                new_response(wire, answer, self._stated(answer)),
                wants_logprobs=wire.wants_logprobs,
                called=toolbox.called,
            )
            events.note_warnings(answer)
            return events

        async def add_to_conversation() -> None:
            if wire.conversation_id is not None and events.body.status in ("completed", "incomplete"):
                await history.add_to_conversation(wire.conversation_id, [*own_items, *events.body.output])

        unstored, previous_id = history.unstored(wire.previous_response_id)
        encoded_items = _to_json([*unstored, *own_items])
        answer = await self._responses.submit(
            generation,
            build,
            input_items=encoded_items,
            previous_id=previous_id,
            is_stored=wire.is_stored,
            in_background=bool(wire.background),
            is_streamed=bool(wire.stream),
            on_end=add_to_conversation,
        )
        return BegunResponse(answer, events, encoded_items, previous_id, wire.is_stored)

    async def begin_nothing(
        self, connection: HTTPConnection, wire: ResponseRequest, recent: Mapping[str, StoredResponse]
    ) -> BegunResponse:
        """Return a response without output, to be continued on the same connection. Checks the request as `begin`
        does."""
        principal = principal_of(connection)
        history = History(self._responses, self._objects, principal, recent)
        own_items, _ = await self._items_of(connection, wire, history)
        toolbox = Toolbox(wire.tools)
        wire.to_generation([*own_items, InputItem(role="user", content="")], toolbox)
        model = self._responses.gateway.catalogue.permitted(principal, wire.model)
        answer = EmptyAnswer(request_id_of(connection), model.card.name)
        events = ResponseEvents(new_response(wire, answer, self._stated(answer)), wants_logprobs=False)
        unstored, previous_id = history.unstored(wire.previous_response_id)
        return BegunResponse(answer, events, _to_json([*unstored, *own_items]), previous_id, is_stored=False)

    async def _items_of(
        self, connection: HTTPConnection, wire: ResponseRequest | CompactRequest, history: History
    ) -> tuple[list[InputItem], list[InputItem]]:
        """Return the items of a request, and those that it continues with. Stored items are read only for a caller
        whose limits would let the request in."""
        gateway, principal = self._responses.gateway, principal_of(connection)
        conversation_id = wire.conversation_id if isinstance(wire, ResponseRequest) else None
        model = ""
        with suppress(PenstockError):  # which comes later, and in the right words
            model = gateway.catalogue.answering(wire.model, principal).name
        reads = wire.previous_response_id is not None or conversation_id is not None or _has_references(wire)
        admitted = gateway.accounts.errand(principal, model, "responses", is_counted=False)
        async with admitted if reads else nullcontext():
            own_items = await history.own_items(wire.input or [], request_id_of(connection))
            return own_items, await history.earlier_items(wire.previous_response_id, conversation_id)

    def _stated(self, answer: AnswerStream) -> SamplingDefaults:
        """Return the sampling defaults of the answering model; empty for a model of an external server."""
        try:
            return self._responses.gateway.model(answer.model).card.sampling_defaults
        except PenstockError:
            return SamplingDefaults()

    async def count_input_tokens(self, request: Request) -> Response:
        wire = await self._read(request)
        principal = principal_of(request)
        gateway = self._responses.gateway
        model = gateway.catalogue.permitted(principal, wire.model)
        async with gateway.accounts.errand(principal, model.card.name, "count_tokens"):
            history = History(self._responses, self._objects, principal)
            own_items = await history.own_items(wire.input, request_id_of(request))
            earlier = await history.earlier_items(wire.previous_response_id, wire.conversation_id)
            items = [*earlier, *own_items]
            prompt = wire.chat_prompt(items, Toolbox(wire.tools))
            counting = gateway.count_tokens(model, prompt, principal)
            return json_response(InputTokens(await while_present(request, counting)))

    async def compact(self, request: Request) -> ASGIApp:
        """Answer with a shorter form of a long conversation: the user's messages, and one compaction item with the
        model's summary of everything. Clients send the item back in place of the items that it stands for."""
        wire = await self._compact_decoder.read(request)
        note_model(request, wire.model)
        history = History(self._responses, self._objects, principal_of(request))
        own_items, earlier = await self._items_of(request, wire, history)
        items = [*earlier, *own_items]
        if not items:
            raise InvalidRequest("There is nothing to compact.", param="input")
        asked = ResponseRequest(
            input=[],
            model=wire.model,
            instructions=wire.instructions,
            prompt_cache_key=wire.prompt_cache_key,
            service_tier=wire.service_tier,
            truncation="auto",
        )
        generation = asked.to_generation([*items, InputItem(role="user", content=_ASK)], Toolbox(None))
        generation = msgspec.structs.replace(generation, default_max_tokens=MAX_SUMMARY_TOKENS)
        submitted = self._responses.gateway.submit(with_context(request, generation))
        return await answer_whole(request, submitted, partial(_compacted, request_id_of(request), items))

    async def retrieve(self, request: Request) -> Response:
        found = await self._responses.find(principal_of(request), request.path_params["response_id"])
        if request.query_params.get("stream", "false").lower() != "true":
            return Response(found.body, media_type="application/json")
        after = integer_of(request, "starting_after", default=-1, low=0, high=MAX_EVENTS)
        if not found.is_streamed:
            raise InvalidRequest(
                "Only a response that was created with both background and stream can be streamed again.",
                param="stream",
            )
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        events = self._responses.follow(found, after + 1)
        return StreamingResponse(events, headers=headers, media_type="text/event-stream")

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        await self._responses.delete(principal_of(request), response_id)
        return json_response(DeletedResponse(response_id))

    async def cancel(self, request: Request) -> Response:
        body = await self._responses.cancel(principal_of(request), request.path_params["response_id"])
        return Response(body, media_type="application/json")

    async def list_input_items(self, request: Request) -> Response:
        found = await self._responses.find(principal_of(request), request.path_params["response_id"])
        items = await input_items_of(found)
        if choice_of(request, "order", default="desc", choices=("asc", "desc")) == "desc":
            items.reverse()
        limit = integer_of(request, "limit", default=DEFAULT_PAGE, low=1, high=MAX_PAGE)
        page, has_more = page_of(items, request.query_params.get("after"), limit)
        return json_response(InputItemList.of(page, has_more=has_more))

    async def _read(self, request: Request) -> ResponseRequest:
        wire = await self._decoder.read(request)
        note_model(request, wire.model)
        wire.check()
        return wire


def _has_references(wire: ResponseRequest | CompactRequest) -> bool:
    items = wire.input if isinstance(wire.input, list) else ()
    return any(item.type == "item_reference" for item in items)


def _compacted(
    request_id: str, items: Sequence[InputItem], answer: AnswerStream, deltas: Sequence[Delta]
) -> bytes:
    said = [item for item in items if item.type == "message" and item.role == "user"]
    return _to_json(
        CompactedResponse(
            id=f"resp_{request_id}",
            created_at=int(time.time()),
            output=[*said, compaction_item(f"cmp_{request_id}", deltas[0].text.strip())],
            usage=response_usage(answer.usage),
            warnings=answer.warnings or msgspec.UNSET,
        )
    )
