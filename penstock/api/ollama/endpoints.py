"""/api/chat, /api/generate, /api/embed and /api/embeddings: decode, submit, answer."""

from __future__ import annotations

import asyncio
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from penstock.api.http.answers import WholeAnswer, answer_whole
from penstock.api.http.context import note_model, principal_of, request_id_of, timeout_s_of, with_context
from penstock.api.http.parsing import BodyDecoder
from penstock.api.http.routes import JSON_LINES, Operation
from penstock.api.ollama.answers import (
    AnswerWriter,
    AnyPart,
    ChatPart,
    GeneratePart,
    LineStream,
    TimedAnswer,
    error_line,
    keep_alive_line,
    loaded_part,
)
from penstock.api.ollama.models import OllamaModelEndpoints, model_name
from penstock.api.ollama.requests import (
    AnswerFields,
    ChatRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
)
from penstock.api.openai.embeddings import ENTRIES_AT_ONCE, filled, run_job
from penstock.gateway.embeddings.inputs import Reading, Truncation
from penstock.gateway.embeddings.run import EmbeddingAnswer, numbers
from penstock.gateway.embeddings.service import EmbeddingRequest, Embeddings
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import GenerationRequest


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
        return await self._answer(request, wire, wire.to_generation(), ChatPart, arrived_ns)

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
        job = await self._embeddings.open(
            EmbeddingRequest(
                inputs=inputs,
                model=name,
                dimensions=dimensions,
                reading=Reading(truncation=Truncation() if truncates else None),
                principal=principal_of(request),
                request_id=request_id_of(request),
                timeout_s=timeout_s_of(request),
            )
        )
        return await run_job(job, request)
