"""Chooses the model that answers a request: one of several by weight (a split), and others if the first fails
(fallbacks).

A split is decided by a hash of the caller and of what the caller names itself by, so that one user stays with one
model. A fallback is asked while nothing of an answer has been shown: after that, a stream cannot be taken back. Each
attempt has its own account, as with `auto`, and only models that the caller may use are asked.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.core.clock import Clock
from penstock.core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PenstockError,
    PermissionDenied,
    QuotaExceeded,
    ShuttingDown,
)
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import AnswerStream, ReaderGone, WrappedAnswer
from penstock.gateway.metrics.table import metric_by
from penstock.gateway.models.auto import Ask, asked_again_of, asked_of
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.settings import FallbackReason, Fallbacks
from penstock.gateway.prompts import GenerationRequest

logger = logging.getLogger(__name__)

_SERVER_ERROR = 500


def reason_of(error: PenstockError) -> FallbackReason | None:
    """Return the kind of failure that another model might not have; None for the caller's own mistakes."""
    if isinstance(error, ContextLengthExceeded):
        return "context"
    if isinstance(error, QuotaExceeded):
        return "budget"
    if isinstance(error, ShuttingDown):
        return None
    if isinstance(error, Overloaded):
        return "queue"
    return "error" if error.status >= _SERVER_ERROR or isinstance(error, ModelNotFound) else None


def chosen_by_weight(weights: Mapping[str, float], key: bytes) -> str:
    """Return the model that a key falls to; by their weights, in the long run."""
    place = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64 * sum(weights.values())
    models = tuple(weights)
    for model in models:
        place -= weights[model]
        if place < 0:
            return model
    return models[-1]


class ModelRoutes(Collector):
    """Answers requests through splits and fallbacks. Also a collector of metrics about both."""

    def __init__(self, ask: Ask, catalogue: Catalogue, clock: Clock) -> None:
        self._ask = ask
        self._catalogue = catalogue
        self._clock = clock
        self._split: Counter[tuple[str, str]] = Counter()
        self._fallen_back: Counter[tuple[str, str, str]] = Counter()

    def answer(self, request: GenerationRequest) -> Coroutine[Any, Any, AnswerStream]:
        settings = self._catalogue.settings
        if not settings.splits and not settings.fallbacks:
            return self._ask(request)
        weights = settings.splits.get(request.model or "")
        if weights:
            request = self._of_split(request, weights)
        name = self._catalogue.aliases.get(request.model or "", request.model)
        fallbacks = settings.fallbacks.get(name or "")
        if fallbacks is None:
            return self._ask(request)
        return self._with_fallbacks(request, name or "", fallbacks)

    def _of_split(self, request: GenerationRequest, weights: Mapping[str, float]) -> GenerationRequest:
        assert request.model is not None
        who = request.user or request.prompt_cache_key or request.request_id
        key = "\0".join((request.model, request.principal.workspace_id, who))
        model = chosen_by_weight(weights, key.encode())
        self._split[request.model, model] += 1
        if self._catalogue.settings.allows(request.principal, (request.model,)):
            request = msgspec.structs.replace(request, model_is_given=True)
        return asked_of(model, request)

    async def _with_fallbacks(
        self, request: GenerationRequest, first: str, fallbacks: Fallbacks
    ) -> AnswerStream:
        asked_at = self._clock.now()
        left = list(fallbacks.models)

        async def ask_next(error: PenstockError) -> AnswerStream:
            """Return the answer of the next model that takes the request. Raises the error where there is none."""
            while (reason := reason_of(error)) in fallbacks.on and left:
                name = left.pop(0)
                try:
                    asked = self._timed(asked_again_of(name, request), asked_at)
                    self._catalogue.answering(name, None if asked.model_is_given else asked.principal)
                    answer = await self._ask(asked)
                except (PermissionDenied, InvalidRequest) as refused:
                    logger.info("%s cannot answer for %s: %s", name, first, refused.message)
                    if isinstance(refused, ContextLengthExceeded):
                        error = refused
                except PenstockError as next_error:
                    error = next_error
                else:
                    logger.info("%s answers for %s: %s", name, first, error.message)
                    self._fallen_back[first, name, str(reason)] += 1
                    return answer
            raise error

        try:
            answer = await self._ask(request)
        except PenstockError as error:
            answer = await ask_next(error)
        return FallbackAnswer(answer, ask_next)

    def _timed(self, request: GenerationRequest, asked_at: float) -> GenerationRequest:
        if request.timeout_s is None:
            return request
        left_s = request.timeout_s - (self._clock.now() - asked_at)
        return msgspec.structs.replace(request, timeout_s=max(0.001, left_s))

    def collect(self) -> Iterator[Metric]:
        yield metric_by("split_requests", self._split)
        yield metric_by("fallbacks", self._fallen_back)


class FallbackAnswer(WrappedAnswer):
    """An answer, or that of the next model while nothing has been shown."""

    def __init__(
        self, answer: AnswerStream, ask_next: Callable[[PenstockError], Awaitable[AnswerStream]]
    ) -> None:
        super().__init__(answer)
        self._first_id = answer.id
        self._ask_next = ask_next
        self._has_begun = False
        self._is_cancelled = False

    @property
    def id(self) -> str:
        return self._first_id

    async def __anext__(self) -> list[Delta]:
        while True:
            try:
                deltas = await anext(self._answer)
            except PenstockError as error:
                if self._has_begun:
                    raise
                await self._go_on(error)
            else:
                self._has_begun = True
                return deltas

    async def collect(self) -> list[Delta]:
        while True:
            try:
                return await self._answer.collect()
            except PenstockError as error:
                await self._go_on(error)

    def cancel(self) -> None:
        self._is_cancelled = True
        super().cancel()

    async def _go_on(self, error: PenstockError) -> None:
        self._answer.cancel()
        self._answer = await self._ask_next(error)
        if self._is_cancelled:  # while it was asked for
            self._answer.cancel()
            raise ReaderGone
