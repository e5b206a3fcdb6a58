"""Chooses the model that answers a request: the smallest model that should suffice (`auto`), one of several by
weight (a split), and others if the first fails (fallbacks).

A split is decided by a hash of the caller and of what the caller names itself by, so that one user stays with one
model. A fallback is asked while nothing of an answer has been shown: after that, a stream cannot be taken back.
Each attempt has its own account: every model that worked is paid for, and the usage of the answer is the sum. Only
models that the caller may use are asked.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

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
from penstock.gateway.metrics.table import Figures
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.settings import (
    AUTO,
    Assessment,
    AutoSettings,
    FallbackReason,
    Fallbacks,
    PromptText,
    assess,
)
from penstock.gateway.prompts import ChatPrompt, GenerationRequest, Prompt, TextPrompt, Usage

logger = logging.getLogger(__name__)


Ask = Callable[[GenerationRequest], Coroutine[Any, Any, AnswerStream]]


class ReplaceableAnswer(WrappedAnswer):
    """An answer in whose place another model's may come. Its id stays the first one's."""

    def __init__(self, answer: AnswerStream) -> None:
        super().__init__(answer)
        self._first_id = answer.id
        self._is_cancelled = False

    @property
    def id(self) -> str:
        return self._first_id

    def cancel(self) -> None:
        self._is_cancelled = True
        super().cancel()

    def _replace(self, answer: AnswerStream) -> None:
        self._answer = answer
        if self._is_cancelled:  # while it was asked for
            answer.cancel()


class AutoModel:
    """Chooses models for requests that ask for `auto`.

    A prompt is assessed by `complexity`. A reader of a whole answer gets the larger model's answer if the tokens of
    the smaller model had a low mean log-probability; a stream stays with the first model.
    """

    def __init__(self, ask: Ask, catalogue: Catalogue, clock: Clock) -> None:
        self._ask_model = ask
        self._catalogue = catalogue
        self._clock = clock
        self._chosen: Counter[str] = Counter()
        self._escalated: Counter[str] = Counter()

    async def answer(self, request: GenerationRequest) -> AnswerStream:
        settings = self._catalogue.settings.auto
        assert settings is not None, "`auto` is a model only where it is configured"
        if self._catalogue.settings.allows(request.principal, (AUTO,)):
            request = msgspec.structs.replace(request, model_is_given=True)
        assessment = max(
            (assess(_text_of(prompt), settings.thresholds) for prompt in request.prompts), key=_score
        )
        ladder = self._usable(request, settings.models_from(assessment.complexity))
        ladder = ladder or self._usable(request, settings.models)[-1:]  # none is large enough
        if not ladder:
            raise PermissionDenied("This key may use none of the models behind 'auto'.", param="model")
        first, *larger = ladder
        logger.debug("auto chose %s: score %.2f by %s", first, assessment.score, assessment.reasons)
        self._chosen[first] += 1
        larger = larger[: settings.max_escalations]
        if not larger:
            return await self._ask_model(asked_of(first, request))
        asks_for_logprobs = request.sampling.logprobs is not None
        if not asks_for_logprobs:
            request = msgspec.structs.replace(
                request, sampling=msgspec.structs.replace(request.sampling, logprobs=0), is_plain=False
            )
        asked_at = self._clock.now()
        answer = await self._ask_model(asked_of(first, request))

        async def ask_next() -> AnswerStream | None:
            return await self._ask(larger, request, asked_at)

        return CascadingAnswer(answer, ask_next, settings, shows_logprobs=asks_for_logprobs)

    async def _ask(
        self, larger: list[str], request: GenerationRequest, asked_at: float
    ) -> AnswerStream | None:
        """Return the next larger model's answer; None when there is none that takes the request, or no time left."""
        while larger:
            name = larger.pop(0)
            if request.timeout_s is not None:
                left_s = request.timeout_s - (self._clock.now() - asked_at)
                if left_s <= 0:
                    return None
                asked = msgspec.structs.replace(request, timeout_s=left_s)
            else:
                asked = request
            try:
                answer = await self._ask_model(asked_again_of(name, asked))
            except PenstockError as error:
                logger.info("auto cannot ask %s: %s", name, error.message)
            else:
                self._escalated[name] += 1
                return answer
        return None

    def _usable(self, request: GenerationRequest, names: Sequence[str]) -> list[str]:
        """Return the models that are served and that the caller may use. A caller who is allowed `auto` by name may
        use all."""
        principal = None if request.model_is_given else request.principal
        usable = []
        for name in names:
            try:
                self._catalogue.answering(name, principal)
            except (ModelNotFound, PermissionDenied):
                continue
            usable.append(name)
        return usable

    def figures(self) -> Figures:
        return {"auto_requests": self._chosen, "auto_escalations": self._escalated}


