"""The texts of one request on their way through the engine, a few at a time, until all have their vector; and vectors
that external servers make.

For external servers, accounts and drains work as for our own engines, without a tokenizer or a cache. Inputs go out a
few at a time, each group as a call that the pool sends to any server of the model.
"""

from __future__ import annotations

import asyncio
import copy
import math
import sys
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.cluster.external.pool import ExternalPool
from penstock.cluster.external.wire import ExternalCall, StreamChunk, estimated_tokens
from penstock.cluster.replica import EngineClient
from penstock.core.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    PenstockError,
)
from penstock.core.identity import RateLimits
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Pooling, Request
from penstock.gateway.accounts import Account, Outcome
from penstock.gateway.answers.stream import ENGINE_GRACE_S, ReaderGone
from penstock.gateway.embeddings.inputs import Input, Reading
from penstock.gateway.external.models import ExternalModel
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


MAX_INPUTS_PER_CALL = 64  # so that each answer stays small

PlainInput: TypeAlias = str | tuple[int, ...]


def checked_inputs(
    inputs: Sequence[Input],
    model: ExternalModel,
    pooling: Pooling | None,
    normalizes: bool | None,
    reading: Reading,
) -> list[PlainInput]:
    """Refuse options that only our own engines support. Raises InvalidRequest."""
    plain = [given for given in inputs if isinstance(given, str | tuple)]
    has_options = pooling is not None or normalizes is not None or reading != Reading()
    if has_options or len(plain) < len(inputs):
        raise InvalidRequest(
            f"The model {model.name!r} runs on another server, which is only asked for plain embeddings.",
            param="model",
            hint="Leave out pooling, normalize, prompt_name, input_type, and how texts are truncated.",
        )
    return plain


def num_tokens_of(given: PlainInput) -> int:
    """Return an estimate for a text: the server has the tokenizer."""
    return estimated_tokens(given) if isinstance(given, str) else len(given)


class ExternalEmbeddingJob(VectorJob):
    def __init__(
        self,
        gateway: Gateway,
        pool: ExternalPool,
        account: Account,
        inputs: Sequence[PlainInput],
        dimensions: int | None,
        timeout_s: float | None,
    ) -> None:
        super().__init__(gateway, account)
        self._pool = pool
        self._inputs = inputs
        self._options = {} if dimensions is None else {"dimensions": dimensions}
        self._timeout_s = timeout_s
        self._task: asyncio.Task[Any] | None = None  # while it runs
        self._error: PenstockError | ReaderGone | None = None  # that ended it early
        self._num_tokens = 0  # as the servers report

    def cancel(self) -> None:
        self._end_early(ReaderGone())

    def fail(self, error: PenstockError) -> None:
        self._end_early(error)

    def _end_early(self, error: PenstockError | ReaderGone) -> None:
        if self._error is not None:
            return
        self._error = error
        if self._task is not None:
            self._task.cancel()
        else:
            self._settle("cancelled", self._usage)  # nothing, once it has run

    async def run(self) -> EmbeddingAnswer:
        if self._error is not None:
            raise self._error
        task = self._task = asyncio.current_task()
        try:
            with self._gateway.counted(self):
                vectors = await self._vectors()
        except PenstockError as error:
            self._settle("failed", self._usage, error.code)
            raise
        except BaseException:
            error_code = self._error.code if isinstance(self._error, PenstockError) else None
            self._settle("cancelled" if error_code is None else "failed", self._usage, error_code)
            if self._error is None or task is None:
                raise
            task.uncancel()
            raise self._error from None
        finally:
            self._task = None
        return self._answer(vectors, self._usage, self._num_tokens, None)

    @property
    def _usage(self) -> Usage:
        return Usage(self._num_tokens, 0, 0)

    async def _vectors(self) -> list[bytes]:
        vectors: list[bytes] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                for start in range(0, len(self._inputs), MAX_INPUTS_PER_CALL):
                    vectors += await self._ask(start, self._inputs[start : start + MAX_INPUTS_PER_CALL])
        except TimeoutError:
            raise DeadlineExceeded(
                "The request's deadline passed before all its vectors were there."
            ) from None
        return vectors

    async def _ask(self, start: int, inputs: Sequence[PlainInput]) -> list[bytes]:
        claim = self._account.claim
        call = ExternalCall(
            id=f"{claim.request_id}-{start}",
            model=claim.model,
            api="embeddings",
            body={"input": list(inputs), "encoding_format": "float", **self._options},
            text="",  # whose beginning no server keeps
            tenant=claim.principal.workspace_id,
            tier=claim.tier,
            region=self._gateway.catalogue.settings.region_of(claim.principal),
            is_whole=True,
            estimated_tokens=sum(map(num_tokens_of, inputs)),
        )
        chunks: list[StreamChunk] = []
        await self._pool.send(call, chunks.extend)
        entries = sorted(chunks[-1].data, key=lambda entry: entry.index)
        if [entry.index for entry in entries] != list(range(len(inputs))):
            raise EngineUnavailable("The server of this model sent other vectors than it was asked for.")
        usage = chunks[-1].usage
        self._num_tokens += call.estimated_tokens if usage is None else usage.prompt_tokens
        return [packed(entry.embedding) for entry in entries]
