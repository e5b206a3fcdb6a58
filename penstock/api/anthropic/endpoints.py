"""/v1/messages and /v1/messages/count_tokens: decode, submit, answer.

An answer is a list of blocks: thinking, then text, then tool_use. In a stream one block is open at a time, and the
constant part of its deltas is encoded once.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from penstock.api.anthropic.requests import GUARDED_FIELDS, CountTokensRequest, MessagesRequest
from penstock.api.extensions import refuse_foreign
from penstock.api.http.answers import EventStream, IdList, answer_whole, json_response, while_present
from penstock.api.http.context import note_model, principal_of, request_id_of, with_context
from penstock.api.http.errors import anthropic_error_event, timestamp
from penstock.api.http.parsing import BodyDecoder, translated
from penstock.api.http.routes import Operation
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.request import FinishReason, Tier
from penstock.gateway.answers.choice import Delta, ToolCallDelta
from penstock.gateway.answers.stream import AnswerStream
from penstock.gateway.gateway import Gateway
from penstock.gateway.models.catalogue import ListedModel
from penstock.gateway.prompts import RequestWarning, Usage

_to_json = msgspec.json.Encoder().encode

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]
_SERVICE_TIERS = {Tier.PRIORITY: "priority", Tier.DEFAULT: "standard", Tier.BATCH: "batch"}


class CacheCreation(msgspec.Struct, frozen=True):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True):
    """`input_tokens` are those that were neither read from the cache nor written to it."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    service_tier: str


