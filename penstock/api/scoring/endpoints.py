"""/v1/score, /v1/classify and /pooling, in vLLM's shapes: decode, compute, answer."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.types import ASGIApp

from penstock.api.http.answers import WholeAnswer
from penstock.api.http.context import principal_of, request_id_of
from penstock.api.http.parsing import BodyDecoder
from penstock.api.http.routes import Operation
from penstock.api.openai.embeddings import (
    ENTRIES_AT_ONCE,
    EmbeddingUsage,
    ReadingFields,
    TextInputFields,
    refusing,
    run_job,
    vector_request,
)
from penstock.core.errors import InvalidRequest
from penstock.core.messages import ModelCard
from penstock.gateway.embeddings.run import BYTES_PER_NUMBER, EmbeddingAnswer, numbers
from penstock.gateway.embeddings.scores import Scores, TextPairs, probabilities
from penstock.gateway.embeddings.service import Embeddings
from penstock.gateway.turns import in_thread

REFUSED_FIELDS = (
    *(
        "cache_salt",
        "chat_template",
        "embed_dtype",
        "endianness",
        "messages",
        "mm_processor_kwargs",
        "priority",
    ),
    *("softmax", "step_tag_id", "returned_token_ids"),
)
Texts: TypeAlias = str | list[str]
Result = TypeVar("Result")


class CreateScores(ReadingFields, kw_only=True):
    """The first texts have three names in vLLM's versions, and so have the second texts. One first text goes with
    every second text."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    model: str | None = None
    instruction: str | None = None
    use_activation: bool | None = None
    user: str | None = None

    def sides(self) -> tuple[tuple[str, Texts], tuple[str, Texts]]:
        """Return the texts of both sides, with the name that the request has for them."""
        found = []
        for names in (("text_1", "queries", "data_1"), ("text_2", "documents", "data_2")):
            given = [(name, value) for name in names if (value := getattr(self, name)) is not None]
            if len(given) != 1:
                raise InvalidRequest(f"The request needs {names[0]}, under exactly one name.", param=names[0])
            found += given
        return found[0], found[1]


class ResultList(msgspec.Struct, Generic[Result]):
    id: str
    model: str
    data: list[Result]
    usage: EmbeddingUsage
    object: str = "list"
    created: int = msgspec.field(default_factory=lambda: int(time.time()))


