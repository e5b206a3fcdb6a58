"""The routes of an API: each one says where it is, what it reads and what it answers.

The server routes requests by them, and the OpenAPI document is made from them.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.api.http.parsing import BodyDecoder

JSON = "application/json"
EVENT_STREAM = "text/event-stream"
JSON_LINES = "application/x-ndjson"
PAGE = ("limit", "after")  # the query of a list that is read page by page

Handler = Callable[..., Awaitable[ASGIApp]]


class Operation(Route):
    """One method of one path. A handler takes the request, and the body that the operation `reads`, decoded."""

    def __init__(
        self,
        method_and_path: str,
        handler: Handler,
        response: type[msgspec.Struct] | None = None,  # None: any JSON
        *,
        reads: BodyDecoder[Any] | type[msgspec.Struct] | None = None,
        default: bytes = b"",  # stands for an empty body
        request: type[msgspec.Struct]
        | None = None,  # of a body that the handler itself reads; None: any JSON
        query: tuple[str, ...] = (),
        streams: bool = False,  # can also answer with a stream
        stream_type: str = EVENT_STREAM,
        takes_body: bool = True,  # of a method that could
        form: Mapping[str, Any] | None = None,  # fields of a multipart form, in place of a JSON body
        content_type: str = JSON,  # of the answer
    ) -> None:
        self.request = request
        if reads is not None:
            decoder = reads if isinstance(reads, BodyDecoder) else BodyDecoder(reads)
            self.request = decoder.shape
            handler = _with_body(handler, decoder, default)
        method, _, path = method_and_path.partition(" ")
        super().__init__(path, handler, methods=[method])
        self.method = method
        self.response = response
        self.query = query
        self.streams = streams
        self.stream_type = stream_type
        self.takes_body = takes_body
        self.form = form
        self.content_type = content_type


def _with_body(handler: Handler, decoder: BodyDecoder[Any], default: bytes) -> Handler:
    @functools.wraps(handler)
    async def read_and_handle(request: Request) -> ASGIApp:
        return await handler(request, await decoder.read(request, default=default))

    return read_and_handle
