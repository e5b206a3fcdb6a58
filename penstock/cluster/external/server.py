"""Connects to one external server: learns its models and its load, and sends requests. Knows no other server and no
routing.

The load is read from the metrics that the server shows. For servers without such metrics, only the requests that were
sent to them count.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import msgspec

from penstock.cluster.external.connection import Answer, AnswerBroken, ConnectFailed, HttpError
from penstock.cluster.external.dialects import ReadEvent, dialect_of
from penstock.cluster.external.http import HttpClient
from penstock.cluster.external.wire import (
    ExternalCall,
    ModelPage,
    RequestRefused,
    StreamChunk,
    refusal,
    server_name,
    server_root,
)
from penstock.core.config import ExternalServerConfig
from penstock.core.errors import EngineUnavailable, InvalidRequest

MAX_LINE_BYTES = 16 << 20
# Decoding takes the event loop's time by the number of values, not of bytes. The longest whole answer has about
# 11,000 objects: 512 tokens with 20 alternatives each.
MAX_OBJECTS = 1 << 15
MAX_VALUES = 1 << 18  # between commas; vectors have more, and are cheap
MAX_SAMPLES = 4096  # of a metrics page that count
MAX_EMPTY_BYTES = 32 << 20  # of a stream without anything for the client: comments, empty chunks

T = TypeVar("T")
_DONE = b"[DONE]"


class LineTooLong(Exception):
    """A line is larger than any event: the stream is no event stream."""


class SaysNothing(Exception):
    """A stream goes on without anything for the client."""


class TooManyValues(Exception):
    """A piece of JSON has more values than any answer, and would take long to decode."""


def _decoded(data: bytes, decode: Callable[[bytes], T], max_values: int = MAX_VALUES) -> T:
    """Raises msgspec.DecodeError, TooManyValues, or RecursionError for what is nested too deeply."""
    is_large = len(data) > MAX_OBJECTS
    if is_large and (data.count(b"{") > MAX_OBJECTS or data.count(b",") > max_values):
        raise TooManyValues
    return decode(data)


class EventLines:
    """Cuts a stream of server-sent events into the data of its events, up to the event that ends the stream. Lines
    end at line feeds only: text may hold characters at which other decoders split."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []  # pieces of a line: joined once, because a line may have hundreds
        self._num_pending_bytes = 0
        self.has_ended = False  # by its own last event

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that this piece completes. Raises LineTooLong."""
        *lines, rest = piece.split(b"\n")
        if lines and self._pending:
            lines[0] = b"".join((*self._pending, lines[0]))
            self._pending.clear()
            self._num_pending_bytes = 0
        if rest:
            self._pending.append(rest)
            self._num_pending_bytes += len(rest)
            if self._num_pending_bytes > MAX_LINE_BYTES:
                raise LineTooLong
        return self._data(lines)

    def end(self) -> list[bytes]:
        """Return the rest of a stream that its server closed."""
        return self._data([b"".join(self._pending)])

    def _data(self, lines: Sequence[bytes]) -> list[bytes]:
        found: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:") and not self.has_ended:
                data = line[5:].strip()
                if data == _DONE:
                    self.has_ended = True
                elif data:
                    found.append(data)
        return found


# In the order of preference; the first that a server shows counts. All label sets of a name are added up: a server
# with several engines shows one for each.
_RUNNING = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "tgi_batch_current_size",
    "llamacpp:requests_processing",
)
_WAITING = (
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "tgi_queue_size",
    "llamacpp:requests_deferred",
    "nv_inference_pending_request_count",
)
# Shares from 0 to 1; the fullest of several engines counts.
_KV_USAGE = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
# A name, labels, whose values may hold any character, and a value; perhaps a time behind it.
_SAMPLE = re.compile(
    rf"^({'|'.join((*_RUNNING, *_WAITING, *_KV_USAGE))})(?:\{{.*\}})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class ServerLoad:
    num_running: int
    num_waiting: int
    kv_usage: float | None = None  # None if the server does not report it


def read_load(page: str) -> ServerLoad | None:
    """Read the load from a metrics page; None if the page has none. Raises ValueError for another kind of page."""
    found: dict[str, list[float]] = {}
    samples = list(islice(_SAMPLE.finditer(page), MAX_SAMPLES + 1))
    if len(samples) > MAX_SAMPLES:
        raise ValueError("too many figures")
    for sample in samples:
        found.setdefault(sample[1], []).append(_figure(sample[2]))
    running, waiting, usage = (_first(found, names) for names in (_RUNNING, _WAITING, _KV_USAGE))
    if running is None and waiting is None:
        return None
    return ServerLoad(
        num_running=round(sum(running or ())),
        num_waiting=round(sum(waiting or ())),
        kv_usage=None if usage is None else min(1.0, max(usage)),
    )


def _figure(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no figure")
    return max(0.0, value)


def _first(found: dict[str, list[float]], names: Sequence[str]) -> list[float] | None:
    return next((found[name] for name in names if name in found), None)


logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 5.0
MAX_MODELS_BYTES = 4 << 20
MAX_ERROR_BYTES = 64 << 10
MAX_METRICS_BYTES = 4 << 20
_CONTINUING = frozenset(
    {"vllm", "sglang", "penstock"}
)  # `owned_by` of models, which identifies the kind of server
_NO_METRICS = frozenset({401, 403, 404, 405, 501})  # will not change while the server runs

_decode_models = msgspec.json.Decoder(ModelPage).decode
_to_json = msgspec.json.Encoder().encode
OnChunks: TypeAlias = Callable[[list[StreamChunk]], None]


class ServerDown(Exception):
    """The server did not answer a probe correctly, or, if it `is_silent`, at all."""

    def __init__(self, message: str, *, is_silent: bool = False) -> None:
        super().__init__(message)
        self.is_silent = is_silent


class ExternalServer:
    """A connection to one server. `models` maps the names that clients use to the server's own names. Call `close` at
    the end."""

    def __init__(self, config: ExternalServerConfig) -> None:
        self.config = config
        self.name = server_name(config)
        self.region = config.region
        self.models: Mapping[str, str] = dict(config.models)
        self.max_model_lens: dict[str, int] = {}
        self.load: ServerLoad | None = None
        self._lists_models = not config.models
        self._shows_metrics = True
        self._shows_cached_tokens = config.shows_cached_tokens
        self._salts_cache = False  # whether the server keeps prompts with different salts apart
        self.cost = config.cost
        self.max_concurrent = config.max_concurrent
        self.continues = bool(config.continues)  # whether it completes an assistant's message
        self._knows_continues = config.continues is not None
        self._dialect = dialect_of(config)
        self._takes_cache_control = config.takes_cache_control or self._dialect.takes_cache_control
        headers = dict(self._dialect.headers)
        if config.api_key is not None:
            header = config.api_key_header.lower() or self._dialect.key_header
            headers[header] = f"Bearer {config.api_key}" if header == "authorization" else config.api_key
        self._http = HttpClient(server_root(config), headers, config.address, config.port)

    async def close(self) -> None:
        await self._http.close()

    async def probe(self) -> None:
        """Ask the server for its models and its load. Raises ServerDown."""
        try:
            path = self._dialect.models_path
            status, body = await self._get(path, MAX_MODELS_BYTES)
            if status != 200:
                raise ServerDown(f"{path} answers {status}")
            page = _decoded(body, _decode_models)
        except HttpError as error:
            raise ServerDown(str(error), is_silent=True) from error
        except TooManyValues as error:
            raise ServerDown(f"{path} lists more models than there can be") from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise ServerDown(f"{path} is not a list of models") from error
        if self._lists_models:
            self.models = {model.id: model.id for model in page.data}
        owners = {model.owned_by for model in page.data}
        self._salts_cache = "vllm" in owners
        if not self._knows_continues:
            self.continues = bool(owners & _CONTINUING)
        told = {model.id: model.max_model_len or 0 for model in page.data}
        known = {name: length for name, length in told.items() if length > 0}
        self.max_model_lens = {ours: known[theirs] for ours, theirs in self.models.items() if theirs in known}
        if self._shows_metrics:
            await self._read_metrics()

    async def _read_metrics(self) -> None:
        """Return the load by the server's metrics, if it has any."""
        with contextlib.suppress(HttpError, ValueError):
            status, page = await self._get("/metrics", MAX_METRICS_BYTES)
            self._shows_metrics = status not in _NO_METRICS
            if status == 200 and len(page) <= MAX_METRICS_BYTES:
                self.load = read_load(page.decode("utf-8", "replace"))

    async def _get(self, path: str, max_bytes: int) -> tuple[int, bytes]:
        return await self._http.get(path, timeout_s=PROBE_TIMEOUT_S, max_bytes=max_bytes)

    async def send(self, call: ExternalCall, on_chunks: OnChunks) -> None:
        """Send a request, and pass on the chunks of its answer; those that came together are passed on together. An
        answer that is asked for whole is one chunk. Raises RequestRefused. Cancelling this closes the connection, so
        that the server stops too."""
        try:
            path = self._dialect.path(call, self.models[call.model])
            answer = await self._http.send("POST", path, _to_json(self._body(call)))
            try:
                if answer.status != 200:
                    raise await self._refusal(answer)
                if call.is_whole:
                    body = answer.take_body(MAX_LINE_BYTES)
                    if body is None:
                        body = await answer.read_all(MAX_LINE_BYTES)
                    self._pass_on_whole(call, body, on_chunks)
                else:
                    await self._pass_on_events(answer, on_chunks)
            finally:
                answer.release()
        except HttpError as error:
            raise RequestRefused(
                EngineUnavailable(f"The external server {self.name!r} cannot be reached: {error}."),
                elsewhere=True,
                is_reached=not isinstance(error, ConnectFailed),
            ) from error
        except SaysNothing as error:
            raise RequestRefused(
                EngineUnavailable(f"The external server {self.name!r} sends a stream without an answer."),
                elsewhere=True,
            ) from error
        except (msgspec.DecodeError, RecursionError, LineTooLong, TooManyValues) as error:
            raise RequestRefused(
                EngineUnavailable(
                    f"The external server {self.name!r} answers with something else than chunks."
                ),
                elsewhere=True,
            ) from error

    def _body(self, call: ExternalCall) -> dict[str, Any]:
        if call.has_cache_marks and not self._takes_cache_control:
            call = call.without_cache_marks()
        try:
            body = self._dialect.body(call, self.models[call.model])
        except InvalidRequest as error:  # another server may have another dialect
            raise RequestRefused(error, elsewhere=False) from error
        if (
            self._salts_cache and call.api != "embeddings"
        ):  # workspaces can neither read nor time each other's prefixes
            body["cache_salt"] = blake2b(call.tenant.encode(), digest_size=16).hexdigest()
        return body

    def _pass_on_whole(self, call: ExternalCall, data: bytes, on_chunks: OnChunks) -> None:
        max_values = len(data) if call.api == "embeddings" else MAX_VALUES
        chunk = self._shown(_decoded(data, self._dialect.read_whole, max_values))
        if chunk.error is not None:
            raise refusal(self.name, 500, data)
        on_chunks([chunk.as_whole(call.estimated_tokens)])

    async def _pass_on_events(self, answer: Answer, on_chunks: OnChunks) -> None:
        lines = EventLines()
        read = self._dialect.reader()
        num_bytes, says_something = 0, False  # since the last look

        def take(piece: bytes | None) -> None:
            nonlocal num_bytes, says_something
            if lines.has_ended:
                return
            events = lines.end() if piece is None else lines.feed(piece)
            if lines.has_ended:
                answer.end_soon()
            chunks, problem = self._chunks(events, read)
            if chunks:
                says_something = says_something or any(chunk.says_something for chunk in chunks)
                on_chunks(chunks)
            if problem is not None:
                raise problem
            num_bytes += len(piece or b"")
            if num_bytes > MAX_EMPTY_BYTES:
                if not says_something:
                    raise SaysNothing
                num_bytes, says_something = 0, False

        try:
            await answer.deliver(take)
        except AnswerBroken:
            if not lines.has_ended:  # by its last event: what happens to the connection then is no matter
                raise
        take(None)

    def _chunks(self, events: Sequence[bytes], read: ReadEvent) -> tuple[list[StreamChunk], Exception | None]:
        """Return the chunks of these events, up to the first that is no chunk or reports an error, and that error."""
        chunks: list[StreamChunk] = []
        for data in events:
            try:
                chunk = read(data) if len(data) <= MAX_OBJECTS else _decoded(data, read)
            except (msgspec.DecodeError, RecursionError, TooManyValues) as error:
                return chunks, error
            if chunk.error is not None:
                return chunks, refusal(self.name, 500, data)
            if chunk.usage is not None or chunk.timings is not None:
                chunk = self._shown(chunk)
            chunks.append(chunk)
        return chunks, None

    def _shown(self, chunk: StreamChunk) -> StreamChunk:
        """Return what clients may see of a chunk, and may be charged for."""
        chunk = chunk.without_nonsense()
        shows_all = self._salts_cache or self._shows_cached_tokens
        return chunk if shows_all else chunk.without_cached_tokens()

    async def _refusal(self, answer: Answer) -> RequestRefused:
        body = await answer.read_all(MAX_ERROR_BYTES)
        return refusal(self.name, answer.status, body, _retry_after_s(answer.headers))


def _retry_after_s(headers: Mapping[bytes, bytes]) -> float | None:
    text = headers.get(b"retry-after", b"")
    return float(text) if text.isdigit() and len(text) < 6 else None  # it may be a date
