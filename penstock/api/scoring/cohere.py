"""/v1/rerank and /rerank in Jina's shape, which Cohere's first version shares, and /v2/rerank in Cohere's: decode,
score each document against the query, answer with the best ones."""

from __future__ import annotations

import base64
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from penstock.api.http.answers import WholeAnswer
from penstock.api.http.context import request_id_of
from penstock.api.http.parsing import BodyDecoder
from penstock.api.http.routes import Operation
from penstock.api.openai.embeddings import EmbeddingUsage, ReadingFields, refusing, run_job, vector_request
from penstock.core.errors import InvalidRequest
from penstock.gateway.embeddings.inputs import Input, Reading, Role, TextWithRole, Truncation
from penstock.gateway.embeddings.run import numbers
from penstock.gateway.embeddings.scores import ScoreAnswer, Scores, TextPairs
from penstock.gateway.embeddings.service import Embeddings

REFUSED_FIELDS = ("max_chunks_per_doc", "mm_processor_kwargs", "priority", "relevant_spans", "softmax")
GUARDED_FIELDS = ("top_n", "return_documents", "truncate_prompt_tokens", "max_tokens_per_doc", "instruction")
_COHERE_DOCUMENT_TOKENS = 4096  # that Cohere's API keeps of a document


class RerankRequest(ReadingFields, kw_only=True):
    """`instruction` is for models that are asked whether a document fits a query, such as Qwen3-Reranker. A document
    is a text, or an object with the field `text`."""

    query: str
    documents: list[str | dict[str, Any]]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None
    rank_fields: list[str] | None = None
    instruction: str | None = None
    use_activation: bool | None = None
    user: str | None = None

    def texts(self) -> tuple[str, ...]:
        if self.rank_fields not in (None, ["text"]):
            raise InvalidRequest("Documents can be ranked by their text only.", param="rank_fields")
        found = []
        for index, document in enumerate(self.documents):
            text = document if isinstance(document, str) else document.get("text")
            if not isinstance(text, str):
                raise InvalidRequest(
                    f"documents[{index}] is neither a text nor an object with the field 'text'.",
                    param="documents",
                )
            found.append(text)
        return tuple(found)


class RankedDocument(msgspec.Struct):
    text: str


class RankedResult(msgspec.Struct, omit_defaults=True):
    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankVersion(msgspec.Struct):
    version: str


class BilledUnits(msgspec.Struct):
    input_tokens: int
    search_units: int = 1


class RerankMeta(msgspec.Struct):
    api_version: RerankVersion
    billed_units: BilledUnits


class RerankResponse(msgspec.Struct):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RankedResult]
    meta: RerankMeta


class RerankEndpoints:
    def __init__(self, scores: Scores) -> None:
        self._scores = scores

    def routes(self) -> list[Operation]:
        decoder = BodyDecoder(RerankRequest, GUARDED_FIELDS, refusing(REFUSED_FIELDS))
        return [
            Operation("POST /v1/rerank", self.rerank, RerankResponse, reads=decoder),
            Operation("POST /rerank", self.rerank, RerankResponse, reads=decoder),
            Operation("POST /v2/rerank", self.rerank_v2, RerankResponse, reads=decoder),
        ]

    async def rerank(self, request: Request, wire: RerankRequest) -> ASGIApp:
        returns_documents = wire.return_documents is not False
        return await self._answer(request, wire, "1", returns_documents=returns_documents)

    async def rerank_v2(self, request: Request, wire: RerankRequest) -> ASGIApp:
        """Cohere cuts long documents, and does not repeat documents unless asked to."""
        if wire.max_tokens_per_doc is None:
            wire.max_tokens_per_doc = _COHERE_DOCUMENT_TOKENS
        return await self._answer(request, wire, "2", returns_documents=wire.return_documents is True)

    async def _answer(
        self, request: Request, wire: RerankRequest, version: str, *, returns_documents: bool
    ) -> ASGIApp:
        if wire.top_n is not None and wire.top_n < 0:
            raise InvalidRequest(f"top_n must be at least 1, not {wire.top_n}.", param="top_n")
        texts = wire.texts()
        pairs = TextPairs(
            queries=(wire.query,),
            documents=texts,
            instruction=wire.instruction,
            activates=wire.use_activation is not False,
        )
        reading = wire.reading(max_document_tokens=wire.max_tokens_per_doc)
        asked = vector_request(request, wire.model, endpoint="rerank", reading=reading, user=wire.user)
        answer = await run_job(self._scores.open(pairs, asked), request)
        results = _ranked(answer, texts if returns_documents else None, wire.top_n)
        body = RerankResponse(
            id=f"rerank-{request_id_of(request)}",
            model=answer.model,
            usage=EmbeddingUsage.of(answer.usage),
            results=results,
            meta=RerankMeta(RerankVersion(version), BilledUnits(answer.usage.prompt_tokens)),
        )
        return WholeAnswer(msgspec.json.encode(body), answer.rate_limits)


