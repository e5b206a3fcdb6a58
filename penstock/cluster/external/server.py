"""One external server: what it serves, how busy it is, and requests to it. Knows no other server and no routing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from hashlib import blake2b

import httpx
import msgspec

from penstock.cluster.external.address import server_name, server_root
from penstock.cluster.external.call import ExternalCall
from penstock.cluster.external.lines import LineTooLong, event_data
from penstock.cluster.external.load import ServerLoad, read_load
from penstock.cluster.external.wire import ModelPage, RequestRefused, StreamChunk, refusal
from penstock.core.config import ExternalServerConfig
from penstock.core.errors import EngineUnavailable

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
    """`close` it in the end. `models` is what clients may ask for, each with the server's own name for it."""

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
        """The load by the server's metrics, if it has any."""
        with contextlib.suppress(httpx.HTTPError, ValueError):
            answer = await self._http.get(f"{self._root}/metrics", timeout=PROBE_TIMEOUT_S)
            self._shows_metrics = answer.status_code not in _NO_METRICS
            if answer.status_code == 200 and len(answer.content) <= MAX_METRICS_BYTES:
                self.load = read_load(answer.text)

    async def stream(self, call: ExternalCall) -> AsyncGenerator[StreamChunk, None]:
        """The answer as it comes. Raises RequestRefused. Closing this closes the connection, by which the server
        learns that nobody reads the rest."""
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
