"""One running answer with several readers, each at its own position. The answer runs on for a while without readers.

A task of its own follows the live answer and keeps its batches. Knows nothing of keys or of storage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from penstock.core.errors import PenstockError
from penstock.gateway.accounts import NOTHING_USED, Account, Outcome, RateLimits
from penstock.gateway.answers.choice import Delta, merged
from penstock.gateway.answers.stream import AnswerStream, CacheStatus, ReaderGone, WrappedAnswer
from penstock.gateway.reuse.replay import encode_answer, is_repeatable

logger = logging.getLogger(__name__)

# Called with the encoded answer, or with None if the answer is not to be repeated.
OnOver = Callable[[bytes | None], Awaitable[None]]


class SharedAnswer:
    """Follows `answer` to its end, with or without readers. `on_over` is awaited once, after all readers were
    told."""

    def __init__(self, answer: AnswerStream, abandoned_after_s: float, on_over: OnOver) -> None:
        self.answer = answer
        self.batches: list[list[Delta]] = []
        self.error: PenstockError | ReaderGone | None = None
        self.is_over = False
        self._abandoned_after_s = abandoned_after_s
        self._on_over = on_over
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
                self.batches.append(deltas)
                self._tell()
        except (PenstockError, ReaderGone) as error:
            self.error = error
        except Exception:
            logger.exception("request %s failed while it was followed", self.answer.id)
            self.error = PenstockError("The server met an error that it did not foresee.")
        finally:
            self.is_over = True
            self._tell()
            if self._abandonment is not None:
                self._abandonment.cancel()
        is_whole = self.error is None and bool(self.batches) and is_repeatable(self.batches)
        await self._on_over(encode_answer(self.answer, self.batches) if is_whole else None)

    def _tell(self) -> None:
        """Wake the readers that wait now. Later readers wait for the next news."""
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
                    raise shared.error
                raise StopAsyncIteration
            await shared.news()

    async def collect(self) -> list[Delta]:
        start = self._position
        async for _ in self:
            pass
        return merged(self._shared.batches[start:])

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
