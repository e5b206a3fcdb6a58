"""The answers of external servers to one request, read like those of our own engines.

A task per answer reads what a server sends. The rest is as in `gateway.stream`: news is merged until the reader
comes, a reader that falls too far behind loses the request, and its account is settled before the end is seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import msgspec

from penstock.cluster.external.call import ExternalCall
from penstock.cluster.external.pool import ExternalPool
from penstock.core.errors import DeadlineExceeded, EngineUnavailable, Overloaded, PenstockError
from penstock.core.request import FinishReason, Tier
from penstock.gateway.accounts import Account, Outcome, RateLimits
from penstock.gateway.choice import Delta
from penstock.gateway.external.choice import ExternalChoice
from penstock.gateway.prompts import Usage
from penstock.gateway.stream import CacheStatus, ReaderGone, StreamContext

log = logging.getLogger(__name__)


class ExternalAnswer:
    """An AnswerStream. `start` it once."""

    cache_status: CacheStatus | None = None

    def __init__(
        self,
        account: Account,
        calls: Sequence[ExternalCall],
        n: int,
        context: StreamContext,
        on_end: Callable[[ExternalAnswer], None],
    ) -> None:
        self.account = account
        self._calls = calls
        self._n = n
        self._context = context
        self._metrics = context.metrics.of(account.claim.model)
        self._on_end = on_end
        self._choices = [ExternalChoice(index, call.estimated_tokens) for index, call in enumerate(calls)]
        self._arrived_at = context.clock.now()
        self._num_open = len(calls)
        self._dirty: list[ExternalChoice] = []
        self._error: PenstockError | ReaderGone | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._wants_all_at_once = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, pool: ExternalPool, timeout_s: float | None) -> None:
        if timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._time_out)
        for choice, call in zip(self._choices, self._calls, strict=True):
            timed = msgspec.structs.replace(call, timeout_s=timeout_s)
            self._tasks.append(asyncio.create_task(self._follow(pool, timed, choice)))

    @property
    def id(self) -> str:
        return self.account.claim.request_id

    @property
    def model(self) -> str:
        return self.account.claim.model

    @property
    def tier(self) -> Tier:
        return self.account.claim.tier

    @property
    def rate_limits(self) -> RateLimits:
        return self.account.rate_limits

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def usage(self) -> Usage:
        """As the servers tell it, else as it is estimated. A prompt counts once, however many answers share it."""
        leaders = self._choices[:: self._n]
        return Usage(
            prompt_tokens=sum(leader.prompt_tokens for leader in leaders),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=sum(leader.cached_tokens for leader in leaders),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self._choices),
        )

    def __aiter__(self) -> ExternalAnswer:
        return self

    async def __anext__(self) -> list[Delta]:
        while True:
            if self._dirty and not (self._wants_all_at_once and self._num_open):
                return self._take()
            if self._error is not None:
                raise self._error
            if not self._num_open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def collect(self) -> list[Delta]:
        self._wants_all_at_once = True
        deltas = await anext(self)
        if self._error is not None:
            raise self._error
        return sorted(deltas, key=lambda delta: delta.index)

    def cancel(self) -> None:
        """Closes the connections, by which the servers learn of it."""
        self._end_early(ReaderGone())

    def fail(self, error: PenstockError) -> None:
        self._end_early(error)

    async def _follow(self, pool: ExternalPool, call: ExternalCall, choice: ExternalChoice) -> None:
        try:
            async with contextlib.aclosing(pool.stream(call)) as chunks:
                async for chunk in chunks:
                    if choice.push(chunk):
                        self._time_token(choice)
                        self._tell(choice)
            if choice.ending is None:
                raise EngineUnavailable("The server of this model broke off its answer.", hint="Try again.")
        except PenstockError as error:
            self.fail(error)
        except Exception:
            log.exception("request %s failed at an external server", call.id)
            self.fail(PenstockError("The server met an error that it did not foresee."))
        else:
            self._finish(choice, choice.ending)

    def _time_token(self, choice: ExternalChoice) -> None:
        now = self._context.clock.now()
        if choice.first_token_at is None:
            choice.first_token_at = now
            self._metrics.first_token_s.observe(now - self._arrived_at)
        else:
            self._metrics.inter_token_s.observe(now - choice.last_token_at)
        choice.last_token_at = now

    def _tell(self, choice: ExternalChoice) -> None:
        if self._error is not None:
            return
        if choice.buffered_bytes > self._context.max_buffer_bytes and not self._wants_all_at_once:
            self._give_up_on_reader()
            return
        if not choice.is_dirty:
            choice.is_dirty = True
            self._dirty.append(choice)
        if not (self._wants_all_at_once and self._num_open):
            self._wake()

    def _finish(self, choice: ExternalChoice, reason: FinishReason) -> None:
        choice.finish_reason = reason
        self._close(choice, reason)
        self._tell(choice)

    def _close(self, choice: ExternalChoice, reason: FinishReason) -> None:
        metrics = self._metrics
        metrics.finished[reason] += 1
        metrics.generation_tokens += choice.num_tokens
        if choice.first_token_at is not None:
            metrics.prompt_tokens += choice.prompt_tokens
            metrics.end_to_end_s.observe(self._context.clock.now() - self._arrived_at)
            metrics.decode_s.observe(choice.last_token_at - choice.first_token_at)
            metrics.request_prompt_tokens.observe(choice.prompt_tokens)
            metrics.request_generation_tokens.observe(choice.num_tokens)
        self._num_open -= 1
        if not self._num_open:
            if self._timer is not None:
                self._timer.cancel()
            self.account.settle(self._outcome())
            self._on_end(self)

    def _outcome(self) -> Outcome:
        begun = [choice.first_token_at for choice in self._choices if choice.first_token_at is not None]
        error = self._error
        failed = isinstance(error, PenstockError)
        return Outcome(
            usage=self.usage,
            status="completed" if error is None else "failed" if failed else "cancelled",
            error_code=error.code if isinstance(error, PenstockError) else None,
            duration_s=self._context.clock.now() - self._arrived_at,
            first_token_s=min(begun) - self._arrived_at if begun else None,
            finish_reasons=tuple(choice.finish_reason for choice in self._choices if choice.finish_reason),
        )

    def _time_out(self) -> None:
        """An answer that has begun ends where it is; without any there is only the error."""
        open_choices = [choice for choice in self._choices if choice.finish_reason is None]
        if any(choice.first_token_at is None for choice in open_choices):
            self.fail(DeadlineExceeded("The request's deadline passed before its first token."))
            return
        self._stop_reading()
        for choice in open_choices:
            self._finish(choice, choice.ending or FinishReason.DEADLINE)

    def _give_up_on_reader(self) -> None:
        for choice in self._choices:
            choice.drop_buffer()
        self._dirty.clear()
        limit = self._context.max_buffer_bytes
        self.fail(Overloaded(f"The reader fell more than {limit} bytes behind, so the request was aborted."))

    def _end_early(self, error: PenstockError | ReaderGone) -> None:
        if self._error is not None or not self._num_open:
            return
        self._error = error
        self._stop_reading()
        reason = FinishReason.ABORT if isinstance(error, ReaderGone | Overloaded) else FinishReason.ERROR
        for choice in self._choices:
            if choice.finish_reason is None:  # and stays so: the error tells how it ended
                self._close(choice, reason)
        self._wake()

    def _stop_reading(self) -> None:
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    def _take(self) -> list[Delta]:
        dirty, self._dirty = self._dirty, []
        deltas = []
        for choice in dirty:
            choice.is_dirty = False
            deltas.append(choice.take())
        return deltas

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
