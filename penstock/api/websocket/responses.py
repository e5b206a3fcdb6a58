"""/v1/responses as a WebSocket: many responses over one connection, as `responses.connect` of OpenAI's SDK speaks it.

A client sends `response.create` with the fields of POST /v1/responses; the server sends the events of the stream, one
message each. Requests with the same `stream_id`, or with none, are answered one after another. A response that is not
stored can still be continued on the connection that made it, while it is among the last few.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket

from penstock.api.extensions import EXTENSION_FIELDS, refuse_foreign
from penstock.api.http.context import current_principal_of, principal_of, set_principal, state_of
from penstock.api.http.errors import sentence
from penstock.api.http.parsing import BodyDecoder
from penstock.api.openai.responses_answers import PARAMS, ResponseEvents
from penstock.api.openai.responses_endpoints import BegunResponse, ResponsesEndpoints
from penstock.api.openai.responses_items import InputItem
from penstock.api.openai.responses_requests import ResponseRequest
from penstock.api.websocket.endpoint import (
    TOO_SLOW,
    RequestId,
    SocketSession,
    WebSocketEndpoint,
    refusal_of,
)
from penstock.core.errors import InvalidRequest, Overloaded, PenstockError, RateLimited
from penstock.gateway.responses.service import split_events
from penstock.gateway.responses.store import MAX_HISTORY_BYTES, StoredResponse

MAX_PENDING = 16  # steering inputs of a response
MAX_HELD = 4  # responses that wait for results of tools, for each connection


class SteerMessage(msgspec.Struct):
    type: str
    previous_response_id: str
    input: str | list[InputItem]

    def items(self) -> list[InputItem]:
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        if not items or any(item.type not in (None, "message") or item.role != "user" for item in items):
            raise InvalidRequest("Steering takes a text, or messages of the user.", param="input")
        return items


class Steer(msgspec.Struct):
    """One submission of so many bytes. `raw` is the input as the client sent it, which a failure returns."""

    id: str
    previous_response_id: str
    raw: str | list[InputItem]
    items: list[InputItem]
    num_bytes: int

    def failed(self, code: str, message: str) -> dict[str, Any]:
        failure = _failure(code, message, self.previous_response_id, self.raw)
        failure["steer"]["id"] = self.id
        return failure


class SteeredResponse(msgspec.Struct):
    """A response that is being made, and the steering inputs that wait for its end. `owner` is the request that the
    response was first made for."""

    owner: str
    lane: str | None
    events: ResponseEvents
    is_steerable: bool
    steers: list[Steer] = []


class Steering:
    """The steering inputs of one connection: input that a client sends while a response is being made.

    Such input waits until the response has ended, and the server then makes a response that continues with the
    input. A response that ends with calls of the client's tools keeps the input for the request with the results.
    """

    def __init__(self, keep: Callable[[str, int], None]) -> None:
        """`keep` counts the bytes of an input for an owner, or raises RateLimited."""
        self._keep = keep
        self._decoder = BodyDecoder(SteerMessage)
        self._live: dict[str, SteeredResponse] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._held: OrderedDict[str, list[Steer]] = OrderedDict()

    @property
    def num_held_bytes(self) -> int:
        return sum(steer.num_bytes for steers in self._held.values() for steer in steers)

    def begin(self, owner: str, events: ResponseEvents, lane: str | None, *, is_steerable: bool) -> None:
        self._live[events.response_id] = SteeredResponse(owner, lane, events, is_steerable)

    def end(self, events: ResponseEvents) -> list[Steer]:
        """Note that the response has ended, and return the inputs that waited for the end."""
        steered = self._live.pop(events.response_id, None)
        self._ended[events.response_id] = None
        while len(self._ended) > MAX_PENDING:
            self._ended.popitem(last=False)
        return [] if steered is None else steered.steers

    async def add(self, socket: WebSocket, data: bytes) -> tuple[bytes, str | None]:
        """Queue the input of a message. Returns the event that says so, or says why not, and its lane. Raises
        InvalidRequest for a message without the fields of one, and RateLimited where too much is kept."""
        message = await self._decoder.decode_in_turns(socket, data)
        target = message.previous_response_id
        steered = self._live.get(target)
        try:
            items = message.items()
        except InvalidRequest as error:
            return self._refusal("invalid_input", error.message, message, steered)
        if steered is None:
            code = "response_already_completed" if target in self._ended else "response_not_found"
            return self._refusal(code, "No response with this id is being made here.", message, None)
        if not steered.is_steerable:
            reason = "A response of a conversation cannot be steered."
            return self._refusal("steering_not_supported", reason, message, steered)
        if len(steered.steers) >= MAX_PENDING:
            return self._refusal("too_many_pending_steers", "Too much input is waiting.", message, steered)
        self._keep(_steers_of(steered.owner), len(data))
        steer = Steer(f"steer_{uuid.uuid4().hex}", target, message.input, items, len(data))
        steered.steers = [*steered.steers, steer]
        told = {"id": steer.id, "previous_response_id": target}
        return steered.events.event("response.steer.accepted", steer=told), steered.lane

    def hold(self, response_id: str, steers: list[Steer]) -> list[Steer]:
        """Keep inputs until the results of tools come. Returns inputs that had to make room."""
        self._held[response_id] = steers
        return self._held.popitem(last=False)[1] if len(self._held) > MAX_HELD else []

    def release(self, response_id: str | None) -> list[InputItem]:
        """Return the inputs that were kept for a request that continues with the response."""
        return items_of(self._held.pop(response_id or "", []))

    def _refusal(
        self, code: str, reason: str, message: SteerMessage, steered: SteeredResponse | None
    ) -> tuple[bytes, str | None]:
        failure = _failure(code, reason, message.previous_response_id, message.input)
        if steered is None:
            return failed_event(failure), None
        return steered.events.event("response.steer.failed", **failure), steered.lane


def items_of(steers: list[Steer]) -> list[InputItem]:
    return [item for steer in steers for item in steer.items]


def failed_event(failure: dict[str, Any]) -> bytes:
    """Return a failure without a response whose events it could be numbered among."""
    event = {"type": "response.steer.failed", "sequence_number": 0, **failure}
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def required_input(events: ResponseEvents) -> list[dict[str, str]]:
    """Return the input that the model needs to continue: a result for each tool call of the response."""
    required = []
    for item in events.body.output:
        call = msgspec.to_builtins(item)
        if not call["type"].endswith("_call"):
            continue
        stub = {"type": f"{call['type']}_output", "call_id": call["call_id"]}
        required.append(stub | ({"name": call["name"]} if call["type"] == "function_call" else {}))
    return required


def _failure(code: str, message: str, target: str, raw: str | list[InputItem]) -> dict[str, Any]:
    return {
        "error": {"type": "invalid_request_error", "code": code, "message": message},
        "steer": {"previous_response_id": target, "input": raw},
    }


PATH = "/v1/responses"
MAX_RECENT = 4  # responses that are not stored, for each connection
_EARLIER = "earlier"  # the name of what a connection keeps of responses that have ended
_MAX_LANE_CHARS = 128
_to_json = msgspec.json.Encoder().encode


class CreateMessage(msgspec.Struct):
    """The fields of a message besides the fields of a request."""

    type: str
    stream_id: str | None = None
    generate: bool | None = None


class ResponsesSession(SocketSession):
    """One connection. `_lanes` holds the newest request of each stream id."""

    def __init__(self, endpoint: WebSocketEndpoint, socket: Any, responses: ResponsesEndpoints) -> None:
        super().__init__(endpoint, socket)
        self._responses = responses
        self._envelopes = BodyDecoder(CreateMessage)
        self._requests = BodyDecoder(ResponseRequest, EXTENSION_FIELDS, refuse_foreign)
        self._lanes: dict[str | None, asyncio.Task[None]] = {}
        self._recent: OrderedDict[str, StoredResponse] = OrderedDict()
        self._steering = Steering(self._keep)

    async def _handle(self, data: bytes) -> None:
        lane: str | None = None
        try:
            envelope = await self._envelopes.decode_in_turns(self._socket, data)
            lane = (envelope.stream_id or "")[:_MAX_LANE_CHARS] or None
            if envelope.type == "response.steer":
                await self._send_events(*await self._steering.add(self._socket, data))
                return
            if envelope.type != "response.create":
                raise InvalidRequest(
                    f"Messages of the type {envelope.type[:64]!r} are not supported.", param="type"
                )
            if len(self._live) >= self._endpoint.config.max_websocket_requests:
                raise RateLimited("This connection has too many requests that wait.", retry_after_s=1.0)
            wire = await self._requests.decode_in_turns(self._socket, data)
            if wire.background:
                raise InvalidRequest("A WebSocket has no responses in the background.", param="background")
            wire.stream = True
            wire.check()
            name = uuid.uuid4().hex
            self._keep(name, len(data))
        except (PenstockError, RecursionError) as caught:
            error = refusal_of(caught)
            await self._refuse(error, _error(lane, error))
            return
        if held := self._steering.release(wire.previous_response_id):
            own = [InputItem(role="user", content=wire.input)] if isinstance(wire.input, str) else wire.input
            wire.input = [*held, *own]
            self._count_earlier()
        self._endpoint.metrics.num_requests += 1
        before = self._lanes.get(lane)
        generates = envelope.generate is not False
        task = asyncio.create_task(self._answer_in_turn(name, wire, lane, before, generates=generates))
        self._live[name] = self._lanes[lane] = task
        task.add_done_callback(lambda _: self._end(name, lane, task))

    def _end(self, name: str, lane: str | None, task: asyncio.Task[None]) -> None:
        self._forget(name)
        self._release(_steers_of(name))
        if self._lanes.get(lane) is task:
            del self._lanes[lane]

    async def _answer_in_turn(
        self,
        name: str,
        wire: ResponseRequest,
        lane: str | None,
        before: asyncio.Task[None] | None,
        *,
        generates: bool,
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        following = await self._respond(name, name, wire, lane, generates=generates)
        while following is not None:  # which a steered response makes without being asked
            following = await self._respond(uuid.uuid4().hex, name, following, lane)

    async def _respond(
        self, name: str, owner: str, wire: ResponseRequest, lane: str | None, *, generates: bool = True
    ) -> ResponseRequest | None:
        """Answer one request. Returns the request that steering input makes of what follows. Both belong to the
        client's request `owner`."""
        steers: list[Steer] = []
        async with self._answering(name, PATH, partial(_error, lane)):
            connection = await self._connection(name)
            begin = self._responses.begin if generates else self._responses.begin_nothing
            begun = await begin(connection, wire, self._recent)
            self._answers[name] = begun.answer
            self._steering.begin(owner, begun.events, lane, is_steerable=wire.conversation is None)
            try:
                await self._write(begun, lane)
                self._release(owner)  # the message, which may be a part of what is remembered
                self._remember(begun, wire)
            finally:
                del self._answers[name]
                waiting = self._steering.end(begun.events)
            steers = waiting
        return await self._followed(begun, wire, lane, steers) if steers else None

    async def _followed(
        self, begun: BegunResponse, wire: ResponseRequest, lane: str | None, steers: list[Steer]
    ) -> ResponseRequest | None:
        """Decide what becomes of the steering input of a response that has ended."""
        events = begun.events
        if events.body.status not in ("completed", "incomplete"):
            for steer in steers:
                failure = steer.failed("response_not_active", "The response failed.")
                await self._send_events(events.event("response.steer.failed", **failure), lane)
            return None
        required = required_input(events)
        if not required:
            return msgspec.structs.replace(
                wire, input=items_of(steers), previous_response_id=events.response_id
            )
        for steer in steers:
            told = {"id": steer.id, "previous_response_id": steer.previous_response_id}
            pending = events.event(
                "response.steer.pending",
                steer=told,
                reason="waiting_for_required_input",
                required_input=required,
            )
            await self._send_events(pending, lane)
        lost_steers = self._steering.hold(events.response_id, steers)
        self._count_earlier()
        for steer in lost_steers:
            lost = failed_event(steer.failed("response_not_active", "Other responses came after this one."))
            await self._send_events(lost, lane)
        return None

    async def _connection(self, name: str) -> HTTPConnection:
        """Return the connection as one request sees it: with an id, and a caller whose key is still valid."""
        principal = await current_principal_of(self._socket)
        scope = {**self._socket.scope, "state": {}}
        set_principal(scope, principal)
        state_of(scope).request_id = name
        return HTTPConnection(scope)

    async def _write(self, begun: BegunResponse, lane: str | None) -> None:  # type: ignore[override]
        answer, events = begun.answer, begun.events
        has_begun = False
        try:
            async for deltas in answer:
                if not has_begun:
                    has_begun = True
                    await self._send_events(events.opening(answer), lane)
                for delta in deltas:
                    await self._send_events(events.chunk(delta), lane)
            if not has_begun:
                await self._send_events(events.opening(answer), lane)
            await self._send_events(events.closing(answer.usage), lane)
        except PenstockError as error:
            if not has_begun:
                raise
            if isinstance(error, Overloaded):
                self._endpoint.metrics.num_too_slow += 1
                await self._close(TOO_SLOW, error.message)
            else:
                await self._send_events(events.failure(error), lane)
        finally:
            answer.cancel()

    async def _send_events(self, events: bytes, lane: str | None) -> None:
        for message in _messages(events, lane):
            await self._send(message)

    def _remember(self, begun: BegunResponse, wire: ResponseRequest) -> None:
        body = begun.events.body
        if body.status not in ("completed", "incomplete") or (wire.is_stored and begun.is_stored):
            return
        self._recent[body.id] = StoredResponse(
            id=body.id,
            workspace_id=principal_of(self._socket).workspace_id,
            created_at=body.created_at,
            expires_at=float("inf"),
            is_final=True,
            body=_to_json(body),
            input_items=begun.input_items,
            previous_id=begun.previous_id,
        )
        while len(self._recent) > MAX_RECENT or (
            sum(each.num_bytes for each in self._recent.values()) > MAX_HISTORY_BYTES
        ):
            self._recent.popitem(last=False)
        self._count_earlier()
        while self._recent and self._bodies.kept.is_over_for(self._holder):
            self._recent.popitem(last=False)
            self._count_earlier()

    def _keep(self, request_id: RequestId, num_bytes: int) -> None:
        """As for all WebSockets, but earlier responses make room."""
        while True:
            try:
                return super()._keep(request_id, num_bytes)
            except RateLimited:
                if not self._recent:
                    raise
            self._recent.popitem(last=False)
            self._count_earlier()

    def _count_earlier(self) -> None:
        """Count what is kept of responses that have ended."""
        num_bytes = sum(each.num_bytes for each in self._recent.values()) + self._steering.num_held_bytes
        self._bodies.kept.add(self._holder, num_bytes - self._kept.get(_EARLIER, 0))
        self._kept[_EARLIER] = num_bytes


def _steers_of(owner: str) -> str:
    return f"{owner} steers"


def _messages(events: bytes, lane: str | None) -> Iterator[bytes]:
    """Server-sent events as messages."""
    for event in split_events(events):
        data = event.partition(b"data: ")[2].rstrip(b"\n")
        if data:
            yield data if lane is None else data[:-1] + b',"stream_id":' + _to_json(lane) + b"}"


def _error(lane: str | None, error: PenstockError) -> bytes:
    param = PARAMS.get(error.param or "", error.param)
    detail = {"type": error.type, "code": error.code, "message": sentence(error), "param": param}
    message: dict[str, Any] = {"type": "error", "status": error.status, "error": detail}
    return _to_json(message if lane is None else message | {"stream_id": lane})