class CascadingAnswer(ReplaceableAnswer):
    """The first model's answer, or, when it is read whole and unsure, a larger model's."""

    def __init__(
        self,
        answer: AnswerStream,
        ask_next: Callable[[], Awaitable[AnswerStream | None]],
        settings: AutoSettings,
        *,
        shows_logprobs: bool,
    ) -> None:
        super().__init__(answer)
        self._ask_next = ask_next
        self._settings = settings
        self._shows_logprobs = shows_logprobs
        self._spent: list[Usage] = []  # by models whose answers were not good enough

    @property
    def usage(self) -> Usage:
        return _sum([*self._spent, self._answer.usage])

    async def __anext__(self) -> list[Delta]:
        return self._shown(await anext(self._answer))

    async def collect(self) -> list[Delta]:
        deltas = await self._answer.collect()
        while self._is_unsure(deltas) and not self._is_cancelled:
            larger = await self._ask_next()
            if larger is None:
                break
            before = self._answer
            self._replace(larger)
            try:
                better = await larger.collect()
            except PenstockError as error:
                logger.info("auto stays with %s: %s", before.model, error.message)
                self._spent.append(larger.usage)
                self._answer = before
                break
            self._spent.append(before.usage)
            deltas = better
        return self._shown(deltas)

    def _is_unsure(self, deltas: Sequence[Delta]) -> bool:
        means = [mean for delta in deltas if (mean := mean_logprob(delta)) is not None]
        return bool(means) and min(means) < self._settings.min_mean_logprob

    def _shown(self, deltas: list[Delta]) -> list[Delta]:
        if self._shows_logprobs:
            return deltas
        return [msgspec.structs.replace(delta, details=()) if delta.details else delta for delta in deltas]


def mean_logprob(answer: Delta) -> float | None:
    """Return the mean log-probability of an answer's tokens; None without tokens."""
    logprobs = [detail.logprob for detail in answer.details]
    return sum(logprobs) / len(logprobs) if logprobs else None


def asked_of(model: str, request: GenerationRequest) -> GenerationRequest:
    """Return the same request for one model. To a client that repeats it, two models' answers are two requests."""
    key = None if request.idempotency_key is None else f"{request.idempotency_key}:{model}"
    return msgspec.structs.replace(request, model=model, idempotency_key=key)


def asked_again_of(model: str, request: GenerationRequest) -> GenerationRequest:
    """Return the same request for another model, under an id of its own in the ledger."""
    request_id = f"{request.request_id}-{model}" if request.request_id else ""
    return msgspec.structs.replace(asked_of(model, request), request_id=request_id)


def _text_of(prompt: Prompt) -> PromptText:
    if isinstance(prompt, TextPrompt):
        return PromptText(prompt.text)
    if not isinstance(prompt, ChatPrompt):
        return PromptText("", num_token_ids=len(prompt.token_ids))
    texts = ["\n".join(part.text for part in message.parts) for message in prompt.messages]
    asked_at = max(
        (index for index, message in enumerate(prompt.messages) if message.role == "user"), default=-1
    )
    return PromptText(
        question=texts[asked_at] if texts else "",
        context="\n".join(text for index, text in enumerate(texts) if index != asked_at),
        num_turns=sum(message.role == "user" for message in prompt.messages),
        num_tools=len(prompt.tools),
    )


def _score(assessment: Assessment) -> float:
    return assessment.score


def _sum(usages: Sequence[Usage]) -> Usage:
    return Usage(*(sum(column) for column in zip(*map(msgspec.structs.astuple, usages), strict=True)))


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


class ModelRoutes:
    """Answers requests through splits and fallbacks."""

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

    def figures(self) -> Figures:
        return {"split_requests": self._split, "fallbacks": self._fallen_back}


class FallbackAnswer(ReplaceableAnswer):
    """A model's answer, or the next model's answer while nothing has been shown."""

    def __init__(
        self, answer: AnswerStream, ask_next: Callable[[PenstockError], Awaitable[AnswerStream]]
    ) -> None:
        super().__init__(answer)
        self._ask_next = ask_next
        self._has_begun = False

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

    async def _go_on(self, error: PenstockError) -> None:
        self._answer.cancel()
        self._replace(await self._ask_next(error))
        if self._is_cancelled:
            raise ReaderGone
