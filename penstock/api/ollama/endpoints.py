"""/api/chat, /api/generate, /api/embed and /api/embeddings: decode, submit, answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from penstock.api.http.answers import EventStream, WholeAnswer, answer_whole
from penstock.api.http.context import note_model, principal_of, with_context
from penstock.api.http.errors import ollama_error_body
from penstock.api.http.parsing import BodyDecoder, translated
from penstock.api.http.routes import JSON_LINES, Operation
from penstock.api.ollama.models import OllamaModelEndpoints, model_name
from penstock.api.ollama.requests import (
    AnswerFields,
    ChatRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
)
from penstock.api.openai.answers import ChatLogprob, chat_logprobs
from penstock.api.openai.embeddings import ENTRIES_AT_ONCE, filled, run_job, vector_request
from penstock.core.errors import PenstockError
from penstock.core.request import FinishReason
from penstock.gateway.answers.choice import Delta, ToolCallDelta, merge_deltas
from penstock.gateway.answers.stream import AnswerStream, WrappedAnswer
from penstock.gateway.embeddings.inputs import Reading, Truncation
from penstock.gateway.embeddings.run import EmbeddingAnswer, numbers
from penstock.gateway.embeddings.service import Embeddings
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import GenerationRequest, RequestWarning, Usage


class Function(msgspec.Struct):
    name: str
    arguments: dict[str, Any]


class Call(msgspec.Struct):
    id: str
    function: Function


class AnswerMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class Part(msgspec.Struct, kw_only=True):
    """A piece of an answer, or all of it. Durations are in nanoseconds, and come with the last part."""

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    warnings: tuple[RequestWarning, ...] | UnsetType = UNSET  # our own; Ollama's clients leave it aside
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class ChatPart(Part, kw_only=True):
    message: AnswerMessage


class GeneratePart(Part, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


AnyPart: TypeAlias = type[ChatPart] | type[GeneratePart]
_NOTHING = Delta(0, "")


def loaded_part(shape: AnyPart, model: str, *, unloads: bool) -> bytes:
    """Return the answer to a request without a prompt. Models stay loaded as long as the server runs."""
    part = _new_part(shape, model, _NOTHING, ())
    part.done, part.done_reason = True, "unload" if unloads else "load"
    return msgspec.json.encode(part)


def _new_part(shape: AnyPart, model: str, delta: Delta, calls: Sequence[Call]) -> ChatPart | GeneratePart:
    logprobs = chat_logprobs(delta.details).content if delta.details else UNSET
    created_at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    thinking = delta.reasoning or UNSET
    if shape is GeneratePart:
        return GeneratePart(
            model=model, created_at=created_at, response=delta.text, thinking=thinking, logprobs=logprobs
        )
    message = AnswerMessage(delta.text, thinking=thinking, tool_calls=list(calls) or UNSET)
    return ChatPart(model=model, created_at=created_at, message=message, logprobs=logprobs)


class TimedAnswer(WrappedAnswer):
    """An answer whose beginning and end are timed, from the arrival of the request. `warnings` are those of the
    dialect; the gateway's follow them."""

    def __init__(
        self, answer: AnswerStream, arrived_ns: int, warnings: tuple[RequestWarning, ...] = ()
    ) -> None:
        super().__init__(answer)
        self._own_warnings = warnings
        self._arrived_ns = arrived_ns
        self._first_ns: int | None = None
        self._last_ns = arrived_ns

    @property
    def warnings(self) -> tuple[RequestWarning, ...]:
        return (*self._own_warnings, *self._answer.warnings)

    async def __anext__(self) -> list[Delta]:
        deltas = await anext(self._answer)
        self._last_ns = time.monotonic_ns()
        if self._first_ns is None:
            self._first_ns = self._last_ns
        return deltas

    async def collect(self) -> list[Delta]:
        """Read piece by piece, because only that tells when the first token came."""
        return [merge_deltas([delta async for deltas in self for delta in deltas])]

    def counters(self, usage: Usage) -> dict[str, int]:
        """Clients divide by the durations, so only the time of loading is 0: a served model is loaded."""
        first_ns = self._last_ns if self._first_ns is None else self._first_ns
        return {
            "total_duration": max(1, time.monotonic_ns() - self._arrived_ns),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": max(1, first_ns - self._arrived_ns),
            "eval_count": usage.completion_tokens,
            "eval_duration": max(1, self._last_ns - first_ns),
        }


