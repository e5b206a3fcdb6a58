"""Answers a generation over HTTP, as one body or as server-sent events, and notices when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import IO, Any, Generic, Literal, Protocol, Self, TypeVar
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from penstock.api.http.context import answer_headers, state_of, watch_of
from penstock.api.http.errors import Headers, is_anthropic, limit_headers
from penstock.api.http.exchange import WHOLE_ANSWERS
from penstock.core.errors import NotFound, PenstockError
from penstock.core.identity import RateLimits
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import AnswerStream, ReaderGone, are_large
from penstock.gateway.blobs.blobs import Blobs
from penstock.gateway.prompts import Usage
from penstock.gateway.turns import in_thread

_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks nginx not to hold events back
)

FIRST_BYTES_S = 5.0  # how long a stream's status and headers wait for its first tokens
KEEP_ALIVE_S = 15.0
TURN_BYTES = 64 << 10  # of events, after which other streams have their turn
SSE_COMMENT = b": waiting\n\n"  # which readers of server-sent events skip


def json_response(shape: object) -> Response:
    return Response(msgspec.json.encode(shape), media_type="application/json")


def private_json(shape: object) -> Response:
    """Return an answer with secrets or names of tenants, which no proxy may cache."""
    return Response(
        msgspec.json.encode(shape), headers={"cache-control": "no-store"}, media_type="application/json"
    )


Item = TypeVar("Item")
Shape = TypeVar("Shape", bound=msgspec.Struct)


class IdList(msgspec.Struct, Generic[Item], kw_only=True):
    """A page of a list, with the ids at its ends."""

    data: Sequence[Item]
    first_id: str | int | None
    last_id: str | int | None
    has_more: bool

    @classmethod
    def of(
        cls, data: Sequence[Item], *, has_more: bool, ids: Sequence[str] | None = None, **more: Any
    ) -> Self:
        """Return the page. `ids` are those of the items, which otherwise have them as `id`."""
        found: Sequence[Any] = [getattr(each, "id", None) for each in data] if ids is None else ids
        first_id, last_id = (found[0], found[-1]) if found else (None, None)
        return cls(data=data, first_id=first_id, last_id=last_id, has_more=has_more, **more)


class ObjectList(IdList[Item], Generic[Item], kw_only=True):
    """Such a page in OpenAI's shape."""

    object: Literal["list"] = "list"


def shown_as(shape: type[Shape], record: msgspec.Struct, **more: Any) -> Shape:
    """Return a record in the shape that an API has for it: with its fields, and perhaps more."""
    return shape(**msgspec.structs.asdict(record), **more)


class Cancellable(Protocol):
    def cancel(self) -> object: ...


class DisconnectWatch:
    """Cancels the work for a client that disconnects: the work that was handed over, or before that the task of the
    request. The request body must have been read."""

    def __init__(self, request: Request) -> None:
        self._work: Cancellable | None = None
        self._task = asyncio.current_task()
        self._has_gone = False
        self._watching: asyncio.Task[None] | None = None
        self._watch_connection = watch_of(request.scope)
        if self._watch_connection is None:
            self._watching = asyncio.create_task(self._watch(request.receive))
        else:
            self._watch_connection(self._note)

    def hand_over(self, work: Cancellable) -> None:
        """Watch over `work` from now on. Work that began in spite of a departure is cancelled at once."""
        self._work = work
        if self._has_gone:
            work.cancel()

    def take_back(self) -> None:
        """Watch over the task of the request again. Raises ReaderGone if the client has gone."""
        self._work = None
        self.check()

    def check(self) -> None:
        """Raises ReaderGone if the client has gone, which a cancelled task of the request may mean."""
        if self._has_gone and self._task is not None:
            self._task.uncancel()
            raise ReaderGone

    def stop(self) -> None:
        """Watch no longer, and let go of the work: the work or the watching task may refer to this object, and only
        the garbage collector would free such a cycle."""
        self._work = None
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        elif self._watch_connection is not None:
            self._watch_connection(None)
            self._watch_connection = None

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._note()

    def _note(self) -> None:
        if self._has_gone:
            return
        self._has_gone = True
        if self._work is not None:
            self._work.cancel()
        elif self._task is not None:
            self._task.cancel()


