"""/v1/rerank and /rerank in Jina's shape, which Cohere's first version shares, and /v2/rerank in Cohere's: decode,
score each document against the query, answer with the best ones."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from penstock.api.http.answers import WholeAnswer
from penstock.api.http.context import principal_of, request_id_of, timeout_s_of
from penstock.api.http.parsing import BodyDecoder
from penstock.api.http.routes import Operation
from penstock.api.openai.embeddings import EmbeddingUsage, ReadingFields, refusing, run_job, uses_cache
from penstock.core.errors import InvalidRequest
from penstock.gateway.embeddings.scores import ScoreAnswer, ScoreRequest, Scores

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
            Operation(
                "POST /v1/rerank",
                self.rerank,
                RerankResponse,
                reads=decoder,
            ),
            Operation(
                "POST /rerank",
                self.rerank,
                RerankResponse,
                reads=decoder,
            ),
            Operation(
                "POST /v2/rerank",
                self.rerank_v2,
                RerankResponse,
                reads=decoder,
            ),
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
        job = await self._scores.open(
            ScoreRequest(
                queries=(wire.query,),
                documents=texts,
                instruction=wire.instruction,
                activates=wire.use_activation is not False,
                model=wire.model,
                reading=wire.reading(max_document_tokens=wire.max_tokens_per_doc),
                uses_cache=uses_cache(request),
                principal=principal_of(request),
                request_id=request_id_of(request),
                user=wire.user,
                timeout_s=timeout_s_of(request),
            )
        )
        answer = await run_job(job, request)
        results = _ranked(answer, texts if returns_documents else None, wire.top_n)
        num_tokens = answer.usage.prompt_tokens
        body = RerankResponse(
            id=f"rerank-{request_id_of(request)}",
            model=answer.model,
            usage=EmbeddingUsage(num_tokens, num_tokens),
            results=results,
            meta=RerankMeta(RerankVersion(version), BilledUnits(num_tokens)),
        )
        return WholeAnswer(msgspec.json.encode(body), answer.rate_limits)


def _ranked(answer: ScoreAnswer, texts: tuple[str, ...] | None, top_n: int | None) -> list[RankedResult]:
    """Return the best documents first; of equal ones, those that were given first."""
    order = sorted(range(len(answer.scores)), key=lambda index: (-answer.scores[index], index))
    return [
        RankedResult(index, answer.scores[index], None if texts is None else RankedDocument(texts[index]))
        for index in order[: top_n or None]
    ]
