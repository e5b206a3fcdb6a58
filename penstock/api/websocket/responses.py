"""/v1/responses as a WebSocket: many responses over one connection, as `responses.connect` of OpenAI's SDK speaks it.

A client sends `response.create` with the fields of POST /v1/responses; the server sends the events of the stream, one
message each. Requests with the same `stream_id`, or with none, are answered one after another. A response that is not
stored can still be continued on the connection that made it, while it is among the last few.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.requests import HTTPConnection

from penstock.api.extensions import EXTENSION_FIELDS
from penstock.api.foreign_fields import refuse_foreign
from penstock.api.http.context import current_principal_of, principal_of, set_principal, set_request_id
from penstock.api.http.errors import sentence
from penstock.api.http.parsing import BodyDecoder
from penstock.api.openai.responses_answers import PARAMS
from penstock.api.openai.responses_endpoints import BegunResponse, ResponsesEndpoints
from penstock.api.openai.responses_items import InputItem
from penstock.api.openai.responses_requests import ResponseRequest
from penstock.api.websocket.endpoint import (
    MAX_BAD_MESSAGES,
    POLICY_VIOLATION,
    TOO_SLOW,
    SocketSession,
    WebSocketEndpoint,
)
from penstock.api.websocket.steering import Steer, Steering, failed_event, items_of, required_input
from penstock.core.errors import InvalidRequest, Overloaded, PenstockError, RateLimited
from penstock.gateway.answers.stream import ReaderGone
from penstock.gateway.responses.service import split_events
from penstock.gateway.responses.store import MAX_HISTORY_BYTES, StoredResponse

logger = logging.getLogger(__name__)

PATH = "/v1/responses"
MAX_RECENT = 4  # responses that are not stored, for each connection
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
        self._steering = Steering()

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
        except PenstockError as error:
            await self._send(_error(error, lane))
            if isinstance(error, InvalidRequest):
                self._num_bad_messages += 1
                if self._num_bad_messages >= MAX_BAD_MESSAGES:
                    await self._close(POLICY_VIOLATION, "too many messages that make no sense")
            return
        if held := self._steering.release(wire.previous_response_id):
            own = [InputItem(role="user", content=wire.input)] if isinstance(wire.input, str) else wire.input
            wire.input = [*held, *own]
        self._endpoint.metrics.num_requests += 1
        name = uuid.uuid4().hex
        before = self._lanes.get(lane)
        generates = envelope.generate is not False
        task = asyncio.create_task(self._answer_in_turn(name, wire, lane, before, generates=generates))
        self._live[name] = self._lanes[lane] = task
        task.add_done_callback(lambda _: self._end(name, lane, task))

    def _end(self, name: str, lane: str | None, task: asyncio.Task[None]) -> None:
        self._forget(name)
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
        following = await self._respond(name, wire, lane, generates=generates)
        while following is not None:  # which a steered response makes without being asked
            following = await self._respond(uuid.uuid4().hex, following, lane)

    async def _respond(
        self, name: str, wire: ResponseRequest, lane: str | None, *, generates: bool = True
    ) -> ResponseRequest | None:
        """Answer one request. Returns the request that steering input makes of what follows."""
        log = self._endpoint.request_log
        record = None if log is None else log.begin(name, "WS", PATH, self._socket.scope["headers"])
        status = 499
        try:
            connection = await self._connection(name)
            begin = self._responses.begin if generates else self._responses.begin_nothing
            begun = await begin(connection, wire, self._recent)
            self._answers[name] = begun.answer
            self._steering.begin(begun.events, lane, is_steerable=wire.conversation is None)
            try:
                await self._write(begun, lane)
                self._remember(begun, wire)
            finally:
                steers = self._steering.end(begun.events)
            status = 200
            return await self._followed(begun, wire, lane, steers) if steers else None
        except PenstockError as error:
            status = error.status
            await self._send(_error(error, lane))
        except ReaderGone:
            pass
        except Exception:
            status = 500
            logger.exception("request %s (WebSocket %s) failed", name, PATH)
            await self._send(_error(PenstockError("The server met an error that it did not foresee."), lane))
        finally:
            self._answers.pop(name, None)
            if log is not None and record is not None:
                log.end(record, "WS", PATH, status, principal_of(self._socket))
        return None

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
        for steer in self._steering.hold(events.response_id, steers):
            lost = failed_event(steer.failed("response_not_active", "Other responses came after this one."))
            await self._send_events(lost, lane)
        return None

    async def _connection(self, name: str) -> HTTPConnection:
        """Return the connection as one request sees it: with an id, and a caller whose key is still valid."""
        principal = await current_principal_of(self._socket)
        scope = {**self._socket.scope, "state": {**self._socket.scope["state"]}}
        set_principal(scope, principal)
        set_request_id(scope, name)
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


def _messages(events: bytes, lane: str | None) -> Iterator[bytes]:
    """Server-sent events as messages."""
    for event in split_events(events):
        data = event.partition(b"data: ")[2].rstrip(b"\n")
        if data:
            yield data if lane is None else data[:-1] + b',"stream_id":' + _to_json(lane) + b"}"


def _error(error: PenstockError, lane: str | None) -> bytes:
    param = PARAMS.get(error.param or "", error.param)
    detail = {"type": error.type, "code": error.code, "message": sentence(error), "param": param}
    message: dict[str, Any] = {"type": "error", "status": error.status, "error": detail}
    return _to_json(message if lane is None else message | {"stream_id": lane})
