"""This module turns an answer into data that can be stored, keeps such data in memory, and turns the data into an
answer stream.

`RecordingAnswer` records a live answer while its deltas pass, `AnswerCache` keeps recorded answers by fingerprint,
bounded in time and bytes, and `ReplayedAnswer` gives a recorded answer to a reader. Both tables of the settings can
change while a server runs.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.figures import CountOrZero, NotNegative, Positive
from penstock.core.lru import LruCache
from penstock.core.request import FinishReason
from penstock.gateway.accounts import NOTHING_USED, Account, Outcome, RateLimits
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import (
    MAX_WHOLE_LOGPROBS,
    AccountedAnswer,
    AnswerStream,
    CacheStatus,
    ReaderGone,
    WrappedAnswer,
    merged_later,
    too_many_logprobs,
)
from penstock.gateway.prompts import RequestWarning, Usage

_ENTRY_OVERHEAD_BYTES = 256  # keys and bookkeeping, roughly
# Rough sizes of an encoded delta, of a token's details and of a log-probability.
_DELTA_BYTES, _DETAIL_BYTES, _LOGPROB_BYTES = 128, 32, 32


@dataclass(frozen=True, slots=True)
class _Entry:
    answer: bytes
    stored_at: float
    expires_at: float


class AnswerCache(LruCache[tuple[str, bytes], _Entry]):
    """Answers, bounded in bytes. Keys hold the workspace, so that no other workspace can find, or time, an answer."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, lambda _, entry: len(entry.answer) + _ENTRY_OVERHEAD_BYTES)

    def find(self, workspace_id: str, fingerprint: bytes, now: float, max_age_s: float) -> bytes | None:
        """Return the answer of this fingerprint, unless it is older than the writer or the reader allows."""
        key = workspace_id, fingerprint
        entry = self.peek(key)
        if entry is not None and now >= entry.expires_at:
            self.pop(key)
        elif entry is not None and now - entry.stored_at <= max_age_s:
            self.get(key)
            return entry.answer
        return None

    def keep(self, workspace_id: str, fingerprint: bytes, answer: bytes, now: float, ttl_s: float) -> None:
        self.put((workspace_id, fingerprint), _Entry(answer, now, now + ttl_s))


class ResponseCacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[response_cache]`. Nothing is kept for a caller that did not opt in."""

    enabled: bool = True
    ttl_s: Positive = 300.0  # for keys that opted in, where no header says otherwise
    max_ttl_s: Positive = 86_400.0  # the longest that a header gets
    max_bytes: CountOrZero = 64 << 20
    max_entry_bytes: CountOrZero = 1 << 20
    shared: bool = False  # also in Redis, for all gateways, where there is a Redis
    shared_max_bytes: CountOrZero = 256 << 20  # in Redis


class IdempotencySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[idempotency]`."""

    enabled: bool = True
    ttl_s: Positive = 86_400.0
    abandoned_after_s: NotNegative = 60.0  # how long an answer runs on without any reader
    max_bytes: CountOrZero = 64 << 20
    max_entry_bytes: CountOrZero = 4 << 20
    max_workspace_bytes: CountOrZero = 1 << 30  # in the database; the oldest answers of a workspace go first


# These two endings would come again in a repetition; a deadline need not.
_REPEATABLE = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class RecordedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A whole answer. `usage` is what the original used; giving it again uses nothing."""

    id: str
    model: str
    num_choices: int
    usage: Usage
    batches: list[list[Delta]]
    warnings: tuple[RequestWarning, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RecordedAnswer)


def encode_answer(answer: AnswerStream, batches: list[list[Delta]]) -> bytes:
    return _encoder.encode(
        RecordedAnswer(
            answer.id, answer.model, answer.num_choices, answer.usage, batches, tuple(answer.warnings)
        )
    )


def decode_answer(data: bytes) -> RecordedAnswer:
    return _decoder.decode(data)


def is_repeatable(batches: Iterable[Sequence[Delta]]) -> bool:
    """Return whether every answer came to an end of its own."""
    return all(
        delta.finish_reason in _REPEATABLE
        for deltas in batches
        for delta in deltas
        if delta.finish_reason is not None
    )


