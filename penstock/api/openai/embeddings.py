"""/v1/embeddings in OpenAI's shape: decode, embed, answer."""

from __future__ import annotations

import asyncio
import base64
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.api.http.answers import Departure, WholeAnswer
from penstock.api.http.context import CACHE_HEADER, principal_of, request_id_of, timeout_s_of
from penstock.api.http.parsing import BodyDecoder
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.request import Pooling
from penstock.gateway.embeddings.run import numbers
from penstock.gateway.embeddings.service import EmbeddingAnswer, EmbeddingJob, EmbeddingRequest, Embeddings

EXTENSION_FIELDS = ("dimensions", "encoding_format", "pooling")
ENTRIES_AT_ONCE = 32


class CreateEmbeddings(msgspec.Struct, kw_only=True):
    """`pooling` is our own; the rest is OpenAI's."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: Pooling | None = None

    def inputs(self) -> tuple[str | tuple[int, ...], ...]:
        given = self.input
        if isinstance(given, str):
            return (given,)
        if given and all(isinstance(each, int) for each in given):
            return (tuple(each for each in given if isinstance(each, int)),)
        if any(isinstance(each, int) for each in given):
            raise InvalidRequest(
                "input must be a text, a list of texts, a list of token ids or a list of such lists.",
                param="input",
            )
        return tuple(
            each if isinstance(each, str) else tuple(each) for each in given if not isinstance(each, int)
        )


class EmbeddingEntry(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class EmbeddingEndpoints:
    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings
        self._decoder = BodyDecoder(CreateEmbeddings, EXTENSION_FIELDS)

    def routes(self) -> list[Route]:
        return [Route("/v1/embeddings", self.create, methods=["POST"])]

    async def create(self, request: Request) -> ASGIApp:
        wire = await self._decoder.read(request)
        job = await self._embeddings.open(
            EmbeddingRequest(
                inputs=wire.inputs(),
                model=wire.model,
                dimensions=wire.dimensions,
                pooling=wire.pooling,
                uses_cache=request.headers.get(CACHE_HEADER, "").strip().lower() != "off",
                principal=principal_of(request),
                request_id=request_id_of(request),
                user=wire.user,
                timeout_s=timeout_s_of(request),
            )
        )
        answer = await run_job(job, request)
        body = await _body(answer, as_text=wire.encoding_format == "base64")
        return WholeAnswer(body, answer.rate_limits)


async def run_job(job: EmbeddingJob, request: Request) -> EmbeddingAnswer:
    """Until the answer is there or the client has gone, whichever comes first."""

    departure = Departure(request)
    departure.hand_over(job)
    try:
        return await job.run()
    except PenstockError as error:
        raise error.with_rate_limits(job.rate_limits) from error
    finally:
        departure.stop()


async def _body(answer: EmbeddingAnswer, *, as_text: bool) -> bytes:
    """An EmbeddingList. Millions of numbers take a while to write, so others get their turn in between."""
    entries = []
    for index, vector in enumerate(answer.vectors):
        embedding = base64.b64encode(vector).decode() if as_text else numbers(vector)
        entries.append(msgspec.json.encode(EmbeddingEntry(index, embedding)))
        if index % ENTRIES_AT_ONCE == ENTRIES_AT_ONCE - 1:
            await asyncio.sleep(0)
    num_tokens = answer.usage.prompt_tokens
    frame = EmbeddingList([], answer.model, EmbeddingUsage(num_tokens, num_tokens))
    before, after = msgspec.json.encode(frame).split(b"[]", 1)  # `data` is the first field
    return before + b"[" + b",".join(entries) + b"]" + after