class AnswerWriter:
    """Writes the answer to one request, whole or as lines: an `EventWriter`."""

    def __init__(self, shape: AnyPart, model: str, answer: TimedAnswer) -> None:
        self._shape = shape
        self._model = model
        self._answer = answer
        self._calls: list[ToolCallDelta] = []  # not yet sent: only whole calls are
        self._reason: FinishReason | None = None

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        (delta,) = deltas
        self._reason = delta.finish_reason
        part = self._part(delta, _calls(delta.tool_calls))
        return msgspec.json.encode(self._ended(part, self._answer.usage))

    def opening(self, answer: AnswerStream) -> bytes:
        return b""

    def chunk(self, delta: Delta) -> bytes:
        begun = [call for call in delta.tool_calls if call.id is not None]
        complete = self._take_calls() if begun else []  # calls before the call that begins
        lines = [self._part(calls=complete)] if complete else []
        if delta.text or delta.reasoning or delta.details:
            lines.insert(0, self._part(delta))
        self._calls += delta.tool_calls
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            if calls := self._take_calls():
                lines.append(self._part(calls=calls))
        return b"".join(map(_line, lines))

    def closing(self, usage: Usage) -> bytes:
        return _line(self._ended(self._part(), usage))

    def failure(self, error: PenstockError) -> bytes:
        return error_line(error)

    def _part(self, delta: Delta = _NOTHING, calls: Sequence[Call] = ()) -> ChatPart | GeneratePart:
        return _new_part(self._shape, self._model, delta, calls)

    def _ended(self, part: ChatPart | GeneratePart, usage: Usage) -> ChatPart | GeneratePart:
        part.done, part.done_reason = True, _done_reason(self._reason)
        part.warnings = self._answer.warnings or UNSET
        for name, value in self._answer.counters(usage).items():
            setattr(part, name, value)
        return part

    def _take_calls(self) -> list[Call]:
        """Return the calls that came so far, each put together from its pieces."""
        pieces, self._calls = self._calls, []
        if not pieces:
            return []
        return _calls(merge_deltas([Delta(0, "", tool_calls=(piece,)) for piece in pieces]).tool_calls)


class LineStream(EventStream):
    """A stream of JSON lines, with which Ollama's API answers."""

    stream_headers = ((b"content-type", b"application/x-ndjson"), *EventStream.stream_headers[1:])


def keep_alive_line(shape: AnyPart, model: str) -> bytes:
    """Return a part with nothing in it: a line of JSON has no comments."""
    return _line(_new_part(shape, model, _NOTHING, ()))


def error_line(error: PenstockError) -> bytes:
    return ollama_error_body(error) + b"\n"


def _line(part: msgspec.Struct) -> bytes:
    return msgspec.json.encode(part) + b"\n"


def _done_reason(reason: FinishReason | None) -> str:
    if reason in (FinishReason.STOP, FinishReason.CONTENT_FILTER):
        return str(reason)
    return "length"


def _calls(calls: Iterable[ToolCallDelta]) -> list[Call]:
    """Whole calls only: the arguments are an object here, and a call that was cut off has no whole object."""
    whole = []
    for call in calls:
        try:
            arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            continue
        whole.append(Call(call.id or "", Function(call.name or "", arguments)))
    return whole


class EmbedResponse(msgspec.Struct):
    embeddings: list[list[float]]
    model: str
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsResponse(msgspec.Struct):
    embedding: list[float]


