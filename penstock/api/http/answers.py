"""Answers a generation over HTTP, as one body or as server-sent events, and notices when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.types import Receive, Scope, Send

from penstock.api.http.context import answer_headers, note_limits_told
from penstock.api.http.errors import is_anthropic
from penstock.api.http.limit_headers import Headers, limit_headers
from penstock.core.errors import PenstockError
from penstock.core.identity import RateLimits
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import AnswerStream, ReaderGone
from penstock.gateway.prompts import Usage

_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks nginx not to hold events back
)

FIRST_BYTES_S = 5.0  # how long a stream's status and headers wait for its first tokens
KEEP_ALIVE_S = 15.0
SSE_COMMENT = b": waiting\n\n"  # which readers of server-sent events skip
UNWATCHED_S = 0.02  # a watch costs more than what a client that leaves within this time could save


class DisconnectWatch:
    """Cancels a generation soon after its client has gone. The request body must have been read."""

    def __init__(self, receive: Receive, generation: AnswerStream) -> None:
        self._task: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(UNWATCHED_S, self._start, receive, generation)

    def _start(self, receive: Receive, generation: AnswerStream) -> None:
        self._task = asyncio.create_task(self._watch(receive, generation))

    async def _watch(self, receive: Receive, generation: AnswerStream) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.cancel()

    def stop(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()


async def answer_whole(
    generation: AnswerStream, receive: Receive, build: Callable[[Sequence[Delta], Usage], bytes]
) -> WholeAnswer:
    watch = DisconnectWatch(receive, generation)
    try:
        deltas = await generation.collect()
    except PenstockError as error:
        raise error.with_rate_limits(generation.rate_limits) from error
    finally:
        watch.stop()
        generation.cancel()
    return WholeAnswer(
        build(deltas, generation.usage), generation.rate_limits, more_headers=answer_headers(generation)
    )


def _limits_told(scope: Scope, rate_limits: RateLimits) -> Headers:
    note_limits_told(scope)
    return limit_headers(rate_limits, is_anthropic=is_anthropic(scope))


class WholeAnswer:
    """An ASGI response: a JSON body with the rate-limit headers of the API that was called."""

    def __init__(
        self, body: bytes, rate_limits: RateLimits, *, more_headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        self._body = body
        self._rate_limits = rate_limits
        self._more_headers = more_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-length", b"%d" % len(self._body)),
            (b"content-type", b"application/json"),
            *_limits_told(scope, self._rate_limits),
            *self._more_headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._body})


class EventWriter(Protocol):
    """Turns what happens to an answer into complete server-sent events, in the shape of one API."""

    def opening(self, answer: AnswerStream) -> bytes:
        """What comes before the first delta."""
        ...

    def chunk(self, delta: Delta) -> bytes: ...

    def closing(self, usage: Usage) -> bytes:
        """What comes after the last delta of an answer that came to its own end."""
        ...

    def failure(self, error: PenstockError) -> bytes:
        """What ends an answer that failed after it had begun."""
        ...


class EventStream:
    """An ASGI response that writes encoded events straight to the server.

    `open` waits a few seconds for the engine's first word, so that a request refused by then still gets its proper
    status. After that the status and the headers are sent, and an error comes as the stream's last event.
    `keep_alive` is sent with the headers of a stream that still waits, and whenever nothing else was for a while.
    """

    stream_headers = _STREAM_HEADERS

    def __init__(
        self,
        generation: AnswerStream,
        events: EventWriter,
        watch: DisconnectWatch,
        first: asyncio.Task[list[Delta]],
        keep_alive: bytes,
    ) -> None:
        self._generation = generation
        self._events = events
        self._watch = watch
        self._first = first
        self._keep_alive = keep_alive

    @classmethod
    async def open(
        cls,
        generation: AnswerStream,
        receive: Receive,
        events: EventWriter,
        *,
        keep_alive: bytes = SSE_COMMENT,
    ) -> EventStream:
        watch = DisconnectWatch(receive, generation)
        first = asyncio.create_task(_first_deltas(generation))
        first.add_done_callback(_note_error)
        try:
            await asyncio.wait({first}, timeout=FIRST_BYTES_S)
            if first.done():
                first.result()
        except BaseException as error:
            watch.stop()
            first.cancel()
            generation.cancel()
            if isinstance(error, PenstockError):
                raise error.with_rate_limits(generation.rate_limits) from error
            raise
        return cls(generation, events, watch, first, keep_alive)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = _KeptAlive(send, self._keep_alive)
        try:
            limits = _limits_told(scope, self._generation.rate_limits)
            headers = [*self.stream_headers, *limits, *answer_headers(self._generation)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if not self._first.done():
                await writer.write(self._keep_alive)
            await self._send_events(writer)
        except ReaderGone:
            return
        finally:
            writer.stop()
            self._watch.stop()
            self._first.cancel()
            self._generation.cancel()

    async def _send_events(self, writer: _KeptAlive) -> None:
        chunk = self._events.chunk
        try:
            first_deltas = await self._first
            opening = self._events.opening(self._generation)
            await writer.write(opening + b"".join(map(chunk, first_deltas)))
            async for deltas in self._generation:
                body = chunk(deltas[0]) if len(deltas) == 1 else b"".join(map(chunk, deltas))
                if body:
                    await writer.write(body)
        except PenstockError as error:
            closing = self._events.failure(error)
        else:
            closing = self._events.closing(self._generation.usage)
        await writer.write(closing, is_last=True)


async def _first_deltas(generation: AnswerStream) -> list[Delta]:
    return await anext(generation)


def _note_error(first: asyncio.Task[list[Delta]]) -> None:
    """Keeps asyncio from reporting an error that no reader is left for."""
    if not first.cancelled():
        first.exception()


class _KeptAlive:
    """Writes the body of an answer, and `keep_alive` whenever nothing was written for a while. A stream that waits
    costs one timer."""

    def __init__(self, send: Send, keep_alive: bytes) -> None:
        self._send = send
        self._keep_alive = keep_alive
        self._loop = asyncio.get_running_loop()
        self._is_writing = False
        self._written_at = self._loop.time()
        self._task: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._fire)

    async def write(self, body: bytes, *, is_last: bool = False) -> None:
        if is_last:
            self.stop()
        self._is_writing = True
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
        self._is_writing = False
        self._written_at = self._loop.time()

    def stop(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _fire(self) -> None:
        idle_s = self._loop.time() - self._written_at
        # A reader that does not even take what was written needs no sign of life.
        if idle_s >= KEEP_ALIVE_S * 0.99 and not self._is_writing:
            self._task = self._loop.create_task(self.write(self._keep_alive))
            idle_s = 0.0
        self._timer = self._loop.call_later(max(KEEP_ALIVE_S - idle_s, KEEP_ALIVE_S * 0.05), self._fire)
