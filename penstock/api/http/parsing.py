"""Reads and checks what a request carries: bodies within a byte limit, decoded strictly, and query parameters."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import re
import zlib
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.types import Scope

from penstock.api.http.bodies import PendingBodies
from penstock.api.http.context import headers_of, state_of
from penstock.api.http.exchange import WHOLE_BODY
from penstock.core.errors import InvalidRequest, RequestTimeout, RequestTooLarge, UnsupportedMediaType, quoted
from penstock.gateway.answers.stream import ReaderGone
from penstock.gateway.turns import WorkspaceTurns, in_thread

Shape = TypeVar("Shape", bound=msgspec.Struct)
Decoded = TypeVar("Decoded")

_FIELD_IN_MESSAGE = re.compile(r" - at (?:`key` in )?`\$\.([A-Za-z0-9_]+)")
_SIMILAR_ENOUGH = 0.85
# Bound on bodies from inside the server, such as lines of batches, which are bounded already.
MAX_INNER_BYTES = 1 << 30
MAX_BODY_S = 300  # for a body that is kept in memory until it is whole
MAX_UNKNOWN_FIELDS = 256  # each is compared with the known ones on the event loop
MAX_NEUTRAL_BYTES = 64 << 10  # of an unknown field's value that asks for nothing
MAX_UNKNOWN_BYTES = 64 << 10  # of a body of a request that needs no key
NOBODY = ""  # in place of the workspace of such a request
MAX_MESSAGE_PARTS = 20_000  # each is read on the event loop
# A body is decoded on the event loop, and each value costs time there. Numbers cost least: prompts may be token ids.
MAX_TEXTS = 200_000  # names of fields included
MAX_CONTAINERS = 100_000  # objects and arrays
MAX_VALUES = 2_000_000
UNCOUNTED_BYTES = 256 << 10  # no body of this size has too many values
DIRECT_JOIN_BYTES = 1 << 20
SLICE_BYTES = 256 << 10  # that are counted in one turn
_NO_MARKS = bytes(set(range(256)) - set(b'{[,"'))


async def read_body(request: Request, max_bytes: int) -> bytes:
    headers = headers_of(request)
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    whole: bytes | None = request.scope.pop(WHOLE_BODY, None)
    first, has_more = await _next_part(request) if whole is None else (whole, False)
    if len(first) > max_bytes:
        raise _too_large(max_bytes)
    body = first if not has_more else await _rest_of_body(request, first, max_bytes)
    encoded = headers.get(b"content-encoding")
    encoding = "identity" if encoded is None else encoded.decode("latin-1").strip().lower()
    if encoding == "identity":
        return body
    check_encoding(encoding)
    whole = await in_thread(_inflated, body, max_bytes)  # a small body may become a large one
    if len(whole) > max_bytes:
        raise _too_large(max_bytes)
    return whole


async def _next_part(request: Request) -> tuple[bytes, bool]:
    """Return the next part of a body, and whether there are more."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ReaderGone
    return message.get("body", b""), message.get("more_body", False)


async def _rest_of_body(request: Request, first: bytes, max_bytes: int) -> bytes:
    """Read the body that begins with `first`. Its parts count as pending until they are joined."""
    app: Any = request.scope.get("app")
    pending: PendingBodies = app.pending_bodies if app is not None else PendingBodies(max_bytes, max_bytes)
    workspace_id = _holder_of(request)
    parts: list[bytes] = []
    num_bytes = 0
    part, has_more = first, True
    try:
        async with asyncio.timeout(MAX_BODY_S):
            while True:
                if num_bytes + len(part) > max_bytes:
                    raise _too_large(max_bytes)
                pending.add(workspace_id, len(part))
                num_bytes += len(part)
                parts.append(part)
                if not has_more:
                    return await joined(parts, num_bytes)
                part, has_more = await _next_part(request)
    except TimeoutError as error:
        raise RequestTimeout(f"The request's body did not arrive within {MAX_BODY_S} seconds.") from error
    finally:
        pending.remove(workspace_id, num_bytes)


def read_within_bound(request: Request) -> Coroutine[Any, Any, bytes]:
    """Read the body of a request, within the bound of the application."""
    app = request.scope.get("app")
    if app is None:
        return read_body(request, MAX_INNER_BYTES)
    return read_body(request, app.max_body_bytes if state_of(request.scope).principal else MAX_UNKNOWN_BYTES)