class ReplayedAnswer(AccountedAnswer):
    """Gives every recorded batch at once when asked for the next. Settled as cached, with nothing used, before its
    reader sees the end; `usage` still tells what the original used."""

    cache_status: CacheStatus | None = "hit"

    def __init__(
        self,
        recorded: RecordedAnswer,
        account: Account,
        *,
        answer_id: str | None = None,
        cache_status: CacheStatus = "hit",
    ) -> None:
        super().__init__(account)
        self.cache_status = cache_status
        self._recorded = recorded
        self._id = answer_id or account.claim.request_id
        self._position = 0
        self._is_cancelled = False

    @property
    def id(self) -> str:
        return self._id

    @property
    def model(self) -> str:
        return self._recorded.model

    @property
    def num_choices(self) -> int:
        return self._recorded.num_choices

    @property
    def usage(self) -> Usage:
        return self._recorded.usage

    @property
    def warnings(self) -> tuple[RequestWarning, ...]:
        return self._recorded.warnings

    async def __anext__(self) -> list[Delta]:
        if self._is_cancelled:
            raise ReaderGone
        batches = self._recorded.batches
        if self._position >= len(batches):
            raise StopAsyncIteration
        self._position += 1
        if self._position == len(batches):
            self._settle_as("completed")
        return batches[self._position - 1]

    async def collect(self) -> list[Delta]:
        if self._is_cancelled:
            raise ReaderGone
        rest = self._recorded.batches[self._position :]
        self._position = len(self._recorded.batches)
        self._settle_as("completed")
        return await merged_later(rest)

    def cancel(self) -> None:
        if self._position < len(self._recorded.batches):
            self._is_cancelled = True
        self._settle_as("cancelled")  # nothing, once it is completed

    def _settle_as(self, status: Literal["completed", "cancelled"]) -> None:
        self.account.settle(Outcome(usage=NOTHING_USED, status=status, is_cached=True))


class RecordingAnswer(WrappedAnswer):
    """A live answer whose batches are kept while they pass, and handed on as a whole with the last one: its reader
    may look no further once every answer has ended."""

    cache_status: CacheStatus | None = "miss"

    def __init__(self, answer: AnswerStream, max_bytes: int, on_recorded: Callable[[bytes], None]) -> None:
        super().__init__(answer)
        self._max_bytes = max_bytes
        self._on_recorded = on_recorded
        self._batches: list[list[Delta]] | None = []  # None once it has grown too large, or was handed on
        self._num_bytes = 0
        self._num_open = answer.num_choices

    async def __anext__(self) -> list[Delta]:
        deltas = await anext(self._answer)
        self._keep(deltas)
        return deltas

    async def collect(self) -> list[Delta]:
        deltas = await self._answer.collect()
        self._keep(deltas)
        return deltas

    def _keep(self, deltas: list[Delta]) -> None:
        if self._batches is None:
            return
        # Characters are counted as bytes while the answer runs; the encoded answer is measured exactly.
        self._num_bytes += sum(_weight(delta) for delta in deltas)
        if self._num_bytes > self._max_bytes:
            self._batches = None
            return
        self._batches.append(deltas)
        self._num_open -= sum(delta.finish_reason is not None for delta in deltas)
        if not self._num_open:
            batches, self._batches = self._batches, None
            if is_repeatable(batches):
                self._on_recorded(encode_answer(self._answer, batches))


def _weight(delta: Delta) -> int:
    calls = sum(len(call.arguments) for call in delta.tool_calls)
    prompt = 0 if delta.prompt is None else delta.prompt.num_bytes
    ids = 4 * (len(delta.token_ids) + len(delta.prompt_token_ids))
    details = _DETAIL_BYTES * len(delta.details) + _LOGPROB_BYTES * delta.num_logprobs
    return _DELTA_BYTES + len(delta.text) + len(delta.reasoning) + calls + details + prompt + ids


logger = logging.getLogger(__name__)

# Called with the encoded answer, or with None if the answer is not to be repeated.
OnOver = Callable[[bytes | None], Awaitable[None]]