def _ranked(answer: ScoreAnswer, texts: tuple[str, ...] | None, top_n: int | None) -> list[RankedResult]:
    """Return the best documents first; of equal ones, those that were given first."""
    order = sorted(range(len(answer.scores)), key=lambda index: (-answer.scores[index], index))
    return [
        RankedResult(index, answer.scores[index], None if texts is None else RankedDocument(texts[index]))
        for index in order[: top_n or None]
    ]


EMBED_REFUSED_FIELDS = ("images", "priority")
EMBED_GUARDED_FIELDS = (
    "texts",
    "input_type",
    "embedding_types",
    "output_dimension",
    "truncate",
    "max_tokens",
)
_ROLES: dict[str, Role] = {"search_query": "query", "search_document": "document"}
_SIDES: dict[str, Literal["left", "right"]] = {"START": "left", "END": "right"}


class EmbedPart(msgspec.Struct):
    type: str
    text: str | None = None


class EmbedInput(msgspec.Struct):
    content: list[EmbedPart]


class CohereEmbedRequest(msgspec.Struct, kw_only=True):
    """Texts, alone or as inputs of text parts. `truncate` cuts a long text at its start or end, or refuses it."""

    model: str | None = None
    texts: list[str] | None = None
    inputs: list[EmbedInput] | None = None
    input_type: Literal["search_document", "search_query", "classification", "clustering", "image"] | None = (
        None
    )
    embedding_types: list[str] | None = None
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: int | None = None

    def all_texts(self) -> list[str]:
        if (self.texts is None) == (self.inputs is None):
            raise InvalidRequest("Give either texts or inputs.", param="texts")
        if self.texts is not None:
            return self.texts
        return [_text_of(each, index) for index, each in enumerate(self.inputs or ())]

    def kinds(self) -> list[str]:
        kinds = self.embedding_types or ["float"]
        for kind in kinds:
            if kind not in ("float", "base64"):
                raise InvalidRequest(
                    f"Embeddings of the type {kind[:40]!r} are not supported; float and base64 are.",
                    param="embedding_types",
                )
        return kinds

    def reading(self) -> Reading:
        if self.truncate == "NONE":
            return Reading()
        return Reading(None, Truncation(self.max_tokens, _SIDES[self.truncate]))


class BilledInput(msgspec.Struct):
    input_tokens: int


class EmbedMeta(msgspec.Struct):
    api_version: dict[str, str]
    billed_units: BilledInput


class CohereEmbedResponse(msgspec.Struct):
    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: EmbedMeta
    response_type: str = "embeddings_by_type"


class EmbedEndpoints:
    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings

    def routes(self) -> list[Operation]:
        decoder = BodyDecoder(CohereEmbedRequest, EMBED_GUARDED_FIELDS, refusing(EMBED_REFUSED_FIELDS))
        return [Operation("POST /v2/embed", self.embed, CohereEmbedResponse, reads=decoder)]

    async def embed(self, request: Request, wire: CohereEmbedRequest) -> ASGIApp:
        texts, kinds = wire.all_texts(), wire.kinds()
        role = _ROLES.get(wire.input_type or "")
        inputs: tuple[Input, ...] = (
            tuple(TextWithRole(text, role) for text in texts) if role else tuple(texts)
        )
        asked = vector_request(
            request,
            wire.model,
            inputs=inputs,
            labels=tuple(f"texts[{index}]" for index in range(len(texts))),
            dimensions=wire.output_dimension,
            reading=wire.reading(),
        )
        answer = await run_job(self._embeddings.open(asked), request)
        found: dict[str, list[Any]] = {}
        if "float" in kinds:
            found["float"] = [numbers(vector) for vector in answer.vectors]
        if "base64" in kinds:
            found["base64"] = [base64.b64encode(vector).decode() for vector in answer.vectors]
        body = CohereEmbedResponse(
            id=request_id_of(request),
            embeddings=found,
            texts=texts,
            meta=EmbedMeta({"version": "2"}, BilledInput(answer.usage.prompt_tokens)),
        )
        return WholeAnswer(msgspec.json.encode(body), answer.rate_limits)


def _text_of(each: EmbedInput, index: int) -> str:
    if any(part.type != "text" or part.text is None for part in each.content):
        raise InvalidRequest(f"inputs[{index}] has a part that is not text.", param="inputs")
    return "\n".join(part.text or "" for part in each.content)
