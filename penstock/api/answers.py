"""Answers a generation over HTTP, as one body or as server-sent events, and notices when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.api.errors import error_body
from penstock.api.openai_responses import ChunkWriter
from penstock.core.errors import PenstockError
from penstock.gateway.choice import Delta
from penstock.gateway.prompts import Usage
from penstock.gateway.stream import AnswerStream, ReaderGone

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks nginx not to hold events back
]


class DisconnectWatch:
    """Cancels a generation as soon as its client has gone. The request body must have been read."""

    def __init__(self, receive: Receive, generation: AnswerStream) -> None:
        self._task = asyncio.create_task(self._watch(receive, generation))

    async def _watch(self, receive: Receive, generation: AnswerStream) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.cancel()

    def stop(self) -> None:
        self._task.cancel()


async def answer_whole(
    generation: AnswerStream, receive: Receive, build: Callable[[Sequence[Delta], Usage], bytes]
) -> Response:
    watch = DisconnectWatch(receive, generation)
    try:
        deltas = await generation.collect()
    finally:
        watch.stop()
        generation.cancel()
    return Response(build(deltas, generation.usage), media_type="application/json")


class EventStream:
    """An ASGI response that writes encoded chunks straight to the server.

    `open` waits for the engine's first word, so that a request refused by then still gets its proper status.
    """

    def __init__(
        self,
        generation: AnswerStream,
        chunks: ChunkWriter,
        watch: DisconnectWatch,
        first_deltas: Sequence[Delta],
        *,
        includes_usage: bool,
    ) -> None:
        self._generation = generation
        self._chunks = chunks
        self._watch = watch
        self._first_deltas = first_deltas
        self._includes_usage = includes_usage

    @classmethod
    async def open(
        cls, generation: AnswerStream, receive: Receive, chunks: ChunkWriter, *, includes_usage: bool
    ) -> EventStream:
        watch = DisconnectWatch(receive, generation)
        try:
            first_deltas = await anext(generation)
        except BaseException:
            watch.stop()
            generation.cancel()
            raise
        return cls(generation, chunks, watch, first_deltas, includes_usage=includes_usage)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            await self._send_events(send)
        except ReaderGone:
            return
        finally:
            self._watch.stop()
            self._generation.cancel()

    async def _send_events(self, send: Send) -> None:
        chunk = self._chunks.chunk
        opening = self._chunks.opening(self._generation.num_choices)
        body = opening + b"".join(map(chunk, self._first_deltas))
        await send({"type": "http.response.body", "body": body, "more_body": True})
        try:
            async for deltas in self._generation:
                body = chunk(deltas[0]) if len(deltas) == 1 else b"".join(map(chunk, deltas))
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        except PenstockError as error:
            closing = b"data: " + error_body(error) + b"\n\n"
        else:
            usage = self._chunks.usage(self._generation.usage) if self._includes_usage else b""
            closing = usage + b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": closing, "more_body": False})
