"""The output of one request: its answers, their reader, and the cleanup when either of them ends early.

Producers of answers never wait for a reader. New output is merged until the reader takes it; a reader that falls too
far behind loses the request. Everything runs on one event loop, without locks. The producers are `generation` (our
engines) and `external.answer` (external servers). Guards, recorders and shared readers of an answer derive from
`WrappedAnswer`.

An answer with very many log-probabilities is bounded, and is worked on off the event loop.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Sequence
from typing import Generic, Literal, Protocol, Self, TypeAlias, TypeVar

from penstock.cluster.replica import EngineClient
from penstock.core.clock import Clock
from penstock.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, PenstockError
from penstock.core.identity import OPEN_PRINCIPAL
from penstock.core.plan import Prefill
from penstock.core.request import FinishReason, Tier
from penstock.core.shares import Shares
from penstock.gateway.accounts import NOTHING_USED, Account, Outcome, RateLimits
from penstock.gateway.answers.choice import Delta, merged
from penstock.gateway.metrics.gateway import GatewayMetrics
from penstock.gateway.prompts import RequestWarning, Usage
from penstock.gateway.turns import Turns, in_thread

# The engine ends a request at its deadline; this much later the gateway does it for an engine that hangs.
ENGINE_GRACE_S = 1.0
# Output that waits for a reader counts for the workspace in steps: most readers never have so much waiting.
SHARE_STEP_BYTES = 16 << 10
MAX_FULL_BUFFERS = 256  # that the readers of all workspaces may have, each of `max_stream_buffer_bytes`

CacheStatus: TypeAlias = Literal["hit", "similar", "miss"]


class ReaderGone(Exception):
    """The reader has cancelled the request, so the answer is not needed."""


class StreamContext(Protocol):
    """The parts of the gateway that a generation uses."""

    engine: EngineClient
    metrics: GatewayMetrics
    clock: Clock
    turns: Turns
    max_buffer_bytes: int
    buffers: Shares  # the bytes of all workspaces that wait for readers

    def queue_drain_s(self) -> float:
        """Return how many seconds the engine will need for the requests that wait now."""
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
        """Return the model that answers, which need not be the name that was asked for."""
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
        """Return whether the response cache had the answer; None when the cache was not asked."""
        return None

    @property
    def warnings(self) -> tuple[RequestWarning, ...]:
        """Return warnings about parts of the request that the answer does not follow. Complete with the first
        delta."""
        return ()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Delta]: ...
    async def collect(self) -> list[Delta]:
        """Return all answers in order, whole."""
        ...

    def cancel(self) -> None: ...


class AccountedAnswer(AnswerStream):
    """An answer with an account of its own."""

    def __init__(self, account: Account) -> None:
        self.account = account

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


class AnyChoice(Protocol):
    """One answer of a request: its new output and its state."""

    finish_reason: FinishReason | None
    first_token_at: float | None
    last_token_at: float
    is_dirty: bool  # whether the owner lists this choice as one with new output
    buffered_bytes: int

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    def take(self) -> list[Delta]: ...
    def drop_buffer(self) -> None: ...


ChoiceT = TypeVar("ChoiceT", bound=AnyChoice)


_FAILURES = (FinishReason.ERROR, FinishReason.DEADLINE)


class MeteredAnswer(AccountedAnswer, Generic[ChoiceT]):
    """An answer whose tokens are timed, and whose account is settled before the end is seen.

    Iterate for deltas as they come, or `collect` the whole; `cancel` at any moment. A subclass makes the answers: it
    calls `_tell` for new output, `_close` for an end and `fail` for an error, and stops when `_abandon` says so.
    """

    warnings: tuple[RequestWarning, ...] = ()

    def __init__(
        self,
        account: Account,
        choices: Sequence[ChoiceT],
        n: int,
        context: StreamContext,
        on_end: Callable[[MeteredAnswer[ChoiceT]], None],
    ) -> None:
        super().__init__(account)
        self._choices = choices
        self._n = n
        self._context = context
        self._metrics = context.metrics.of(account.claim.model)
        self._latencies = self._metrics.latencies(account.claim.tier)
        self._on_end = on_end
        self._arrived_at = context.clock.now()
        self._num_open = len(choices)
        self._queue_s: float | None = None
        self._prefill: Prefill | None = None
        self._dirty: list[ChoiceT] = []
        # Copies are raised: a raised error refers to the frames that it passed, which refer to this answer. Such a
        # cycle would keep the answer and its prompts until a rare full garbage collection.
        self._error: PenstockError | ReaderGone | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._wants_all_at_once = False
        self._num_logprobs = 0
        principal = account.claim.principal
        self._holder = "" if principal is OPEN_PRINCIPAL else principal.workspace_id
        self._num_unread_bytes = 0
        self._num_shared_bytes = 0  # of them, counted in the share of the workspace
        self._unchecked_bytes: float = min(SHARE_STEP_BYTES, context.max_buffer_bytes)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def usage(self) -> Usage:
        """Return the tokens used so far. A prompt counts once, however many answers share it."""
        raise NotImplementedError

    def _abandon(self, choices: Sequence[ChoiceT]) -> None:
        """Free the resources of answers that ended early, at once."""
        raise NotImplementedError

    async def __anext__(self) -> list[Delta]:
        while True:
            if self._dirty and not (self._wants_all_at_once and self._num_open):
                return self._take()
            if self._error is not None:
                raise copy.copy(self._error)
            if not self._num_open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def collect(self) -> list[Delta]:
        """Return all answers in order, whole. Their reader is not woken before the end, and has no byte limit for
        their text."""
        self._wants_all_at_once = True
        self._unchecked_bytes = math.inf
        deltas = await anext(self)
        if self._error is not None:
            raise copy.copy(self._error)
        return await merged_later([deltas])

    def cancel(self) -> None:
        """Cancel for a reader that has gone: free all resources at once."""
        self._note_read(self._num_unread_bytes)
        if self._num_open:
            self._end_early(ReaderGone())

    def fail(self, error: PenstockError) -> None:
        """End every answer with an error that the reader will see."""
        self._end_early(error)

    def _tell(self, choice: ChoiceT) -> None:
        """A choice has new output."""
        if not choice.is_dirty:
            choice.is_dirty = True
            self._dirty.append(choice)
        if not (self._wants_all_at_once and self._num_open):
            self._wake()

    def _may_wait(self) -> bool:
        """Count the output that waits for the reader, and return whether the request goes on. A reader that is too
        far behind, or whose workspace leaves too many bytes unread, loses the request."""
        buffers, limit, num_unread = (
            self._context.buffers,
            self._context.max_buffer_bytes,
            self._num_unread_bytes,
        )
        buffers.add(self._holder, num_unread - self._num_shared_bytes)
        self._num_shared_bytes = num_unread
        self._unchecked_bytes = min(num_unread + SHARE_STEP_BYTES, limit)
        if num_unread > limit:
            self._give_up_on_reader(f"The reader fell more than {limit} bytes behind")
        elif buffers.is_over_for(self._holder):
            self._give_up_on_reader("Too many bytes of this workspace's answers wait for readers")
        return self._error is None

    def _note_read(self, num_bytes: int) -> None:
        """Count output that the reader has taken, or that is dropped."""
        self._num_unread_bytes -= num_bytes
        num_shared = min(self._num_shared_bytes, max(0, self._num_unread_bytes))
        if num_shared < self._num_shared_bytes:
            self._context.buffers.add(self._holder, num_shared - self._num_shared_bytes)
            self._num_shared_bytes = num_shared
            if not self._wants_all_at_once:
                self._unchecked_bytes = min(num_shared + SHARE_STEP_BYTES, self._context.max_buffer_bytes)

    def _count_logprobs(self, num_new: int) -> None:
        """End an answer that is read whole and has got too many log-probabilities."""
        self._num_logprobs += num_new
        if self._wants_all_at_once and self._num_logprobs > MAX_WHOLE_LOGPROBS:
            self._drop_buffers()
            self.fail(too_many_logprobs())

    def _give_up_on_reader(self, reason: str) -> None:
        self._drop_buffers()
        self.fail(Overloaded(f"{reason}, so the request was aborted."))

    def _drop_buffers(self) -> None:
        for choice in self._choices:
            choice.drop_buffer()
        self._dirty.clear()
        self._note_read(self._num_unread_bytes)

    def _close(self, choice: ChoiceT, reason: FinishReason) -> None:
        metrics = self._metrics
        metrics.finished[reason] += 1
        self._latencies.num_ended += 1
        self._latencies.num_failed += reason in _FAILURES
        if choice.first_token_at is not None:
            self._latencies.end_to_end_s.observe(self._context.clock.now() - self._arrived_at)
            self._latencies.decode_s.observe(choice.last_token_at - choice.first_token_at)
            metrics.request_prompt_tokens.observe(choice.num_prompt_tokens)
            metrics.request_generation_tokens.observe(choice.num_tokens)
        self._num_open -= 1
        if not self._num_open:
            if self._timer is not None:
                self._timer.cancel()
            # Before the reader is woken: a reader that sees the end of an answer finds the account settled.
            self.account.settle(self._outcome())
            self._on_end(self)

    def _outcome(self) -> Outcome:
        begun = [choice.first_token_at for choice in self._choices if choice.first_token_at is not None]
        error, usage = self._error, self.usage
        failed = isinstance(error, PenstockError)
        # A caller whose answer never began pays nothing if the server is to blame. A caller that leaves, or whose own
        # request ends it, pays for the prompt: that may have been computed.
        is_ours = failed and not isinstance(error, InvalidRequest | DeadlineExceeded)
        if is_ours and not begun and not usage.completion_tokens:
            usage = NOTHING_USED
        return Outcome(
            usage=usage,
            status="completed" if error is None else "failed" if failed else "cancelled",
            error_code=error.code if isinstance(error, PenstockError) else None,
            duration_s=self._context.clock.now() - self._arrived_at,
            first_token_s=min(begun) - self._arrived_at if begun else None,
            queue_s=self._queue_s,
            prefill=self._prefill,
            finish_reasons=tuple([each.finish_reason for each in self._choices if each.finish_reason]),
        )

    def _end_early(self, error: PenstockError | ReaderGone) -> None:
        if self._error is not None or not self._num_open:
            return
        self._error = error
        # Their finish_reason stays None: the error tells how they ended.
        unfinished = [choice for choice in self._choices if choice.finish_reason is None]
        self._abandon(unfinished)
        for choice in unfinished:
            self._close(choice, _reason_of(error))
        self._wake()

    def _take(self) -> list[Delta]:
        dirty, self._dirty = self._dirty, []
        deltas: list[Delta] = []
        num_read = 0
        for choice in dirty:
            choice.is_dirty = False
            num_read += choice.buffered_bytes
            deltas += choice.take()
        if num_read:
            self._note_read(num_read)
        return deltas

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _reason_of(error: PenstockError | ReaderGone) -> FinishReason:
    """Return the reason under which answers that ended early are counted."""
    if isinstance(error, ReaderGone | Overloaded):
        return FinishReason.ABORT
    return FinishReason.INVALID if isinstance(error, InvalidRequest) else FinishReason.ERROR


class WrappedAnswer(AnswerStream):
    """An answer that passes everything on to another one. Subclasses change parts of it."""

    def __init__(self, answer: AnswerStream) -> None:
        self._answer = answer

    @property
    def id(self) -> str:
        return self._answer.id

    @property
    def model(self) -> str:
        return self._answer.model

    @property
    def tier(self) -> Tier:
        return self._answer.tier

    @property
    def rate_limits(self) -> RateLimits:
        return self._answer.rate_limits

    @property
    def num_choices(self) -> int:
        return self._answer.num_choices

    @property
    def usage(self) -> Usage:
        return self._answer.usage

    @property
    def cache_status(self) -> CacheStatus | None:
        return self._answer.cache_status

    @property
    def warnings(self) -> tuple[RequestWarning, ...]:
        return self._answer.warnings

    async def __anext__(self) -> list[Delta]:
        return await anext(self._answer)

    async def collect(self) -> list[Delta]:
        return await self._answer.collect()

    def cancel(self) -> None:
        self._answer.cancel()


class EmptyAnswer(AnswerStream):
    """An answer without a token, for a request that generates nothing."""

    id: str = ""
    model: str = ""
    tier = Tier.DEFAULT
    num_choices = 1
    usage = Usage(0, 0, 0)
    rate_limits: RateLimits = RateLimits()

    def __init__(self, answer_id: str, model: str) -> None:
        self.id = answer_id
        self.model = model

    async def __anext__(self) -> list[Delta]:
        raise StopAsyncIteration

    async def collect(self) -> list[Delta]:
        return []

    def cancel(self) -> None:
        """There is nothing to cancel."""


# Work on less takes less time than a hop to another thread is worth.
DIRECT_LOGPROBS = 2048
_DIRECT_DELTAS = 2048
# Numbers of all answers to one request that are read whole: about 100 bytes each, and as many on the wire.
MAX_WHOLE_LOGPROBS = 1 << 22

Result = TypeVar("Result")


async def off_loop_if_large(deltas: Sequence[Delta], work: Callable[[], Result]) -> Result:
    """Return the result of `work` on the deltas. Many log-probabilities are worked on in a thread, which gives the
    event loop its turns."""
    return await in_thread(work) if are_large(deltas) else work()


def are_large(deltas: Sequence[Delta]) -> bool:
    """Return whether the deltas have so many log-probabilities that work on them would delay others."""
    num_logprobs = 0
    for delta in deltas:
        if delta.details:
            num_logprobs += delta.num_logprobs
    return num_logprobs > DIRECT_LOGPROBS


async def merged_later(batches: Sequence[Sequence[Delta]]) -> list[Delta]:
    """Return one delta for each answer. Very many deltas are merged in a thread."""
    num_deltas = sum(map(len, batches))
    num_logprobs = sum(delta.num_logprobs for deltas in batches for delta in deltas)
    if num_deltas <= _DIRECT_DELTAS and num_logprobs <= DIRECT_LOGPROBS:
        return merged(batches)
    return await in_thread(merged, batches)


def too_many_logprobs() -> InvalidRequest:
    return InvalidRequest(
        f"The answers hold more than {MAX_WHOLE_LOGPROBS} log-probabilities, which is the most for a request that is "
        "not streamed.",
        param="logprobs",
        hint="Stream the answers, or ask for fewer answers, tokens or alternatives.",
    )
