"""Stored and background responses: submits a request, records what comes of it, and finds it again.

This module knows no wire format. A `ResponseBuilder` turns the deltas of an answer into a body in the shape of its
API. A `ResponseFormat` changes a stored body that this process did not build.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from penstock.core.errors import InvalidRequest, NotFound, PenstockError, StoreUnavailable, quoted
from penstock.core.identity import Principal
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import AnswerStream, ReaderGone, WrappedAnswer, off_loop_if_large
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import GenerationRequest, Usage
from penstock.gateway.responses.store import ResponseStore, StoredResponse

WRITTEN_EVERY_S = 1.0
KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": keep-alive\n\n"
_END = b"\n\n"


class EventLog:
    """The stream events of one response in the background, numbered from 0, which any number of readers follow.

    The log lives in the process that makes the response, and is written to the store now and then, for readers in
    other processes and later readers. It has one writer, which calls `add`, `write` and, once, `close`."""

    def __init__(self, store: ResponseStore, record: StoredResponse) -> None:
        self._store = store
        self._record = record
        self._events: list[bytes] = []
        self._num_written = 0
        self._written_at = time.monotonic()
        self._is_closed = False
        self._news = asyncio.Event()  # replaced at each event

    def add(self, events: bytes) -> None:
        if events:
            self._events += split_events(events)
            self._tell()

    async def write(self) -> None:
        """Write what is new to the store, unless the last time was a moment ago or the store is away."""
        if time.monotonic() - self._written_at < WRITTEN_EVERY_S:
            return
        with contextlib.suppress(StoreUnavailable):
            await self.write_rest()

    async def write_rest(self) -> None:
        """Write all that is new to the store. Raises StoreUnavailable."""
        self._written_at = time.monotonic()
        first, fresh = self._num_written, self._events[self._num_written :]
        if not fresh:
            return
        data = zlib.compress(b"".join(fresh), 1)
        await self._store.add_events(self._record.workspace_id, self._record.id, first, data)
        self._num_written += len(fresh)

    def close(self) -> None:
        self._is_closed = True
        self._tell()

    async def follow(self, first: int) -> AsyncIterator[bytes]:
        """Yield the events from the number `first` on, until the last one; comments while there are no new events."""
        while True:
            news = self._news
            if first < len(self._events):
                fresh, first = self._events[first:], len(self._events)
                yield b"".join(fresh)
            elif self._is_closed:
                return
            else:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        await news.wait()
                except TimeoutError:
                    yield KEEP_ALIVE

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def split_events(events: bytes) -> list[bytes]:
    return [event + _END for event in events.split(_END) if event]


def unpacked(chunks: Sequence[tuple[int, bytes]], first: int) -> list[bytes]:
    """Return the stored events from the number `first` on."""
    if not chunks:
        return []
    start = chunks[0][0]
    events = [event for _, data in chunks for event in split_events(zlib.decompress(data))]
    return events[max(0, first - start) :]


logger = logging.getLogger(__name__)

# A response in the background counts as lost when its gateway has not renewed its lease for so long.
LEASE_S = 30.0
RENEWAL_S = 2.0  # also how late a process learns that another one has cancelled or deleted a response
STORED_AGAIN_S = 0.5  # between two attempts to store an outcome while the store is away
FOLLOWED_EVERY_S = 0.5  # by readers in processes that do not make the response


class ResponseBuilder(Protocol):
    """One response as it grows."""

    @property
    def response_id(self) -> str: ...

    def opening(self, answer: AnswerStream) -> bytes:
        """Return the stream events before the first delta."""
        ...

    def chunk(self, delta: Delta) -> bytes: ...

    def ending(self) -> bytes:
        """Return the last stream event, after `finish` or `fail`."""
        ...

    def finish(self, usage: Usage) -> None:
        """Call it after the last delta."""
        ...

    def fail(self, error: PenstockError) -> None: ...

    def to_json(self, model: str) -> bytes:
        """Return the body so far. `model` is the model that answers, which may be known only at the end."""
        ...


class ResponseFormat(Protocol):
    def failed(self, body: bytes) -> bytes:
        """Return the body of a response whose gateway has gone."""
        ...

    def cancelled(self, body: bytes) -> bytes | None:
        """Return the body of a cancelled response; None if it does not run in the background."""
        ...

    def ending(self, body: bytes, last_event: bytes, number: int) -> bytes:
        """Return the stream event that ends a response whose gateway has gone; empty when `last_event` did so."""
        ...


class BuiltAnswer(WrappedAnswer):
    """An answer whose end is passed to `on_end` before its reader sees the end, so that a client that has read a
    response to its end can look it up."""

    def __init__(
        self, answer: AnswerStream, builder: ResponseBuilder, on_end: Callable[[bytes], Awaitable[object]]
    ) -> None:
        super().__init__(answer)
        self._builder = builder
        self._on_end = on_end

    async def __anext__(self) -> list[Delta]:
        """The reader passes each delta to the builder before it asks for the next."""
        try:
            return await anext(self._answer)
        except StopAsyncIteration:
            await self._finish()
            raise
        except PenstockError as error:
            await self._fail(error)
            raise

    async def collect(self) -> list[Delta]:
        try:
            deltas = await self._answer.collect()
        except PenstockError as error:
            await self._fail(error)
            raise
        await off_loop_if_large(deltas, lambda: list(map(self._builder.chunk, deltas)))
        await self._finish()
        return deltas

    async def _finish(self) -> None:
        self._builder.finish(self._answer.usage)
        await self._on_end(self._builder.to_json(self._answer.model))

    async def _fail(self, error: PenstockError) -> None:
        self._builder.fail(error)
        await self._on_end(self._builder.to_json(self._answer.model))


class Responses:
    """One per application. Owns the responses that run in the background."""

    def __init__(self, gateway: Gateway, store: ResponseStore, wire: ResponseFormat) -> None:
        self.gateway = gateway
        self._store = store
        self._wire = wire
        self.ttl_s = gateway.config.stored_response_days * 24 * 3600
        self._running: dict[str, tuple[AnswerStream, asyncio.Task[None]]] = {}
        self._logs: dict[str, EventLog] = {}  # of those that run and are streamed
        self._renewing: asyncio.Task[None] | None = None

    async def submit(
        self,
        request: GenerationRequest,
        build: Callable[[AnswerStream], ResponseBuilder],
        *,
        input_items: bytes,
        previous_id: str | None,
        is_stored: bool,
        in_background: bool = False,
        is_streamed: bool = False,
        on_end: Callable[[], Awaitable[None]] | None = None,
    ) -> BuiltAnswer:
        """`input_items` is what the client sent, as JSON. In the background the answer needs no reader, and `follow`
        gives the events of one that `is_streamed`. `on_end` is called after the response has been stored."""
        answer = await self.gateway.submit(request)
        builder = build(answer)
        record = StoredResponse(
            id=builder.response_id,
            workspace_id=request.principal.workspace_id,
            created_at=time.time(),
            expires_at=time.time() + self.ttl_s,
            is_final=False,
            body=b"",
            input_items=input_items,
            previous_id=previous_id,
            num_event_bytes=0 if in_background and is_streamed else None,
        )
        log = EventLog(self._store, record) if in_background and is_streamed else None

        async def store(body: bytes) -> None:
            if not in_background:
                if is_stored:
                    await self._store.add(_final(record, body))
                if on_end is not None:
                    await on_end()
                return
            if log is not None:
                log.add(builder.ending())
                await _until_stored(log.write_rest)
            await _until_stored(lambda: self._store.replace(_final(record, body)))
            if on_end is not None:
                await _until_stored(on_end)

        built = BuiltAnswer(answer, builder, store)
        if in_background:
            await self._start_in_background(built, builder, record, log)
        return built

    def follow(self, found: StoredResponse, first: int) -> AsyncIterator[bytes]:
        """Return the stream events of a response in the background, from the number `first` on, until its end."""
        log = self._logs.get(found.id)
        return log.follow(first) if log is not None else self._follow_stored(found, first)

    async def _follow_stored(self, found: StoredResponse, first: int) -> AsyncIterator[bytes]:
        """For a response that another process makes, or that has ended."""
        waited_s = 0.0
        while True:
            chunks = await self._store.events(found.workspace_id, found.id, first)
            events = unpacked(chunks, first)
            if events:
                first += len(events)
                waited_s = 0.0
                yield b"".join(events)
            if found.is_final:
                last = unpacked(chunks, 0)[-1:]
                yield self._wire.ending(found.body, last[0] if last else b"", first)
                return
            await asyncio.sleep(FOLLOWED_EVERY_S)
            waited_s += FOLLOWED_EVERY_S
            if waited_s >= KEEP_ALIVE_S:
                waited_s = 0.0
                yield KEEP_ALIVE
            known = await self._store.find(found.workspace_id, found.id)
            if known is None:
                return
            found = await self._settled(known)

    async def find(self, principal: Principal, response_id: str) -> StoredResponse:
        """Raises NotFound. A response whose gateway has gone is marked as failed."""
        found = await self._store.find(principal.workspace_id, response_id)
        if found is None:
            raise _not_found(response_id)
        return await self._settled(found)

    async def _settled(self, found: StoredResponse) -> StoredResponse:
        # A response that runs here is not lost, even if an outage of the store has outlasted the lease.
        if found.is_final or found.id in self._running or not found.is_lost(await self._store.time()):
            return found
        failed = _final(found, self._wire.failed(found.body))
        if await self._store.replace(failed):
            return failed
        known = await self._store.find(found.workspace_id, found.id)
        if known is None:
            raise _not_found(found.id)
        return known

    async def history(self, principal: Principal, response_id: str) -> list[StoredResponse]:
        """Return a response and all that it continues, oldest first. The whole conversation is stored for longer by
        this."""
        history = await self._store.history(
            principal.workspace_id, response_id, keep_until=time.time() + self.ttl_s
        )
        if history is None:
            raise _not_found(response_id, param="previous_response_id")
        last = history[-1] if history[-1].is_final else await self.find(principal, response_id)
        if not last.is_final:
            raise InvalidRequest(
                "The previous response is still running in the background.", param="previous_response_id"
            )
        return [*history[:-1], last]

    async def delete(self, principal: Principal, response_id: str) -> None:
        if not await self._store.delete(principal.workspace_id, response_id):
            raise _not_found(response_id)
        self._stop(response_id)

    async def cancel(self, principal: Principal, response_id: str) -> bytes:
        """Return the body of the response, which by then is final. A response that ended before is left as it is."""
        found = await self.find(principal, response_id)
        body = self._wire.cancelled(found.body)
        if body is None:
            raise InvalidRequest("Only a response in the background can be cancelled.", param="response_id")
        if not found.is_final and await self._store.replace(_final(found, body)):
            self._stop(response_id)
        return (await self.find(principal, response_id)).body

    async def _start_in_background(
        self, built: BuiltAnswer, builder: ResponseBuilder, record: StoredResponse, log: EventLog | None
    ) -> None:
        body = builder.to_json(built.model)
        try:
            lease_until = await self._store.time() + LEASE_S
            await self._store.add(msgspec.structs.replace(record, body=body, lease_until=lease_until))
        except BaseException:
            built.cancel()  # no client could ever ask for it
            raise
        if log is not None:
            self._logs[record.id] = log
            log.add(builder.opening(built))
        task = asyncio.create_task(self._run(built, builder, record.id, log))
        self._running[record.id] = (built, task)
        task.add_done_callback(lambda _: self._forget(record.id))
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())

    def _forget(self, response_id: str) -> None:
        self._running.pop(response_id, None)
        if (log := self._logs.pop(response_id, None)) is not None:
            log.close()

    async def _renew(self) -> None:
        """Renew leases as long as anything runs in the background, and stop the responses that have been cancelled or
        deleted through another process."""
        while self._running:
            await asyncio.sleep(RENEWAL_S)
            with contextlib.suppress(StoreUnavailable):
                lease_until = await self._store.time() + LEASE_S
                if running := frozenset(self._running):
                    for response_id in running - await self._store.renew(running, lease_until):
                        self._stop(response_id)

    async def _run(
        self, built: BuiltAnswer, builder: ResponseBuilder, response_id: str, log: EventLog | None
    ) -> None:
        try:
            if log is None:
                await built.collect()
                return
            async for deltas in built:
                for delta in deltas:
                    log.add(builder.chunk(delta))
                await log.write()
        except (PenstockError, ReaderGone):
            return  # the response is recorded already, or its client cancelled it
        except Exception:
            logger.exception("the response %s could not be finished", response_id)

    def _stop(self, response_id: str) -> None:
        running = self._running.get(response_id)
        if running is not None:
            running[0].cancel()


async def _until_stored(work: Callable[[], Awaitable[object]]) -> None:
    """Try until the store takes the outcome of a background response: no client waits that could ask again, and the
    answer is paid for. There are never more of these than responses that ran when the store went away."""
    while True:
        try:
            await work()
            return
        except StoreUnavailable:
            await asyncio.sleep(STORED_AGAIN_S)


def _final(record: StoredResponse, body: bytes) -> StoredResponse:
    return msgspec.structs.replace(record, is_final=True, body=body, lease_until=None)


def _not_found(response_id: str, param: str | None = None) -> NotFound:
    return NotFound(f"There is no response with the id {quoted(response_id)}.", param=param)