Result = TypeVar("Result")


async def while_present(request: Request, work: Awaitable[Result]) -> Result:
    """Return the result of work for a client, whose request body was read. The work is cancelled when the client
    leaves: raises ReaderGone then."""
    departure = DisconnectWatch(request)
    try:
        return await work
    except asyncio.CancelledError:
        departure.check()
        raise
    finally:
        departure.stop()


AnswerT = TypeVar("AnswerT", bound=AnswerStream)


async def answer_whole(
    request: Request, submitted: Awaitable[AnswerT], build: Callable[[AnswerT, Sequence[Delta]], bytes]
) -> WholeAnswer:
    """Wait for the end of an answer that is being submitted, and build its body."""
    departure = DisconnectWatch(request)
    try:
        answer = await submitted
        try:
            departure.hand_over(answer)
            deltas = await answer.collect()
        except PenstockError as error:
            raise error.with_rate_limits(answer.rate_limits) from error
        finally:
            answer.cancel()
    except asyncio.CancelledError:
        departure.check()
        raise
    finally:
        departure.stop()
    body = await in_thread(build, answer, deltas) if are_large(deltas) else build(answer, deltas)
    return WholeAnswer(body, answer.rate_limits, more_headers=answer_headers(answer))


def _sent_limits(scope: Scope, rate_limits: RateLimits) -> Headers:
    state_of(scope).has_sent_limits = True
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
            *_sent_limits(scope, self._rate_limits),
            *self._more_headers,
        ]
        start: Message = {"type": "http.response.start", "status": 200, "headers": headers}
        if WHOLE_ANSWERS in (scope.get("extensions") or ()):
            start["body"] = self._body
            await send(start)
        else:
            await send(start)
            await send({"type": "http.response.body", "body": self._body})


class EventWriter(Protocol):
    """Turns what happens to an answer into complete server-sent events, in the shape of one API."""

    def opening(self, answer: AnswerStream) -> bytes:
        """Return the events before the first delta."""
        ...

    def chunk(self, delta: Delta) -> bytes: ...

    def closing(self, usage: Usage) -> bytes:
        """Return the events after the last delta of an answer that ended normally."""
        ...

    def failure(self, error: PenstockError) -> bytes:
        """Return the events that end an answer that failed after its start."""
        ...


