"""`response.steer`: input that a client sends while a response is being made over a WebSocket.

Steering input waits until the response has ended, and the server then makes a response that continues with the input.
A response that ends with calls of the client's tools keeps the input for the request with the results.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from typing import Any

import msgspec
from starlette.websockets import WebSocket

from penstock.api.http.parsing import BodyDecoder
from penstock.api.openai.responses_answers import ResponseEvents
from penstock.api.openai.responses_items import InputItem
from penstock.core.errors import InvalidRequest

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
    """One submission. `raw` is the input as the client sent it, which a failure returns."""

    id: str
    previous_response_id: str
    raw: str | list[InputItem]
    items: list[InputItem]

    def failed(self, code: str, message: str) -> dict[str, Any]:
        failure = _failure(code, message, self.previous_response_id, self.raw)
        failure["steer"]["id"] = self.id
        return failure


class Steered(msgspec.Struct):
    """A response that is being made, and the steering inputs that wait for its end."""

    lane: str | None
    events: ResponseEvents
    is_steerable: bool
    steers: list[Steer] = []


class Steering:
    """The steering inputs of one connection."""

    def __init__(self) -> None:
        self._decoder = BodyDecoder(SteerMessage)
        self._live: dict[str, Steered] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._held: OrderedDict[str, list[Steer]] = OrderedDict()

    def begin(self, events: ResponseEvents, lane: str | None, *, is_steerable: bool) -> None:
        self._live[events.response_id] = Steered(lane, events, is_steerable)

    def end(self, events: ResponseEvents) -> list[Steer]:
        """Note that the response has ended, and return the inputs that waited for the end."""
        steered = self._live.pop(events.response_id, None)
        self._ended[events.response_id] = None
        while len(self._ended) > MAX_PENDING:
            self._ended.popitem(last=False)
        return [] if steered is None else steered.steers

    async def add(self, socket: WebSocket, data: bytes) -> tuple[bytes, str | None]:
        """Queue the input of a message. Returns the event that says so, or says why not, and its lane. Raises
        InvalidRequest for a message without the fields of one."""
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
        steer = Steer(f"steer_{uuid.uuid4().hex}", target, message.input, items)
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
        self, code: str, reason: str, message: SteerMessage, steered: Steered | None
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
