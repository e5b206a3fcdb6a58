"""The messages of the WebSocket /v1/stream in both directions, as JSON texts.

The fields of a request are those of /v1/completions when it has a `prompt`, and those of /v1/chat/completions when it
has `messages`. A socket is only asked for the turn of its application.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
from starlette.websockets import WebSocket

from penstock.api.extensions import EXTENSION_FIELDS
from penstock.api.foreign_fields import refuse_foreign
from penstock.api.http.errors import sentence
from penstock.api.http.parsing import BodyDecoder
from penstock.api.http.translation import translated
from penstock.api.openai.answers import wire_finish_reason, wire_usage
from penstock.api.openai.requests import ChatCompletionRequest, CompletionRequest
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import AnswerStream
from penstock.gateway.prompts import GenerationRequest

MAX_ID_CHARS = 128

RequestId: TypeAlias = str | int | None
_to_json = msgspec.json.Encoder().encode


class Envelope(msgspec.Struct):
    """The fields that determine the kind of a message. `Raw` parts are decoded when the kind is known."""

    id: str | int | None = None
    cancel: str | int | msgspec.UnsetType = msgspec.UNSET
    ping: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class MessageDecoder:
    def __init__(self) -> None:
        self._envelope = BodyDecoder(Envelope)
        self._chat = BodyDecoder(ChatCompletionRequest, EXTENSION_FIELDS, refuse_foreign)
        self._completion = BodyDecoder(CompletionRequest, EXTENSION_FIELDS, refuse_foreign)

    async def envelope(self, socket: WebSocket, data: bytes) -> Envelope:
        envelope = await self._envelope.decode_in_turns(socket, data)
        if isinstance(envelope.id, str) and not 0 < len(envelope.id) <= MAX_ID_CHARS:
            raise InvalidRequest(f"An id has 1 to {MAX_ID_CHARS} characters.", param="id")
        return envelope

    async def request(self, socket: WebSocket, data: bytes, envelope: Envelope) -> GenerationRequest:
        has_prompt = envelope.prompt is not msgspec.UNSET
        if has_prompt == (envelope.messages is not msgspec.UNSET):
            raise InvalidRequest("Give either prompt or messages; or cancel or ping.", param="prompt")
        decoder = self._completion if has_prompt else self._chat
        wire = await decoder.decode_in_turns(socket, data)
        wire.stream = True  # everything streams here, whether or not the client says so
        if wire.logprobs is not None and wire.logprobs is not False:
            raise InvalidRequest(
                "Log-probabilities are not part of this protocol.",
                param="logprobs",
                hint="Use /v1/chat/completions or /v1/completions.",
            )
        messages = wire.messages if isinstance(wire, ChatCompletionRequest) else ()
        return await translated(messages, wire.to_generation)


class MessageWriter:
    """Writes the messages of one request. Everything but the text of a token is encoded once."""

    def __init__(self, request_id: RequestId, answer: AnswerStream) -> None:
        self._named = {} if request_id is None else {"id": request_id}
        self._start = b"{" if request_id is None else b'{"id":%b,' % _to_json(request_id)
        self._answer = answer
        self._numbers_choices = answer.num_choices > 1
        self._reasons: dict[int, str] = {}
        self._called_tools: set[int] = set()

    def news(self, deltas: Sequence[Delta]) -> list[bytes]:
        return [message for delta in deltas if (message := self._news_of(delta)) is not None]

    def done(self) -> bytes:
        reasons = [self._reasons[index] for index in sorted(self._reasons)]
        return _to_json(
            {
                **self._named,
                "done": True,
                "finish_reason": reasons if self._numbers_choices else reasons[0],
                "model": self._answer.model,
                "request_id": self._answer.id,
                "usage": wire_usage(self._answer.usage),
                **({"warnings": self._answer.warnings} if self._answer.warnings else {}),
            }
        )

    def _news_of(self, delta: Delta) -> bytes | None:
        if delta.tool_calls:
            self._called_tools.add(delta.index)
        if delta.finish_reason is not None:
            called_tools = delta.index in self._called_tools
            self._reasons[delta.index] = wire_finish_reason(delta.finish_reason, called_tools=called_tools)
        if delta.reasoning or delta.tool_calls:
            return _to_json(self._named | self._parts(delta))
        if not delta.text:
            return None
        index = b'"index":%d,' % delta.index if self._numbers_choices else b""
        return b'%b%b"token":%b}' % (self._start, index, _to_json(delta.text))

    def _parts(self, delta: Delta) -> dict[str, Any]:
        parts: dict[str, Any] = {"index": delta.index} if self._numbers_choices else {}
        if delta.reasoning:
            parts["reasoning"] = delta.reasoning
        if delta.text:
            parts["token"] = delta.text
        if delta.tool_calls:
            parts["tool_calls"] = delta.tool_calls
        return parts


def error_message(request_id: RequestId, error: PenstockError) -> bytes:
    detail: dict[str, Any] = {
        "message": sentence(error),
        "type": error.type,
        "code": error.code,
        "param": error.param,
        "status": error.status,
    }
    if error.retry_after_s is not None:
        detail["retry_after_s"] = error.retry_after_s
    return _to_json({"error": detail} if request_id is None else {"error": detail, "id": request_id})


def cancelled_message(request_id: RequestId, answer: AnswerStream | None) -> bytes:
    """Return the end of a request that its own client cancelled. What was generated until then counts."""
    message: dict[str, Any] = {"id": request_id, "done": True, "cancelled": True}
    if answer is not None:
        message["usage"] = wire_usage(answer.usage)
    return _to_json(message)


def pong_message(value: msgspec.Raw) -> bytes:
    return b'{"pong":%b}' % bytes(value)
