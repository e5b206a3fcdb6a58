"""The texts of one request on their way through the engine: a few at a time, until all have their vector."""

from __future__ import annotations

import asyncio
import copy
import math
import sys
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Literal, TypeAlias

import msgspec

from penstock.cluster.replica import EngineClient
from penstock.core.errors import DeadlineExceeded, EngineUnavailable, Overloaded, PenstockError
from penstock.core.identity import RateLimits
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request
from penstock.gateway.accounts import Account, Outcome
from penstock.gateway.answers.stream import ENGINE_GRACE_S, ReaderGone
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import Usage

# This many at once keep an engine busy, and leave room in its queue for other requests.
MAX_TEXTS_IN_FLIGHT = 64
Status: TypeAlias = Literal["completed", "cancelled", "failed"]


class EmbeddingAnswer(msgspec.Struct, frozen=True):
    vectors: list[bytes]  # little-endian float32, of length 1
    model: str
    usage: Usage
    rate_limits: RateLimits


class VectorJob:
    """An opened request for vectors, and its account: `run` it for its answer, `cancel` it at any moment."""

    def __init__(self, gateway: Gateway, account: Account) -> None:
        self._gateway = gateway
        self._account = account
        self._started_at = gateway.clock.now()

    @property
    def rate_limits(self) -> RateLimits:
        return self._account.rate_limits

    def _answer(
        self, vectors: list[bytes], usage: Usage, num_tokens: int, queue_s: float | None
    ) -> EmbeddingAnswer:
        """Settle a completed request and return its answer. `num_tokens` were embedded for it."""
        claim = self._account.claim
        metrics = self._gateway.metrics.of(claim.model)
        metrics.prompt_tokens += num_tokens
        metrics.latencies(claim.tier).prompt_tokens += num_tokens
        self._settle("completed", usage, queue_s=queue_s)
        return EmbeddingAnswer(vectors, claim.model, usage, self._account.rate_limits)

    def _settle(
        self, status: Status, usage: Usage, error_code: str | None = None, *, queue_s: float | None = None
    ) -> None:
        duration_s = self._gateway.clock.now() - self._started_at
        self._account.settle(
            Outcome(usage=usage, status=status, error_code=error_code, duration_s=duration_s, queue_s=queue_s)
        )


class EmbeddingRun:
    """Await `vectors`, or end it with `cancel` or `fail` at any moment."""

    def __init__(self, engine: EngineClient, requests: Sequence[Request], timeout_s: float | None) -> None:
        self._engine = engine
        self._waiting = list(reversed(requests))
        self._loop = asyncio.get_running_loop()
        self._deadline_s = None if timeout_s is None else self._loop.time() + timeout_s
        self._order = [request.id for request in requests]
        self._in_flight: set[str] = set()
        self._vectors: dict[str, bytes] = {}
        self._done: asyncio.Future[None] = self._loop.create_future()
        # A copy is raised: a raised error refers to the frames that it passed, which refer to this run and its texts.
        self._error: PenstockError | ReaderGone | None = None
        self._num_tokens = {request.id: len(request.prompt_token_ids) for request in requests}
        self.num_cached_tokens = 0  # reused from the engine's KV cache
        self.queue_s: float | None = None  # of the first text, as the engine measured it

    async def vectors(self) -> list[bytes]:
        """Return the vectors in the order of the requests. Raises the PenstockError that ended the run, or ReaderGone
        after `cancel`."""
        timer = None
        if self._deadline_s is not None:
            timer = self._loop.call_at(self._deadline_s + ENGINE_GRACE_S, self.fail, _too_late())
        self._start_more()
        try:
            await self._done
        finally:
            if timer is not None:
                timer.cancel()
            self._abort()
        if self._error is not None:
            raise copy.copy(self._error)
        return [self._vectors[request_id] for request_id in self._order]

    @property
    def num_embedded_tokens(self) -> int:
        """Return how many tokens the texts have that got their vector, also when the run fails for others."""
        return sum(self._num_tokens[request_id] for request_id in self._vectors)

    def cancel(self) -> None:
        self._end(ReaderGone())

    def fail(self, error: PenstockError) -> None:
        self._end(error)

    def _start_more(self) -> None:
        while self._waiting and len(self._in_flight) < MAX_TEXTS_IN_FLIGHT and not self._done.done():
            request = self._waiting.pop()
            self._in_flight.add(request.id)
            self._engine.add(
                request,
                timeout_s=self._time_left_s(),
                on_event=partial(self._on_event, request.id),
                on_error=self.fail,
            )
        if not self._waiting and not self._in_flight and not self._done.done():
            self._done.set_result(None)

    def _time_left_s(self) -> float | None:
        """Return the seconds left for texts that start now. All texts share the request's time."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._loop.time())

    def _on_event(self, request_id: str, event: TokenEvent) -> None:
        if self._done.done() or event.finish_reason is None:
            return
        self._in_flight.discard(request_id)
        if event.embedding is None:
            self._end(_error_of(event))
            return
        self._vectors[request_id] = event.embedding
        self.num_cached_tokens += event.num_cached_tokens or 0
        if self.queue_s is None:
            self.queue_s = event.queue_s
        self._start_more()

    def _end(self, error: PenstockError | ReaderGone) -> None:
        if not self._done.done():
            self._error = error
            self._done.set_result(None)

    def _abort(self) -> None:
        self._waiting.clear()
        for request_id in self._in_flight:
            self._engine.abort(request_id)
        self._in_flight.clear()


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded("The request's deadline passed before all of its texts were embedded.")


def _error_of(event: TokenEvent) -> PenstockError:
    """Return the error of a text that got no vector."""
    match event.finish_reason:
        case FinishReason.DEADLINE:
            return _too_late()
        case FinishReason.ABORT:
            return EngineUnavailable("The engine ended this request early.", hint="Try again.")
        case FinishReason.ERROR if event.queue_s is None:
            return Overloaded(event.error or "The request was never started.", retry_after_s=5.0)
    return PenstockError(event.error or "The engine could not embed this text.")


BYTES_PER_NUMBER = 4


def numbers(vector: bytes) -> list[float]:
    values = array("f")
    values.frombytes(vector)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def packed(vector: Sequence[float]) -> bytes:
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def shortened(vector: bytes, dimensions: int) -> bytes:
    """Return the first `dimensions` elements, normalized to length 1."""
    kept = numbers(vector[: dimensions * BYTES_PER_NUMBER])
    length = math.sqrt(math.fsum(number * number for number in kept)) or 1.0
    return packed([number / length for number in kept])