class EventStream:
    """An ASGI response that writes encoded events straight to the server.

    `open` waits for the engine's first output, so that a request that is refused by then still gets its proper
    status. When that takes more than a few seconds from the parsed request on, the status and the headers are sent
    meanwhile, and an error comes as the stream's last event. `keep_alive` is sent with the headers of a stream that
    still waits, and whenever nothing else was for a while. A stream costs one timer.
    """

    stream_headers = _STREAM_HEADERS

    def __init__(self, request: Request, keep_alive: bytes) -> None:
        self._scope = request.scope
        self._send = request._send
        self._keep_alive = keep_alive
        self._departure = DisconnectWatch(request)
        self._answer: AnswerStream | None = None
        self._events: EventWriter | None = None
        self._first: Sequence[Delta] = ()
        self._closing: bytes | None = None  # of a stream that failed before its first delta
        self._has_started = False
        self._is_writing = False
        self._sign: asyncio.Task[None] | None = None  # sends the headers, if need be, and a sign of life
        self._loop = asyncio.get_running_loop()
        self._written_at = 0.0
        self._timer = self._loop.call_later(FIRST_BYTES_S, self._show_life)

    @classmethod
    async def open(
        cls,
        request: Request,
        submitted: Awaitable[AnswerT],
        events_of: Callable[[AnswerT], EventWriter],
        failure: Callable[[PenstockError], bytes],
        *,
        keep_alive: bytes = SSE_COMMENT,
    ) -> Self:
        """`failure` writes the end of a stream whose request is refused after its headers, before there is a writer
        of events."""
        stream = cls(request, keep_alive)
        try:
            answer = stream._answer = await submitted
            stream._departure.hand_over(answer)
            stream._first = await anext(answer)
            stream._events = events_of(answer)  # not before: another model may answer in the end
        except PenstockError as error:
            if stream._has_started:
                write = failure if stream._events is None else stream._events.failure
                stream._closing = write(error)
                return stream
            stream._stop()
            if stream._answer is None:
                raise
            raise error.with_rate_limits(stream._answer.rate_limits) from error
        except BaseException as error:
            stream._stop()
            if isinstance(error, asyncio.CancelledError):
                stream._departure.check()
            raise
        return stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._sign is not None:
                await self._sign
            elif not self._has_started:
                await self._start()
            closing = self._closing
            if closing is None:
                closing = await self._send_events()
            await self._write(closing, is_last=True)
        except ReaderGone:
            return
        finally:
            self._stop()

    async def _start(self) -> None:
        """Send the status and the headers, as far as they are known."""
        self._has_started = True
        headers = [*self.stream_headers]
        if self._answer is not None:
            headers += _sent_limits(self._scope, self._answer.rate_limits)
            headers += answer_headers(self._answer)
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_events(self) -> bytes:
        """Send everything but the last events of the stream, which leave together."""
        answer, events = self._answer, self._events
        assert answer is not None
        assert events is not None
        chunk = events.chunk
        num_open = answer.num_choices
        try:
            body = events.opening(answer)
            deltas: Sequence[Delta] = self._first
            while True:
                for delta in deltas:
                    body += chunk(delta)
                    if delta.finish_reason is not None:
                        num_open -= 1
                    if len(body) > TURN_BYTES:  # a slow reader of many answers has as many full buffers
                        await self._write(body)
                        body = b""
                        await asyncio.sleep(0)
                if body and num_open > 0:
                    await self._write(body)
                    body = b""
                deltas = await anext(answer)
        except StopAsyncIteration:
            return body + events.closing(answer.usage)
        except PenstockError as error:
            return body + events.failure(error)

    async def _write(self, body: bytes, *, is_last: bool = False) -> None:
        if is_last:
            self._timer.cancel()
        self._is_writing = True
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
        self._is_writing = False
        self._written_at = self._loop.time()

    def _show_life(self) -> None:
        idle_s = self._loop.time() - self._written_at
        # A reader that does not even take what was written needs no sign of life.
        if not self._has_started or (idle_s >= KEEP_ALIVE_S * 0.99 and not self._is_writing):
            self._sign = self._loop.create_task(self._send_sign())
            idle_s = 0.0
        self._timer = self._loop.call_later(max(KEEP_ALIVE_S - idle_s, KEEP_ALIVE_S * 0.05), self._show_life)

    async def _send_sign(self) -> None:
        if not self._has_started:
            await self._start()
        await self._write(self._keep_alive)

    def _stop(self) -> None:
        self._timer.cancel()
        self._departure.stop()
        if self._sign is not None:
            self._sign.cancel()
        if self._answer is not None:
            self._answer.cancel()


_PIECE_BYTES = 256 << 10  # of each reader, however slow


async def blob_response(
    blobs: Blobs,
    blob_id: str,
    *,
    missing: str,
    media_type: str,
    filename: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Raises NotFound with the sentence `missing`, and StoreUnavailable, before anything is sent. The blob may be
    deleted meanwhile: it is open by then. A store that fails later cuts the answer off, which clients see from its
    length."""
    all_headers = dict(headers or {})
    if filename is not None:  # by RFC 8187, which leaves no slashes: clients may save files by this name
        all_headers["content-disposition"] = f"attachment; filename*=utf-8''{quote(filename, safe='')}"

    def opened_blob() -> tuple[int, IO[bytes]]:
        return blobs.num_bytes(blob_id), blobs.open(blob_id)

    try:
        num_bytes, opened = await in_thread(opened_blob)
    except FileNotFoundError as error:
        raise NotFound(missing) from error
    all_headers["content-length"] = str(num_bytes)
    return StreamingResponse(_pieces(opened), headers=all_headers, media_type=media_type)


async def _pieces(opened: IO[bytes]) -> AsyncIterator[bytes]:
    with opened:
        while piece := await in_thread(opened.read, _PIECE_BYTES):
            yield piece