def _holder_of(connection: HTTPConnection) -> str:
    """Return the workspace whose share of pending bodies a body takes."""
    principal = state_of(connection.scope).principal
    return NOBODY if principal is None else principal.workspace_id


@contextlib.contextmanager
def _pending(connection: HTTPConnection, num_bytes: int) -> Iterator[None]:
    """Count a body that waits for its turn like one that arrives: a small body may have been inflated to a large
    one. Raises RateLimited or Overloaded if the bodies are too many."""
    app = connection.scope.get("app")
    if app is None:
        yield
        return
    workspace_id = _holder_of(connection)
    app.pending_bodies.add(workspace_id, num_bytes)
    try:
        yield
    finally:
        app.pending_bodies.remove(workspace_id, num_bytes)


_KEPT = "penstock.kept_body"


def _keep_body(connection: HTTPConnection, num_bytes: int) -> None:
    """Count a large body until its request ends. Raises RateLimited. WebSockets count their messages."""
    app = connection.scope.get("app")
    if app is not None and connection.scope["type"] == "http":
        holder = _holder_of(connection)
        app.pending_bodies.keep(holder, num_bytes)
        connection.scope[_KEPT] = holder, num_bytes


def release_body(scope: Scope) -> None:
    """A request has ended."""
    holder, num_bytes = scope.pop(_KEPT, ("", 0))
    if num_bytes:
        scope["app"].pending_bodies.kept.add(holder, -num_bytes)


async def _in_turn(connection: HTTPConnection, work: Callable[[], Decoded]) -> Decoded:
    """Do work on a large body while no other large body is worked on, and workspaces take turns."""
    app = connection.scope.get("app")
    if app is None:  # a line of a batch
        await asyncio.sleep(0)
        return work()
    turns: WorkspaceTurns = app.body_turns
    return await turns.run(_holder_of(connection), work)


async def joined(parts: Sequence[bytes], num_bytes: int) -> bytes:
    """Join parts, of which there may be many megabytes: those are joined without the lock of the interpreter."""
    if num_bytes <= DIRECT_JOIN_BYTES:
        return b"".join(parts)
    return await in_thread(b"".join, parts)


def _too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"The request body is larger than the {max_bytes} bytes that this server takes.")


def check_encoding(encoding: str, known: Sequence[str] = ("gzip", "x-gzip", "deflate")) -> None:
    if encoding not in known:
        raise UnsupportedMediaType(
            f"A body with content-encoding {encoding[:40]!r} is not taken here.",
            hint=f"Known: {', '.join(known)}.",
        )


def _inflated(body: bytes, max_bytes: int) -> bytes:
    """At most one byte more than `max_bytes`, however much there would be."""
    inflate = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip or zlib, by the first bytes
    try:
        whole = inflate.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(f"The compressed body cannot be read: {error}.") from error
    if len(whole) <= max_bytes and (not inflate.eof or inflate.unused_data):
        raise InvalidRequest("The compressed body is cut off, or goes on behind its end.")
    return whole


def check_num_values(body: bytes, factor: int = 1) -> None:
    """Refuse a body of JSON with more values than can be decoded without keeping other requests waiting. `factor`
    raises the bounds for shapes that leave most of a body undecoded."""
    for _ in _counting(body, factor):
        pass


async def check_num_values_in_turns(body: bytes, factor: int = 1) -> None:
    """`check_num_values`, for a body whose counting alone would keep other requests waiting."""
    for _ in _counting(body, factor):
        await asyncio.sleep(0)


def _counting(body: bytes, factor: int) -> Iterator[None]:
    """Count the values of a body, with a pause after each slice."""
    if len(body) <= UNCOUNTED_BYTES:
        return
    if (yield from _has_few_marks(body, factor)):
        return  # however many of these characters stand inside texts
    if not (yield from _has_few_values(body, factor)):
        raise InvalidRequest(
            f"The request body has too many values: at most {MAX_TEXTS * factor} texts, {MAX_CONTAINERS * factor} "
            f"objects and arrays, and {MAX_VALUES * factor} values in all are taken."
        )


def _has_few_marks(body: bytes, factor: int) -> Generator[None, None, bool]:
    num_quotes = num_containers = num_commas = 0
    for start in range(0, len(body), SLICE_BYTES):
        marks = body[start : start + SLICE_BYTES].translate(None, _NO_MARKS)
        num_quotes += marks.count(b'"')
        num_containers += marks.count(b"{") + marks.count(b"[")
        num_commas += marks.count(b",")
        if not _are_few(num_quotes, num_containers, num_commas, factor):
            return False
        yield
    return True


