"""/v1/embeddings in OpenAI's shape: decode, embed, answer."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from penstock.api.http.answers import DisconnectWatch, WholeAnswer, while_present
from penstock.api.http.context import CACHE_HEADER, principal_of, request_id_of, timeout_s_of
from penstock.api.http.parsing import BodyDecoder
from penstock.api.http.routes import Operation
from penstock.core.errors import InvalidRequest, PenstockError, quoted
from penstock.core.identity import RateLimits
from penstock.core.request import Pooling
from penstock.gateway.embeddings.inputs import Input, Reading, Role, TextWithRole, Truncation
from penstock.gateway.embeddings.run import EmbeddingAnswer, numbers
from penstock.gateway.embeddings.service import EmbeddingRequest, Embeddings, check_num_inputs
from penstock.gateway.prompts import Usage
from penstock.gateway.turns import in_thread

EXTENSION_FIELDS = (
    "dimensions",
    "encoding_format",
    "input_type",
    "normalize",
    "pooling",
    "prompt_name",
    "truncate_prompt_tokens",
)
# Fields of vLLM's, Jina's and Voyage's servers.
REFUSED_FIELDS = (
    "cache_salt",
    "chat_template",
    "embed_dtype",
    "embedding_type",
    "endianness",
    "late_chunking",
    "messages",
    "output_dimension",
    "output_dtype",
    "priority",
    "task",
)
ENTRIES_AT_ONCE = 32
_ROLES: dict[str, Role] = {
    "query": "query",
    "search_query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
}


def refusing(names: Collection[str]) -> Callable[[str, Any], None]:
    """Return a check that refuses fields of other servers by name, unless their values ask for nothing."""

    def check(name: str, value: Any) -> None:
        if name in names and value:
            raise InvalidRequest(f"The field {quoted(name)} is not supported here.", param=name)

    return check


class ReadingFields(msgspec.Struct, kw_only=True):
    """Options of tokenization, with vLLM's names."""

    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool = True

    def reading(self, *, prompt_name: str | None = None, max_document_tokens: int | None = None) -> Reading:
        asked = self.truncate_prompt_tokens
        truncation = None
        if asked is not None or max_document_tokens is not None:
            truncation = Truncation(
                None if asked == -1 else asked, self.truncation_side or "right", max_document_tokens
            )
        return Reading(prompt_name, truncation, self.add_special_tokens)


class TextInputFields(ReadingFields, kw_only=True):
    """Texts, or token ids of texts."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    user: str | None = None

    def inputs(self) -> tuple[str | tuple[int, ...], ...]:
        given = self.input
        if isinstance(given, str):
            return (given,)
        if given and set(map(type, given)) == {int}:  # millions may be given
            return (tuple(given),)  # type: ignore[arg-type]
        check_num_inputs(len(given))  # now, because each input costs time
        if any(isinstance(each, int) for each in given):
            raise InvalidRequest(
                "input must be a text, a list of texts, a list of token ids or a list of such lists.",
                param="input",
            )
        return tuple(
            each if isinstance(each, str) else tuple(each) for each in given if not isinstance(each, int)
        )


class CreateEmbeddings(TextInputFields, kw_only=True):
    """`pooling` and `normalize` are extensions, as are `prompt_name` and `input_type`, which choose the prompt that
    the model's files have for the inputs; the rest is OpenAI's."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    input_type: Literal["query", "document", "passage", "search_query", "search_document"] | None = None

    def roled_inputs(self) -> tuple[Input, ...]:
        if self.input_type is None:
            return self.inputs()
        if self.prompt_name is not None:
            raise InvalidRequest("input_type and prompt_name exclude each other.", param="input_type")
        role = _ROLES[self.input_type]
        return tuple(TextWithRole(each, role) if isinstance(each, str) else each for each in self.inputs())


class EmbeddingEntry(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> EmbeddingUsage:
        return cls(usage.prompt_tokens, usage.prompt_tokens)


class EmbeddingList(msgspec.Struct):
    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class EmbeddingEndpoints:
    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings

    def routes(self) -> list[Operation]:
        decoder = BodyDecoder(CreateEmbeddings, EXTENSION_FIELDS, refusing(REFUSED_FIELDS))
        return [Operation("POST /v1/embeddings", self.create, EmbeddingList, reads=decoder)]

    async def create(self, request: Request, wire: CreateEmbeddings) -> ASGIApp:
        opening = self._embeddings.open(
            vector_request(
                request,
                wire.model,
                inputs=wire.roled_inputs(),
                dimensions=wire.dimensions,
                pooling=_one_vector(wire.pooling),
                normalizes=wire.normalize,
                reading=wire.reading(prompt_name=wire.prompt_name),
                user=wire.user,
                allows_external=True,
            )
        )
        answer = await run_job(opening, request)
        body = await _body(answer, as_text=wire.encoding_format == "base64")
        return WholeAnswer(body, answer.rate_limits)


def _one_vector(pooling: Pooling | None) -> Pooling | None:
    if pooling == "all":
        raise InvalidRequest(
            "An embedding is one vector; /pooling gives one for each token.", param="pooling"
        )
    return pooling


def vector_request(request: Request, model: str | None, **options: Any) -> EmbeddingRequest:
    """Return a request for vectors, with the fields that the caller and the headers determine."""
    return EmbeddingRequest(
        model=model,
        uses_cache=request.headers.get(CACHE_HEADER, "").strip().lower() != "off",
        principal=principal_of(request),
        request_id=request_id_of(request),
        timeout_s=timeout_s_of(request),
        **options,
    )


AnswerT = TypeVar("AnswerT", covariant=True)


class Job(Protocol[AnswerT]):
    @property
    def rate_limits(self) -> RateLimits: ...

    def cancel(self) -> None: ...

    async def run(self) -> AnswerT: ...


async def run_job(opening: Awaitable[Job[AnswerT]], request: Request) -> AnswerT:
    """Open and run a job until the answer is there or the client has gone, whichever comes first."""
    job = await while_present(request, opening)
    departure = DisconnectWatch(request)
    departure.hand_over(job)
    try:
        return await job.run()
    except PenstockError as error:
        raise error.with_rate_limits(job.rate_limits) from error
    finally:
        departure.stop()


async def _body(answer: EmbeddingAnswer, *, as_text: bool) -> bytes:
    """Return an EmbeddingList. Millions of numbers take a while to write, so others get their turn in between."""
    entries = []
    for index, vector in enumerate(answer.vectors):
        embedding = base64.b64encode(vector).decode() if as_text else numbers(vector)
        entries.append(msgspec.json.encode(EmbeddingEntry(index, embedding)))
        if index % ENTRIES_AT_ONCE == ENTRIES_AT_ONCE - 1:
            await asyncio.sleep(0)
    frame = EmbeddingList([], answer.model, EmbeddingUsage.of(answer.usage))
    return await filled(msgspec.json.encode(frame), entries)  # `data` is the first field


async def filled(frame: bytes, entries: list[bytes]) -> bytes:
    """Return a body of JSON with entries in the first of its empty lists. They are copied once, and off the event
    loop, because they may be many megabytes."""
    before, after = frame.split(b"[]", 1)
    if not entries:
        return frame
    entries[0] = before + b"[" + entries[0]
    entries[-1] += b"]" + after
    return await in_thread(b",".join, entries)
