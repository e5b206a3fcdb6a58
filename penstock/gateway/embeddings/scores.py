"""Scores of pairs of texts, and probabilities of labels, from the vectors that models make. Knows no HTTP.

A cross-encoder reads both texts of a pair together, and its vector is one logit. An embedding model reads each text
alone, and the score is the similarity of two vectors. A classifier's vector has one logit for each label.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.core.identity import RateLimits
from penstock.core.messages import ModelCard, PoolerCard
from penstock.gateway.embeddings.inputs import Input, Pair, TextWithRole
from penstock.gateway.embeddings.run import numbers
from penstock.gateway.embeddings.service import MAX_INPUTS, EmbeddingJob, EmbeddingRequest, Embeddings
from penstock.gateway.prompts import Usage

SCORES_AT_ONCE = 32  # others get their turn in between


class TextPairs(msgspec.Struct, frozen=True, kw_only=True):
    """One score for each pair: the first query with the first document, and so on. A single query goes with every
    document."""

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    query_label: str = "query"  # of texts, for errors
    document_label: str = "documents"
    instruction: str | None = None  # of models that are asked whether a document fits a query
    activates: bool = True  # False leaves the logit of a cross-encoder as it is


class ScoreAnswer(msgspec.Struct, frozen=True):
    scores: list[float]
    model: str
    usage: Usage
    rate_limits: RateLimits


class ScoreJob:
    """An opened request: `run` it for its answer, `cancel` it at any moment."""

    def __init__(self, job: EmbeddingJob, pairs: TextPairs, pooler: PoolerCard) -> None:
        self._job = job
        self._pairs = pairs
        self._pooler = pooler

    @property
    def rate_limits(self) -> RateLimits:
        return self._job.rate_limits

    def cancel(self) -> None:
        self._job.cancel()

    async def run(self) -> ScoreAnswer:
        answer = await self._job.run()
        if self._pooler.scores_pairs:
            activates = self._pairs.activates and self._pooler.score_activation == "sigmoid"
            logits = [numbers(vector)[0] for vector in answer.vectors]
            scores = [sigmoid(logit) if activates else logit for logit in logits]
        else:
            scores = await self._similarities(answer.vectors)
        return ScoreAnswer(scores, answer.model, answer.usage, answer.rate_limits)

    async def _similarities(self, vectors: Sequence[bytes]) -> list[float]:
        num_documents = len(self._pairs.documents)
        queries = [numbers(vector) for vector in vectors[num_documents:]]
        scores = []
        for index in range(num_documents):
            query = queries[index if len(queries) > 1 else 0]
            scores.append(similarity(self._pooler, query, numbers(vectors[index])))
            if index % SCORES_AT_ONCE == SCORES_AT_ONCE - 1:
                await asyncio.sleep(0)
        return scores


class Scores:
    """Must be used from the gateway's event loop."""

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings

    async def open(self, pairs: TextPairs, request: EmbeddingRequest) -> ScoreJob:
        """Open a job for the pairs, the inputs of `request`. Everything that can be refused is refused here.
        The job must be run or cancelled."""
        card = self._embeddings.model_of(request.principal, request.model).card
        _check(pairs, card)
        inputs, labels = _inputs(pairs, card)
        job = await self._embeddings.open_here(msgspec.structs.replace(request, inputs=inputs, labels=labels))
        return ScoreJob(job, pairs, card.pooler)


def _check(pairs: TextPairs, card: ModelCard) -> None:
    num_queries, num_documents = len(pairs.queries), len(pairs.documents)
    for number, label in ((num_queries, pairs.query_label), (num_documents, pairs.document_label)):
        if not 1 <= number <= MAX_INPUTS:
            raise InvalidRequest(
                f"{label} must have 1 to {MAX_INPUTS} texts, and has {number}.", param=label.partition("[")[0]
            )
    if num_queries not in (1, num_documents):
        raise InvalidRequest(
            f"{pairs.query_label} must have one text, or as many as {pairs.document_label}: {num_documents}.",
            param=pairs.query_label,
        )
    pooler = card.pooler
    if not pooler.scores_pairs and (pooler.labels or card.generates):
        made = f"classifies texts by {len(pooler.labels)} labels" if pooler.labels else "writes text"
        raise InvalidRequest(
            f"The model {card.name!r} {made}, and cannot compare texts.",
            param="model",
            hint="Serve a cross-encoder, a reranker or an embedding model.",
        )
    if pairs.instruction is not None and not pooler.asks_yes_or_no:
        raise InvalidRequest(f"The model {card.name!r} takes no instruction.", param="instruction")


def _inputs(pairs: TextPairs, card: ModelCard) -> tuple[tuple[Input, ...], tuple[str, ...]]:
    """Return the pairs; or, for an embedding model, the documents and then the queries."""
    labels = tuple(f"{pairs.document_label}[{index}]" for index in range(len(pairs.documents)))
    if card.pooler.scores_pairs:
        queries = pairs.queries
        if len(queries) == 1:
            queries *= len(pairs.documents)
        if "" in pairs.queries:
            raise InvalidRequest(f"{pairs.query_label} is empty.", param=pairs.query_label)
        both = zip(queries, pairs.documents, strict=True)
        return tuple(Pair(query, document, pairs.instruction) for query, document in both), labels
    documents = tuple(TextWithRole(text, "document") for text in pairs.documents)
    queries_in = tuple(TextWithRole(text, "query") for text in pairs.queries)
    return documents + queries_in, labels + (pairs.query_label,) * len(queries_in)


def similarity(pooler: PoolerCard, first: Sequence[float], second: Sequence[float]) -> float:
    """Return the similarity that the model was trained for; more is more similar."""
    match pooler.similarity:
        case "euclidean":
            return -math.dist(first, second)
        case "manhattan":
            return -math.fsum(abs(a - b) for a, b in zip(first, second, strict=True))
        case "dot":
            return _dot(first, second)
    lengths = math.sqrt(_dot(first, first) * _dot(second, second))
    return _dot(first, second) / lengths if lengths else 0.0


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(first, second, strict=True))


def sigmoid(logit: float) -> float:
    if logit >= 0:
        return 1.0 / (1.0 + math.exp(-logit))
    odds = math.exp(logit)
    return odds / (1.0 + odds)


def probabilities(pooler: PoolerCard, logits: Sequence[float]) -> list[float]:
    """Return the probability of each label: of each label alone if several may apply, else of one among all."""
    if len(logits) == 1 and pooler.score_activation == "none":
        return list(logits)
    if len(logits) == 1 or pooler.is_multi_label:
        return [sigmoid(logit) for logit in logits]
    largest = max(logits)
    odds = [math.exp(logit - largest) for logit in logits]
    total = math.fsum(odds)
    return [each / total for each in odds]
