"""Connects to one external server: learns its models and its load, and sends requests. Knows no other server and no
routing.

The load is read from the metrics that the server shows. For servers without such metrics, only the requests that were
sent to them count.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

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
from penstock.core.errors import EngineUnavailable

MAX_LINE_BYTES = 16 << 20
_DONE = b"[DONE]"


class LineTooLong(Exception):
    """A line is larger than any event: the stream is no event stream."""


async def event_data(source: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each event, up to the event that ends the stream. Lines end at line feeds only: text may hold
    characters at which other decoders split."""
    pending = b""
    async for piece in source:
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == _DONE:
                    return
                if data:
                    yield data
        if len(pending) > MAX_LINE_BYTES:
            raise LineTooLong
    if pending.startswith(b"data:") and (rest := pending[5:].strip()) and rest != _DONE:
        yield rest


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
_WANTED = frozenset((*_RUNNING, *_WAITING, *_KV_USAGE))


@dataclass(frozen=True, slots=True)
class ServerLoad:
    num_running: int
    num_waiting: int
    kv_usage: float | None = None  # None if the server does not report it


def read_load(page: str) -> ServerLoad | None:
    """Read the load from a metrics page; None if the page has none. Raises ValueError for another kind of page."""
    found: dict[str, list[float]] = {}
    # Only the lines that matter: a page may have thousands.
    lines = [line for line in page.splitlines() if line.startswith(tuple(_WANTED))]
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if sample.name in _WANTED:
                found.setdefault(sample.name, []).append(sample.value)
    running, waiting, usage = (_first(found, names) for names in (_RUNNING, _WAITING, _KV_USAGE))
    if running is None and waiting is None:
        return None
    return ServerLoad(
        num_running=round(sum(running or ())),
        num_waiting=round(sum(waiting or ())),
        kv_usage=None if usage is None else min(1.0, max(usage)),
    )


def _first(found: dict[str, list[float]], names: Sequence[str]) -> list[float] | None:
    return next((found[name] for name in names if name in found), None)


logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 600.0  # between two pieces of an answer; the wait for the first may be as long
MAX_ERROR_BYTES = 64 << 10
MAX_METRICS_BYTES = 4 << 20
_NO_METRICS = frozenset({401, 403, 404, 405, 501})  # will not change while the server runs

_decode_chunk = msgspec.json.Decoder(StreamChunk).decode
_decode_models = msgspec.json.Decoder(ModelPage).decode


class ServerDown(Exception):
    """The server did not answer a probe correctly."""


class ExternalServer:
    """A connection to one server. `models` maps the names that clients use to the server's own names. Call `close` at
    the end."""

    def __init__(
        self, config: ExternalServerConfig, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.name = server_name(config)
        self.region = config.region
        self.models: Mapping[str, str] = dict(config.models)
        self.max_model_lens: dict[str, int] = {}
        self.load: ServerLoad | None = None
        self._lists_models = not config.models
        self._shows_metrics = True
        self._shows_cached_tokens = config.shows_cached_tokens
        self._salts_cache = False  # whether the server keeps prompts with different salts apart
        self._root = server_root(config)
        headers = {} if config.api_key is None else {"authorization": f"Bearer {config.api_key}"}
        self._http = httpx.AsyncClient(
            headers={**headers, "user-agent": "penstock"},
            timeout=httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            transport=transport,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def probe(self) -> None:
        """Ask the server for its models and its load. Raises ServerDown."""
        try:
            answer = await self._http.get(f"{self._root}/v1/models", timeout=PROBE_TIMEOUT_S)
            if answer.status_code != 200:
                raise ServerDown(f"/v1/models answers {answer.status_code}")
            page = _decode_models(answer.content)
        except httpx.HTTPError as error:
            raise ServerDown(_describe(error)) from error
        except msgspec.DecodeError as error:
            raise ServerDown("/v1/models is not a list of models") from error
        if self._lists_models:
            self.models = {model.id: model.id for model in page.data}
        self._salts_cache = any(model.owned_by == "vllm" for model in page.data)
        known = {model.id: model.max_model_len for model in page.data if model.max_model_len is not None}
        self.max_model_lens = {ours: known[theirs] for ours, theirs in self.models.items() if theirs in known}
        if self._shows_metrics:
            await self._read_metrics()

    async def _read_metrics(self) -> None:
        """Return the load by the server's metrics, if it has any."""
        with contextlib.suppress(httpx.HTTPError, ValueError):
            answer = await self._http.get(f"{self._root}/metrics", timeout=PROBE_TIMEOUT_S)
            self._shows_metrics = answer.status_code not in _NO_METRICS
            if answer.status_code == 200 and len(answer.content) <= MAX_METRICS_BYTES:
                self.load = read_load(answer.text)

    async def stream(self, call: ExternalCall) -> AsyncGenerator[StreamChunk, None]:
        """Stream the answer. Raises RequestRefused. Closing the stream closes the connection, so that the server
        stops too."""
        body = {**call.body, "model": self.models[call.model], "stream": True}
        if self._salts_cache:  # workspaces can neither read nor time each other's prefixes
            body["cache_salt"] = blake2b(call.tenant.encode(), digest_size=16).hexdigest()
        hides_cached = not self._salts_cache and not self._shows_cached_tokens
        try:
            async with self._http.stream("POST", f"{self._root}/v1/{call.api}", json=body) as answer:
                if answer.status_code != 200:
                    raise await self._refusal(answer)
                async for data in event_data(answer.aiter_bytes()):
                    chunk = _decode_chunk(data)
                    if chunk.error is not None:
                        raise refusal(self.name, 500, data)
                    yield chunk.without_cached_tokens() if hides_cached else chunk
        except httpx.HTTPError as error:
            raise RequestRefused(
                EngineUnavailable(
                    f"The external server {self.name!r} cannot be reached: {_describe(error)}."
                ),
                elsewhere=True,
            ) from error
        except (msgspec.DecodeError, LineTooLong) as error:
            raise RequestRefused(
                EngineUnavailable(
                    f"The external server {self.name!r} answers with something else than chunks."
                ),
                elsewhere=True,
            ) from error

    async def _refusal(self, answer: httpx.Response) -> RequestRefused:
        body = b""
        async for piece in answer.aiter_bytes():
            body += piece
            if len(body) > MAX_ERROR_BYTES:
                break
        return refusal(self.name, answer.status_code, body, _retry_after_s(answer.headers))


def _retry_after_s(headers: httpx.Headers) -> float | None:
    text = headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 6 else None  # it may be a date


def _describe(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