class OllamaEndpoints:
    def __init__(self, gateway: Gateway, embeddings: Embeddings) -> None:
        self._gateway = gateway
        self._embeddings = embeddings
        self._chat_decoder = BodyDecoder(ChatRequest)
        self._generate_decoder = BodyDecoder(GenerateRequest)
        self._embed_decoder = BodyDecoder(EmbedRequest)

    def routes(self) -> list[Operation]:
        return [
            Operation(
                "POST /api/chat",
                self.chat,
                ChatPart,
                request=ChatRequest,
                streams=True,
                stream_type=JSON_LINES,
            ),
            Operation(
                "POST /api/generate",
                self.generate,
                GeneratePart,
                request=GenerateRequest,
                streams=True,
                stream_type=JSON_LINES,
            ),
            Operation("POST /api/embed", self.embed, EmbedResponse, request=EmbedRequest),
            Operation("POST /api/embeddings", self.embed_one, EmbeddingsResponse, reads=EmbeddingsRequest),
            *OllamaModelEndpoints(self._gateway).routes(),
        ]

    async def chat(self, request: Request) -> ASGIApp:
        arrived_ns = time.monotonic_ns()
        wire = await self._chat_decoder.read(request)
        generation = await translated(wire.messages or (), wire.to_generation)
        return await self._answer(request, wire, generation, ChatPart, arrived_ns)

    async def generate(self, request: Request) -> ASGIApp:
        arrived_ns = time.monotonic_ns()
        wire = await self._generate_decoder.read(request)
        return await self._answer(request, wire, wire.to_generation(), GeneratePart, arrived_ns)

    async def _answer(
        self,
        request: Request,
        wire: AnswerFields,
        generation: GenerationRequest | None,
        shape: AnyPart,
        arrived_ns: int,
    ) -> ASGIApp:
        name = model_name(self._gateway, wire.model)
        if generation is None:
            note_model(request, name)
            model = self._gateway.catalogue.answering(name, principal_of(request))
            return Response(
                loaded_part(shape, wire.model or model.name, unloads=wire.unloads),
                media_type="application/json",
            )
        generation = msgspec.structs.replace(generation, model=name)
        submitted = self._gateway.submit(with_context(request, generation))

        async def submit() -> TimedAnswer:
            return TimedAnswer(await submitted, arrived_ns, wire.warnings)

        def writer_of(answer: TimedAnswer) -> AnswerWriter:
            return AnswerWriter(shape, wire.model or answer.model, answer)

        if wire.streams:
            return await LineStream.open(
                request,
                submit(),
                writer_of,
                error_line,
                keep_alive=keep_alive_line(shape, wire.model or name or ""),
            )
        return await answer_whole(request, submit(), lambda answer, deltas: writer_of(answer).whole(deltas))

    async def embed(self, request: Request) -> ASGIApp:
        arrived_ns = time.monotonic_ns()
        wire = await self._embed_decoder.read(request)
        inputs = (wire.input,) if isinstance(wire.input, str) else tuple(wire.input)
        answer = await self._embedded(
            request, wire.model, inputs, truncates=wire.truncate is not False, dimensions=wire.dimensions
        )
        entries = []
        for index, vector in enumerate(answer.vectors):
            entries.append(msgspec.json.encode(numbers(vector)))
            if index % ENTRIES_AT_ONCE == ENTRIES_AT_ONCE - 1:
                await asyncio.sleep(0)  # millions of numbers take a while to write
        frame = EmbedResponse(
            [], wire.model or answer.model, time.monotonic_ns() - arrived_ns, 0, answer.usage.prompt_tokens
        )
        body = await filled(msgspec.json.encode(frame), entries)  # `embeddings` is the first field
        return WholeAnswer(body, answer.rate_limits)

    async def embed_one(self, request: Request, wire: EmbeddingsRequest) -> ASGIApp:
        answer = await self._embedded(request, wire.model, (wire.prompt,), truncates=True)
        body = msgspec.json.encode(EmbeddingsResponse(numbers(answer.vectors[0])))
        return WholeAnswer(body, answer.rate_limits)

    async def _embedded(
        self,
        request: Request,
        model: str | None,
        inputs: tuple[str, ...],
        *,
        truncates: bool,
        dimensions: int | None = None,
    ) -> EmbeddingAnswer:
        name = model_name(self._gateway, model)
        note_model(request, name)
        reading = Reading(truncation=Truncation() if truncates else None)
        asked = vector_request(request, name, inputs=inputs, dimensions=dimensions, reading=reading)
        return await run_job(self._embeddings.open(asked), request)