class Score(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoreList(ResultList[Score]): ...


class CreateClassification(TextInputFields, kw_only=True):
    use_activation: bool | None = None  # false leaves logits as they are
    activation: bool | None = None  # the same, in older versions

    @property
    def activates(self) -> bool:
        return self.use_activation is not False and self.activation is not False


class Classification(msgspec.Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(ResultList[Classification]): ...


class CreatePooling(CreateClassification, kw_only=True):
    """`task` says what is made of each input: one vector, one for each token, or the probabilities of labels."""

    task: Literal["embed", "token_embed", "classify"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None


class Pooled(msgspec.Struct):
    index: int
    data: list[float | list[float]] | str  # numbers, or vectors of tokens
    object: str = "pooling"


class PooledList(ResultList[Pooled]): ...


class ScoringEndpoints:
    def __init__(self, embeddings: Embeddings, scores: Scores) -> None:
        self._embeddings = embeddings
        self._scores = scores

    def routes(self) -> list[Operation]:
        refuses = refusing(REFUSED_FIELDS)
        scores = BodyDecoder(CreateScores, ("truncate_prompt_tokens",), refuses)
        labels = BodyDecoder(CreateClassification, ("truncate_prompt_tokens",), refuses)
        vectors = BodyDecoder(CreatePooling, ("truncate_prompt_tokens", "task"), refuses)
        return [
            Operation("POST /v1/score", self.score, ScoreList, reads=scores),
            Operation("POST /v1/classify", self.classify, ClassificationList, reads=labels),
            Operation("POST /score", self.score, ScoreList, reads=scores),
            Operation("POST /classify", self.classify, ClassificationList, reads=labels),
            Operation("POST /pooling", self.pool, PooledList, reads=vectors),
        ]

    async def score(self, request: Request, wire: CreateScores) -> ASGIApp:
        (first_name, first), (second_name, second) = wire.sides()
        pairs = TextPairs(
            queries=(first,) if isinstance(first, str) else tuple(first),
            documents=(second,) if isinstance(second, str) else tuple(second),
            query_label=first_name,
            document_label=second_name,
            instruction=wire.instruction,
            activates=wire.use_activation is not False,
        )
        asked = vector_request(request, wire.model, endpoint="score", reading=wire.reading(), user=wire.user)
        answer = await run_job(self._scores.open(pairs, asked), request)
        data = [Score(index, score) for index, score in enumerate(answer.scores)]
        usage = EmbeddingUsage.of(answer.usage)
        body = ScoreList(f"score-{request_id_of(request)}", answer.model, data, usage)
        return WholeAnswer(msgspec.json.encode(body), answer.rate_limits)

    async def classify(self, request: Request, wire: CreateClassification) -> ASGIApp:
        card = self._card(request, wire.model)
        check_classifier(card)
        answer = await self._vectors(request, wire, "classify")
        data = []
        for index, vector in enumerate(answer.vectors):
            probs = _numbers_of_labels(card, vector, wire.activates)
            best = card.pooler.labels[max(range(len(probs)), key=probs.__getitem__)]
            data.append(Classification(index, best, probs, len(probs)))
        usage = EmbeddingUsage.of(answer.usage)
        body = ClassificationList(f"classify-{request_id_of(request)}", answer.model, data, usage)
        return WholeAnswer(msgspec.json.encode(body), answer.rate_limits)

    async def pool(self, request: Request, wire: CreatePooling) -> ASGIApp:
        card = self._card(request, wire.model)
        task = wire.task or ("classify" if card.pooler.labels else "embed")
        if task == "classify":
            check_classifier(card)
        elif card.pooler.labels:
            raise InvalidRequest(f"The model {card.name!r} makes labels, and no vectors.", param="task")
        answer = await self._vectors(request, wire, "pooling", pools_tokens=task == "token_embed")
        data = []
        for index, vector in enumerate(answer.vectors):
            data.append(Pooled(index, _pooled(card, wire, task, vector)))
            if index % ENTRIES_AT_ONCE == ENTRIES_AT_ONCE - 1:
                await asyncio.sleep(0)
        usage = EmbeddingUsage.of(answer.usage)
        body = PooledList(f"pool-{request_id_of(request)}", answer.model, data, usage)
        encoded = await in_thread(msgspec.json.encode, body)
        return WholeAnswer(encoded, answer.rate_limits)

    def _card(self, request: Request, model: str | None) -> ModelCard:
        return self._embeddings.model_of(principal_of(request), model).card

    async def _vectors(
        self, request: Request, wire: CreateClassification, endpoint: str, *, pools_tokens: bool = False
    ) -> EmbeddingAnswer:
        asked = vector_request(
            request,
            wire.model,
            inputs=wire.inputs(),
            endpoint=endpoint,
            reading=wire.reading(),
            user=wire.user,
        )
        if isinstance(wire, CreatePooling):
            asked = replace(asked, dimensions=wire.dimensions, normalizes=wire.normalize)
        if pools_tokens:
            asked = replace(asked, pooling="all", uses_cache=False)
        return await run_job(self._embeddings.open(asked), request)


def check_classifier(card: ModelCard) -> None:
    if not card.pooler.labels:
        raise InvalidRequest(f"The model {card.name!r} has no labels to classify texts by.", param="model")


def _pooled(
    card: ModelCard, wire: CreatePooling, task: str, vector: bytes
) -> list[float | list[float]] | str:
    if wire.encoding_format == "base64":
        return base64.b64encode(vector).decode()
    if task == "classify":
        return [*_numbers_of_labels(card, vector, wire.activates)]
    if task == "embed":
        return [*numbers(vector)]
    size = card.embedding_size * BYTES_PER_NUMBER
    return [numbers(vector[start : start + size]) for start in range(0, len(vector), size)]


def _numbers_of_labels(card: ModelCard, vector: bytes, activates: bool) -> list[float]:
    logits = numbers(vector)
    return probabilities(card.pooler, logits) if activates else logits