class SharedAnswer:
    """Follows `answer` to its end, with or without readers. `on_over` is awaited once, after all readers were
    told. An answer of more than about `max_bytes` is not encoded."""

    def __init__(
        self, answer: AnswerStream, abandoned_after_s: float, max_bytes: int, on_over: OnOver
    ) -> None:
        self.answer = answer
        self.batches: list[list[Delta]] = []
        self.error: PenstockError | ReaderGone | None = None
        self.is_over = False
        self._abandoned_after_s = abandoned_after_s
        self._on_over = on_over
        self._max_bytes = max_bytes
        self._num_bytes = self._num_logprobs = 0
        self._readers: set[SharedReader] = set()
        self._news = asyncio.Event()
        self._abandonment: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._follow())

    def reader(self, account: Account | None) -> SharedReader:
        """Add a reader. `account` is the reader's own; None for the first reader, on whose account the answer
        runs."""
        reader = SharedReader(self, account)
        self._readers.add(reader)
        if self._abandonment is not None:
            self._abandonment.cancel()
            self._abandonment = None
        return reader

    def leave(self, reader: SharedReader) -> None:
        self._readers.discard(reader)
        if not self._readers and not self.is_over and self._abandonment is None:
            loop = asyncio.get_running_loop()
            self._abandonment = loop.call_later(self._abandoned_after_s, self.answer.cancel)

    async def over(self) -> None:
        """Returns when the answer has ended and `on_over` is done."""
        await asyncio.wait([self._task])

    async def news(self) -> None:
        """Returns when there are more batches, or the end."""
        await self._news.wait()

    async def _follow(self) -> None:
        try:
            async for deltas in self.answer:
                self._count(deltas)
                self.batches.append(deltas)
                self._tell()
        except (PenstockError, ReaderGone) as error:
            self.error = copy.copy(error)  # without the frames that refer to this object
            self.answer.cancel()
        except Exception:
            logger.exception("request %s failed while it was followed", self.answer.id)
            self.error = PenstockError("The server met an error that it did not foresee.")
        finally:
            self.is_over = True
            self._tell()
            if self._abandonment is not None:
                self._abandonment.cancel()
        is_kept = self.error is None and bool(self.batches) and self._num_bytes <= self._max_bytes
        is_kept = is_kept and is_repeatable(self.batches)
        await self._on_over(encode_answer(self.answer, self.batches) if is_kept else None)

    def _count(self, deltas: Sequence[Delta]) -> None:
        """Count output, all of which is held until the end. Raises InvalidRequest if there is too much."""
        self._num_bytes += sum(map(_weight, deltas))
        self._num_logprobs += sum(delta.num_logprobs for delta in deltas)
        if self._num_logprobs > MAX_WHOLE_LOGPROBS:
            raise too_many_logprobs()

    def _tell(self) -> None:
        """Wake the readers that wait now. Later readers wait for the next part."""
        news, self._news = self._news, asyncio.Event()
        news.set()


class SharedReader(WrappedAnswer):
    """One reader of a shared answer. A later reader is settled as cached, because the engine did not work for it."""

    def __init__(self, shared: SharedAnswer, account: Account | None) -> None:
        super().__init__(shared.answer)
        self._shared = shared
        self._account = account
        self._position = 0
        self._has_left = False

    @property
    def cache_status(self) -> CacheStatus | None:
        return self._answer.cache_status if self._account is None else "hit"

    @property
    def rate_limits(self) -> RateLimits:
        return self._answer.rate_limits if self._account is None else self._account.rate_limits

    async def __anext__(self) -> list[Delta]:
        shared = self._shared
        while True:
            if self._has_left:
                raise ReaderGone
            if self._position < len(shared.batches):
                self._position += 1
                return shared.batches[self._position - 1]
            if shared.is_over:
                self._end()
                if shared.error is not None:
                    raise copy.copy(shared.error)  # see MeteredAnswer
                raise StopAsyncIteration
            await shared.news()

    async def collect(self) -> list[Delta]:
        start = self._position
        async for _ in self:
            pass
        return await merged_later(self._shared.batches[start:])

    def cancel(self) -> None:
        self._has_left = not (self._shared.is_over and self._position >= len(self._shared.batches))
        if self._account is not None:
            self._account.settle(Outcome(usage=NOTHING_USED, status="cancelled", is_cached=True))
        self._shared.leave(self)

    def _end(self) -> None:
        if self._account is None:
            return
        error = self._shared.error
        self._account.settle(
            Outcome(
                usage=NOTHING_USED,
                status="completed" if error is None else "failed",
                error_code=error.code if isinstance(error, PenstockError) else None,
                is_cached=True,
            )
        )