class TextContent(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingContent(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseContent(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent


class Message(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    warnings: tuple[RequestWarning, ...] | msgspec.UnsetType = msgspec.UNSET


def message_usage(usage: Usage, tier: Tier) -> MessageUsage:
    written = usage.cache_write_5m_tokens + usage.cache_write_1h_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cache_read_tokens - written,
        cache_creation_input_tokens=written,
        cache_read_input_tokens=usage.cache_read_tokens,
        cache_creation=CacheCreation(usage.cache_write_5m_tokens, usage.cache_write_1h_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.reasoning_tokens),
        service_tier=_SERVICE_TIERS[tier],
    )


def message(answer: AnswerStream, delta: Delta) -> Message:
    """Return the whole answer, whose only choice ended with `delta`."""
    content: list[Content] = []
    if delta.reasoning:
        signature = _signature(hashlib.sha256(delta.reasoning.encode()))
        content.append(ThinkingContent(delta.reasoning, signature))
    if delta.text:
        content.append(TextContent(delta.text))
    content += [
        ToolUseContent(tool_use_id(call.id or ""), call.name or "", _input(call.arguments))
        for call in delta.tool_calls
    ]
    return Message(
        id=_message_id(answer),
        model=answer.model,
        content=content,
        stop_reason=_stop_reason(delta, has_tool_use=bool(delta.tool_calls)),
        stop_sequence=delta.stop_sequence,
        usage=message_usage(answer.usage, answer.tier),
        warnings=answer.warnings or msgspec.UNSET,
    )


class MessageEvents:
    """The event stream of one answer; an `EventWriter`."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._tier = Tier.DEFAULT
        self._num_blocks = 0
        self._open_kind: str | None = None
        self._delta_head = b""  # of the open block
        self._thinking_digest = hashlib.sha256()
        self._has_tool_use = False
        self._last_delta: Delta | None = None

    def opening(self, answer: AnswerStream) -> bytes:
        self._tier = answer.tier
        start = Message(
            id=_message_id(answer),
            model=answer.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=message_usage(answer.usage, answer.tier),
            warnings=answer.warnings or msgspec.UNSET,
        )
        return (
            b'event: message_start\ndata: {"type":"message_start","message":%b}\n\n' % _to_json(start) + PING
        )

    def chunk(self, delta: Delta) -> bytes:
        if delta.finish_reason is not None:
            self._last_delta = delta
        if delta.text and not delta.reasoning and not delta.tool_calls and self._open_kind == "text":
            return b"%b%b}}\n\n" % (self._delta_head, _to_json(delta.text))
        parts: list[bytes] = []
        if delta.reasoning:
            if self._open_kind != "thinking":
                parts.append(
                    self._start_block("thinking", b'{"type":"thinking","thinking":"","signature":""}')
                )
            self._thinking_digest.update(delta.reasoning.encode())
            parts.append(b"%b%b}}\n\n" % (self._delta_head, _to_json(delta.reasoning)))
        if delta.text:
            if self._open_kind != "text":
                parts.append(self._start_block("text", b'{"type":"text","text":""}'))
            parts.append(b"%b%b}}\n\n" % (self._delta_head, _to_json(delta.text)))
        parts += [self._tool_call(call) for call in delta.tool_calls]
        return b"".join(parts)

    def closing(self, usage: Usage) -> bytes:
        assert self._last_delta is not None
        delta = {
            "stop_reason": _stop_reason(self._last_delta, has_tool_use=self._has_tool_use),
            "stop_sequence": self._last_delta.stop_sequence,
        }
        ending = b'event: message_delta\ndata: {"type":"message_delta","delta":%b,"usage":%b}\n\n' % (
            _to_json(delta),
            _to_json(message_usage(usage, self._tier)),
        )
        return self._stop_block() + ending + _MESSAGE_STOP

    def failure(self, error: PenstockError) -> bytes:
        return anthropic_error_event(error, self._request_id)

    def _tool_call(self, call: ToolCallDelta) -> bytes:
        opened = b""
        if call.id is not None:
            self._has_tool_use = True
            block = {"type": "tool_use", "id": tool_use_id(call.id), "name": call.name or "", "input": {}}
            opened = self._start_block("tool_use", _to_json(block))
        if not call.arguments:
            return opened
        return b"%b%b%b}}\n\n" % (opened, self._delta_head, _to_json(call.arguments))

    def _start_block(self, kind: str, block: bytes) -> bytes:
        delta_type, field = {
            "thinking": ("thinking_delta", "thinking"),
            "text": ("text_delta", "text"),
            "tool_use": ("input_json_delta", "partial_json"),
        }[kind]
        stopped = self._stop_block()
        index = self._num_blocks
        self._num_blocks += 1
        self._open_kind = kind
        self._delta_head = self._delta_start(index, delta_type, field)
        return stopped + (
            b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
            % (index, block)
        )

    def _stop_block(self) -> bytes:
        if self._open_kind is None:
            return b""
        index = self._num_blocks - 1
        signed = b""
        if self._open_kind == "thinking":
            head = self._delta_start(index, "signature_delta", "signature")
            signed = b"%b%b}}\n\n" % (head, _to_json(_signature(self._thinking_digest)))
            self._thinking_digest = hashlib.sha256()
        self._open_kind = None
        return b'%bevent: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n' % (
            signed,
            index,
        )

    @staticmethod
    def _delta_start(index: int, delta_type: str, field: str) -> bytes:
        return (
            'event: content_block_delta\ndata: {"type":"content_block_delta",'
            f'"index":{index},"delta":{{"type":"{delta_type}","{field}":'
        ).encode()


def tool_use_id(call_id: str) -> str:
    """Translate the id of a call from OpenAI's form to Anthropic's."""
    return f"toolu_{call_id.removeprefix('call_')}"


def _message_id(answer: AnswerStream) -> str:
    return f"msg_{answer.id}"


def _stop_reason(delta: Delta, *, has_tool_use: bool) -> StopReason:
    """Return Anthropic's word. A deadline counts as max_tokens, because the client has part of its answer."""
    if delta.finish_reason is FinishReason.CONTENT_FILTER:
        return "refusal"
    if delta.finish_reason is not FinishReason.STOP:
        return "max_tokens"
    if delta.stop_sequence is not None:
        return "stop_sequence"
    return "tool_use" if has_tool_use else "end_turn"


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments that the model wrote, or {} if they were cut off. The stop_reason then says so."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}


def _signature(digest: hashlib._Hash) -> str:
    """Return a digest of the thinking. Clients must send it back; any value is accepted."""
    return base64.b64encode(digest.digest()).decode()


class ModelInfo(msgspec.Struct):
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None  # None where an external server does not tell
    max_tokens: int | None
    type: str = "model"
    lifecycle: str = "active"


class ModelPage(IdList[ModelInfo]): ...


def model_info(listed: ListedModel, created: float) -> ModelInfo:
    """`created` is when this server began to serve it, in Unix time."""
    model = listed.model
    return ModelInfo(
        listed.name, model.name, timestamp(created), model.max_model_len, model.max_output_tokens
    )


def model_page(models: list[ModelInfo]) -> ModelPage:
    return ModelPage.of(models, has_more=False)


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
            count = await while_present(request, self._gateway.count_tokens(model, prompt, principal))
        return json_response(TokenCount(count, wire.warnings))


def check_version(request: Request) -> None:
    """Check the API version. Versions differ in the requests that they accept; responses are the same in all
    supported versions."""
    version = request.headers.get("anthropic-version", OLDEST_VERSION)
    if not _VERSION.fullmatch(version) or version < OLDEST_VERSION:
        raise InvalidRequest(
            f"anthropic-version: {version[:40]!r} is not a version from {OLDEST_VERSION!r} on."
        )