def _has_few_values(body: bytes, factor: int) -> Generator[None, None, bool]:
    """Count outside of texts. Stops as soon as there are too many."""
    num_quotes = num_containers = num_commas = start = 0
    while start < len(body):
        part = body[start : start + SLICE_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # what the last one escapes belongs to it
            part = body[start : start + SLICE_BYTES + 1]
        start += len(part)
        plain = part.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote now begins or ends a text
        pieces = plain.split(b'"')
        outside = b"".join(pieces[num_quotes % 2 :: 2])
        num_quotes += len(pieces) - 1
        num_containers += outside.count(b"{") + outside.count(b"[")
        num_commas += outside.count(b",")
        if not _are_few(num_quotes, num_containers, num_commas, factor):
            return False
        yield
    return True


def _are_few(num_quotes: int, num_containers: int, num_commas: int, factor: int) -> bool:
    return (
        num_quotes <= 2 * MAX_TEXTS * factor
        and num_containers <= MAX_CONTAINERS * factor
        and num_commas <= MAX_VALUES * factor
    )


_FIELD_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


def check_num_parts(messages: Sequence[object], param: str) -> None:
    """Refuse more messages, parts of messages and tool calls than can be read without keeping other streams
    waiting."""
    num_parts = len(messages)
    if num_parts <= MAX_MESSAGE_PARTS:
        for message in messages:
            for parts in (getattr(message, "content", None), getattr(message, "tool_calls", None)):
                num_parts += len(parts) if isinstance(parts, list) else 0
    if num_parts > MAX_MESSAGE_PARTS:
        raise InvalidRequest(
            f"{param} has more than {MAX_MESSAGE_PARTS} messages, parts and tool calls.", param=param
        )


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _refusal(error: Exception) -> InvalidRequest:
    """Return the error for a body that cannot be decoded."""
    if isinstance(error, RecursionError):
        return InvalidRequest("The request body is nested too deeply.")
    if isinstance(error, msgspec.ValidationError):
        field = _FIELD_IN_MESSAGE.search(str(error))
        return InvalidRequest(
            f"The request has a wrong type or value: {error}.", param=field[1] if field else None
        )
    return InvalidRequest(f"The request body is not valid JSON: {error}.")


@functools.cache
def _decoder_and_fields(shape: type[Shape]) -> tuple[msgspec.json.Decoder[Shape], frozenset[str]]:
    """Return the decoder of a shape and the names of its fields. Applications share them: msgspec reads the
    annotations of every class within the shape, which takes longer than all else that an application is built of."""
    names = frozenset(field.encode_name for field in msgspec.structs.fields(shape))
    return msgspec.json.Decoder(shape), names


class BodyDecoder(Generic[Shape]):
    """Decodes one shape. Unknown fields are ignored, as OpenAI does. Two kinds are refused, because ignoring them
    would silently change the samples: a field that looks like a misspelt `guarded_fields` name, and a field that
    `check_unknown(name, value)` refuses. `values_factor` raises the bounds of `check_num_values`."""

    def __init__(
        self,
        shape: type[Shape],
        guarded_fields: Iterable[str] = (),
        check_unknown: Callable[[str, Any], None] | None = None,
        values_factor: int = 1,
    ) -> None:
        self.shape = shape
        self._check_unknown = check_unknown
        self._values_factor = values_factor
        self._decoder: msgspec.json.Decoder[Shape]
        self._decoder, self._known = _decoder_and_fields(shape)
        self._guarded = tuple(guarded_fields)

    async def read(self, request: Request, *, default: bytes = b"") -> Shape:
        """Read and decode the body of a request. `default` stands for an empty body."""
        return await self.decode_for(request, await read_within_bound(request) or default)

    async def decode_for(self, request: Request, body: bytes) -> Shape:
        """Decode a body. A model that only the path names is filled in."""
        decoded = await self.decode_in_turns(request, body)
        deployment = state_of(request.scope).deployment
        if deployment is None or getattr(decoded, "model", None):
            return decoded
        return msgspec.structs.replace(decoded, model=deployment)

    async def decode_in_turns(self, connection: HTTPConnection, body: bytes) -> Shape:
        """Decode a body or a message of a WebSocket. Other requests have their turns while a large one is decoded."""
        if len(body) <= UNCOUNTED_BYTES:
            return self.decode(body)
        _keep_body(connection, len(body))
        with _pending(connection, len(body)):
            # Each of the two passes over 32 MB takes up to a tenth of a second, and so may the next step.
            await check_num_values_in_turns(body, self._values_factor)
            decoded = await _in_turn(connection, lambda: self._decode(body))
            await _in_turn(connection, lambda: self._check_fields(body))
            await _in_turn(connection, _nothing)
        return decoded

    def decode(self, body: bytes) -> Shape:
        check_num_values(body, self._values_factor)
        decoded = self._decode(body)
        self._check_fields(body)
        return decoded

    def _decode(self, body: bytes) -> Shape:
        try:
            return self._decoder.decode(body)
        except _UNREADABLE as error:
            raise _refusal(error) from error

    def _check_fields(self, body: bytes) -> None:
        """Refuse the unknown fields that may not be ignored."""
        if not self._guarded and self._check_unknown is None:
            return
        try:
            fields = _FIELD_DECODER.decode(body)
            names = fields.keys() - self._known
            if len(names) > MAX_UNKNOWN_FIELDS:
                raise InvalidRequest(f"The request has more than {MAX_UNKNOWN_FIELDS} unknown fields.")
            checks = self._check_unknown is not None
            unknown = {name: _small_value(fields[name]) if checks else None for name in sorted(names)}
        except _UNREADABLE as error:
            raise _refusal(error) from error
        if self._check_unknown is not None:
            for name, value in unknown.items():
                self._check_unknown(name, value)
        if self._guarded:
            self._refuse_misspelt(unknown)

    def _refuse_misspelt(self, unknown: Iterable[str]) -> None:
        for field in unknown:
            if field in self._guarded or len(field) > 2 * max(map(len, self._guarded)):
                continue  # a right name that another shape has was checked before
            plain = field.lower().replace("-", "_")
            close = difflib.get_close_matches(plain, self._guarded, n=1, cutoff=_SIMILAR_ENOUGH)
            if close:
                raise InvalidRequest(
                    f"The field {quoted(field)} is unknown.", param=field, hint=f"Did you mean {close[0]!r}?"
                )


def _nothing() -> None:
    pass


def _small_value(field: msgspec.Raw) -> Any:
    """Decode the value of an unknown field. A large one, which is no neutral value of any field, stays as it is."""
    return field if memoryview(field).nbytes > MAX_NEUTRAL_BYTES else msgspec.json.decode(field)


Choice = TypeVar("Choice", bound=str)

_MAX_DIGITS = 9


def text_of(request: Request, name: str) -> str | None:
    """NUL is refused because not every database can even look for it."""
    text = request.query_params.get(name)
    if text is not None and "\0" in text:
        raise InvalidRequest(f"{name} must not hold a NUL character.", param=name)
    return text


def integer_of(request: Request, name: str, *, default: int, low: int, high: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
    if not is_number or not low <= int(text) <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, not {text[:20]!r}.", param=name)
    return int(text)


def choice_of(request: Request, name: str, *, default: Choice, choices: Sequence[Choice]) -> Choice:
    text = request.query_params.get(name, default)
    for choice in choices:
        if text == choice:
            return choice
    raise InvalidRequest(f"{name} must be one of {', '.join(choices)}, not {text[:20]!r}.", param=name)


DIRECT_PARTS = 1000  # messages and parts of messages; a hop to another thread costs as much as some dozens
BYTES_PER_PART = 1 << 10  # of a file, whose base64 text is decoded

Result = TypeVar("Result")


async def translated(messages: Sequence[object], translate: Callable[[], Result]) -> Result:
    """Return what `translate` makes of a request with these messages. Very many, or large files in them, are
    translated in a thread, which gives the event loop its turns."""
    if _num_parts(messages) <= DIRECT_PARTS:
        return translate()
    return await in_thread(translate)


def _num_parts(messages: Sequence[object]) -> int:
    if len(messages) > DIRECT_PARTS:
        return len(messages)
    num_parts = len(messages)
    for message in messages:
        content = getattr(message, "content", None)
        if isinstance(content, list):
            num_parts += len(content)
            if num_parts <= DIRECT_PARTS:
                num_parts += sum(map(_parts_of_file, content))
    return num_parts


def _parts_of_file(part: object) -> int:
    """Return as how many parts a file counts that is inside the request, in OpenAI's APIs."""
    data = getattr(getattr(part, "file", None) or part, "file_data", None)
    return len(data) // BYTES_PER_PART if isinstance(data, str) else 0
