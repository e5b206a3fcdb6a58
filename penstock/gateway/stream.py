"""The output of one request: its answers, the reader who waits for them, and what happens when either goes.

The engine never waits for a reader. News of an answer is merged until the reader comes for it; a reader that falls
too far behind loses the request. All of it runs on one event loop, without locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Protocol, TypeAlias

from penstock.cluster.client import EngineClient
from penstock.core.clock import Clock
from penstock.core.errors import DeadlineExceeded, EngineUnavailable, Overloaded, PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request, Tier
from penstock.gateway.accounts import Account, Outcome, RateLimits
from penstock.gateway.caching import written_by_ttl
from penstock.gateway.choice import Choice, Delta
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.prompts import Usage

# The engine ends a request at its deadline; this much later the gateway does it for an engine that hangs.
ENGINE_GRACE_S = 1.0

CacheStatus: TypeAlias = Literal["hit", "miss"]


class ReaderGone(Exception):
    """The request was cancelled by its own reader; nobody is left to answer."""


class StreamContext(Protocol):
    """What a generation needs of the gateway that started it."""

    engine: EngineClient
    metrics: GatewayMetrics
    clock: Clock
    max_buffer_bytes: int

    def queue_drain_s(self) -> float:
        """How long the engine will need for those who wait for it now."""
        ...


class AnswerStream(Protocol):
    """The answers to one request, as a front end reads them. A generation is one; what wraps it (a guard) or stands
    in for it (a replayed answer) is another.

    An iteration yields every delta that is ready, at least one, and ends after the last answer's finish_reason. It
    raises the PenstockError that ended the request early, or ReaderGone after `cancel`.
    """

    @property
    def id(self) -> str: ...
    @property
    def model(self) -> str:
        """The model that answers, which need not be the name that was asked for."""
        ...

    @property
    def tier(self) -> Tier: ...
    @property
    def rate_limits(self) -> RateLimits: ...
    @property
    def num_choices(self) -> int: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def cache_status(self) -> CacheStatus | None:
        """What the response cache knew; None when it was not asked."""
        ...

    def __aiter__(self) -> AnswerStream: ...
    async def __anext__(self) -> list[Delta]: ...
    async def collect(self) -> list[Delta]:
        """All answers in order, whole."""
        ...

    def cancel(self) -> None: ...


class Generation:
    """Iterate for deltas as they come, or `collect` the whole; `cancel` at any moment.

    An iteration yields every delta that is ready, at least one, and ends after the last answer's finish_reason. It
    raises the PenstockError that ended the request early, or ReaderGone after `cancel`.
    """

    cache_status: CacheStatus | None = None

    def __init__(
        self,
        account: Account,
        choices: Sequence[Choice],
        n: int,
        context: StreamContext,
        on_end: Callable[[Generation], None],
    ) -> None:
        self.account = account
        self._choices = choices
        self._n = n
        self._context = context
        self._metrics = context.metrics.of(account.claim.model)
        self._on_end = on_end
        self._arrived_at = context.clock.now()
        self._num_open = len(choices)
        self._queue_s: float | None = None
        self._dirty: list[Choice] = []
        self._error: PenstockError | ReaderGone | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._wants_all_at_once = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self, requests: Sequence[Request], timeout_s: float | None) -> None:
        """Send one request per choice to the engine."""
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout_s + ENGINE_GRACE_S, self._time_out)
        for choice, request in zip(self._choices, requests, strict=True):
            if self._error is not None:  # an engine may refuse before `add` returns
                return
            self._context.engine.add(
                request, timeout_s=timeout_s, on_event=partial(self._on_event, choice), on_error=self.fail
            )

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
        """As things stand. A prompt counts once, however many answers share it."""
        prompt = completion = cached = read = written_5m = written_1h = reasoning = 0
        for choice in self._choices:
            completion += choice.num_tokens
            reasoning += choice.num_reasoning_tokens
        for leader in self._choices[:: self._n]:
            prompt += leader.num_prompt_tokens
            cached += leader.num_cached_tokens
            read += leader.cache_use.read_tokens
            short, long = written_by_ttl(leader.cache_breakpoints, leader.cache_use)
            written_5m += short
            written_1h += long
        return Usage(prompt, completion, cached, read, written_5m, written_1h, reasoning)

    def __aiter__(self) -> Generation:
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
        """All answers in order, whole. Their reader is not woken before the end, and has no byte limit."""
        self._wants_all_at_once = True
        deltas = await anext(self)
        if self._error is not None:
            raise self._error
        return sorted(deltas, key=lambda delta: delta.index)

    def cancel(self) -> None:
        """The reader has gone: free what the engine holds, at once."""
        self._end_early(ReaderGone())

    def fail(self, error: PenstockError) -> None:
        """End every answer with an error that the reader will see."""
        self._end_early(error)

    def _on_event(self, choice: Choice, event: TokenEvent) -> None:
        if self._error is not None or choice.finish_reason is not None:
            return
        self._context.metrics.observe_engines(self._context.engine)
        if event.num_cached_tokens is not None:
            choice.num_cached_tokens = event.num_cached_tokens
            if choice.index % self._n == 0:  # siblings share the prompt
                self.account.note_cached(event.num_cached_tokens)
            if event.cache_use is not None:
                choice.cache_use = event.cache_use
        if event.finish_reason is not None and (error := self._early_end(event, choice)):
            self.fail(error)
            return
        if event.token_ids:
            self._time_tokens(choice, event)
        choice.push(event)
        if choice.finish_reason is not None:
            if event.finish_reason is None:  # a stop string: the engine does not know yet
                self._context.engine.abort(choice.request_id)
            self._close(choice, choice.finish_reason)
        elif choice.buffered_bytes > self._context.max_buffer_bytes and not self._wants_all_at_once:
            self._give_up_on_reader()
            return
        if not choice.has_news:
            return
        if not choice.is_dirty:
            choice.is_dirty = True
            self._dirty.append(choice)
        if not (self._wants_all_at_once and self._num_open):
            self._wake()

    def _time_tokens(self, choice: Choice, event: TokenEvent) -> None:
        now = self._context.clock.now()
        metrics = self._metrics
        num_tokens = len(event.token_ids)
        metrics.generation_tokens += num_tokens
        if choice.first_token_at is None:
            choice.first_token_at = now
            waited_s = now - self._arrived_at
            metrics.prompt_tokens += choice.num_prompt_tokens
            metrics.first_token_s.observe(waited_s)
            if event.queue_s is not None:
                if self._queue_s is None:
                    self._queue_s = event.queue_s
                metrics.queue_s.observe(event.queue_s)
                metrics.prefill_s.observe(max(0.0, waited_s - event.queue_s))
        else:
            metrics.inter_token_s.observe((now - choice.last_token_at) / num_tokens)
        choice.last_token_at = now

    def _close(self, choice: Choice, reason: FinishReason) -> None:
        metrics = self._metrics
        metrics.finished[reason] += 1
        if choice.first_token_at is not None:
            metrics.end_to_end_s.observe(self._context.clock.now() - self._arrived_at)
            metrics.decode_s.observe(choice.last_token_at - choice.first_token_at)
            metrics.request_prompt_tokens.observe(choice.num_prompt_tokens)
            metrics.request_generation_tokens.observe(choice.num_tokens)
        self._num_open -= 1
        if not self._num_open:
            if self._timer is not None:
                self._timer.cancel()
            # Before the reader is woken: whoever sees the end of an answer finds it settled.
            self.account.settle(self._outcome())
            self._on_end(self)

    def _outcome(self) -> Outcome:
        now = self._context.clock.now()
        begun = [choice.first_token_at for choice in self._choices if choice.first_token_at is not None]
        error = self._error
        failed = isinstance(error, PenstockError)
        return Outcome(
            usage=self.usage,
            status="completed" if error is None else "failed" if failed else "cancelled",
            error_code=error.code if isinstance(error, PenstockError) else None,
            duration_s=now - self._arrived_at,
            first_token_s=min(begun) - self._arrived_at if begun else None,
            queue_s=self._queue_s,
            finish_reasons=tuple(choice.finish_reason for choice in self._choices if choice.finish_reason),
        )

    def _early_end(self, event: TokenEvent, choice: Choice) -> PenstockError | None:
        """The error that a last event stands for; None when it is an ordinary end, such as a deadline with an answer
        to show for it."""
        match event.finish_reason:
            case FinishReason.ERROR if (
                not choice.num_tokens and event.queue_s is None
            ):  # it never left the queue
                return Overloaded(
                    event.error or "The request was never started.",
                    retry_after_s=self._context.queue_drain_s(),
                )
            case FinishReason.ERROR:
                return PenstockError(event.error or "The engine could not go on with this request.")
            case FinishReason.ABORT:
                return EngineUnavailable("The engine ended this request early.", hint="Try again.")
            case FinishReason.DEADLINE if not choice.num_tokens and not event.token_ids:
                return DeadlineExceeded("The request's deadline passed before its first token.")
        return None

    def _time_out(self) -> None:
        self.fail(DeadlineExceeded("The request's deadline passed, and the engine did not end it."))

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
        reason = FinishReason.ABORT if isinstance(error, ReaderGone | Overloaded) else FinishReason.ERROR
        for choice in self._choices:
            if choice.finish_reason is None:  # and stays so: the error tells how it ended
                self._context.engine.abort(choice.request_id)
                self._close(choice, reason)
        self._wake()

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
