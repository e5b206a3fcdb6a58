"""A small HTTP/1.1 client for one server, whose connections (`connection.py`) are kept alive. Knows no JSON and no
events. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import certifi

from penstock.cluster.external.connection import SILENCE_TIMEOUT_S, Answer, AnswerBroken, ConnectFailed
from penstock.core.errors import ConfigError

CONNECT_TIMEOUT_S = 5.0
MAX_IDLE_CONNECTIONS = 64
MAX_KEPT_HEADS = 64


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server, from its URL."""

    host: str
    port: int
    is_tls: bool
    authority: str  # for the header Host
    path: str  # before the paths of requests
    credentials: str | None  # of the URL, as basic authentication
    names_port: bool = True  # whether the URL does

    @classmethod
    def of(cls, url: str) -> Self:
        """Raises ConfigError for a URL without a host, or with characters that could end a line of HTTP."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or parts.scheme not in ("http", "https") or not _is_plain(url):
            raise ConfigError(f"The external server {url!r} has no URL that begins with http:// or https://.")
        is_tls = parts.scheme == "https"
        credentials = None
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            credentials = f"Basic {base64.b64encode(pair.encode()).decode()}"
        return cls(
            host=host,
            port=port or (443 if is_tls else 80),
            is_tls=is_tls,
            authority=parts.netloc.rpartition("@")[2],
            path=parts.path.rstrip("/"),
            credentials=credentials,
            names_port=port is not None,
        )


def _is_plain(text: str) -> bool:
    """Return whether a text can stand in the head of a request."""
    return text.isascii() and text.isprintable() and " " not in text


class HttpClient:
    """Sends requests to one server. `headers` go with every request. `connect_to` is an address of the URL's host, if
    not any will do, and `connect_port` a port of its own. `trusts` is a file with the only authority that may vouch
    for the server. Call `close` at the end."""

    def __init__(
        self,
        url: str,
        headers: dict[str, str],
        connect_to: str = "",
        connect_port: int | None = None,
        trusts: Path | None = None,
    ) -> None:
        self.address = Address.of(url)
        self._connect_to = connect_to or self.address.host
        self._connect_port = connect_port or self.address.port
        lines = {"host": self.address.authority, "accept-encoding": "identity", "user-agent": "penstock"}
        if self.address.credentials is not None:
            lines["authorization"] = self.address.credentials
        lines |= headers
        for name, value in lines.items():
            is_name = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
            if not (is_name and value.isascii() and value.isprintable()):
                raise ConfigError(
                    f"The header {name!r} for {self.address.authority} has forbidden characters."
                )
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("latin-1")
        self._heads: dict[tuple[str, str, str | None], bytes] = {}
        self._tls = _trusting(trusts) if self.address.is_tls else None
        self._idle: list[Answer] = []
        self._open: set[Answer] = set()
        self._is_closed = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def get(self, path: str, *, timeout_s: float, max_bytes: int) -> tuple[int, bytes]:
        """Return the status and the body, of at most `max_bytes`. Raises HttpError."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.send("GET", path)
                try:
                    return answer.status, await answer.read_all(max_bytes)
                finally:
                    answer.release()
        except TimeoutError as error:
            raise AnswerBroken("it did not answer in time") from error

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        content_type: str = "application/json",
        silence_s: float = SILENCE_TIMEOUT_S,
    ) -> Coroutine[Any, Any, Answer]:
        """Send a request, and wait for the head of the answer. The caller releases the answer. Raises HttpError."""
        if body is None:
            return self._send(self._head_of(method, path) + b"\r\n", silence_s)
        request = b"%bcontent-length: %d\r\n\r\n%b" % (
            self._head_of(method, path, content_type),
            len(body),
            body,
        )
        return self._send(request, silence_s)

    def _head_of(self, method: str, path: str, content_type: str | None = None) -> bytes:
        """Return the lines of a head that depend on no body. Most requests to a server have the same."""
        key = method, path, content_type
        head = self._heads.get(key)
        if head is None:
            typed = "" if content_type is None else f"content-type: {content_type}\r\n"
            line = f"{method} {self.address.path}{path} HTTP/1.1\r\n"
            head = line.encode("ascii") + self._head + typed.encode("ascii")
            if len(self._heads) >= MAX_KEPT_HEADS:
                self._heads.clear()
            self._heads[key] = head
        return head

    async def close(self) -> None:
        self._is_closed = True
        for answer in tuple(self._open):
            answer.close()

    def keep(self, answer: Answer) -> None:
        if self._is_closed or len(self._idle) >= MAX_IDLE_CONNECTIONS:
            answer.close()
        else:
            self._idle.append(answer)

    def forget(self, answer: Answer) -> None:
        if answer in self._open:
            self._open.discard(answer)
            if answer in self._idle:
                self._idle.remove(answer)

    async def _send(self, request: bytes, silence_s: float = SILENCE_TIMEOUT_S) -> Answer:
        may_be_stale = True
        while True:
            answer = (self._kept() if may_be_stale else None) or await self._connect_after(not may_be_stale)
            answer.begin(request, silence_s)
            try:
                await answer.wait_head()
            except AnswerBroken:
                was_stale = answer.was_reused and not answer.has_begun
                answer.release()
                # A server may close a connection that it kept just when it is used again. Nothing was answered, and
                # the next connection is a new one: a request that makes a server close connections would end all
                # that are kept otherwise, and run as often.
                if self._is_closed or not was_stale:
                    raise
                may_be_stale = False
            except BaseException:
                answer.release()
                raise
            else:
                return answer

    async def _connect_after(self, was_sent: bool) -> Answer:
        try:
            return await self._connect()
        except ConnectFailed as error:
            if was_sent:  # the request may be what ended the server
                raise AnswerBroken(f"it closed the connection, and takes no other: {error}") from error
            raise

    def _kept(self) -> Answer | None:
        """Return the connection that was used last, because those before it may be left to end."""
        while self._idle:
            answer = self._idle.pop()
            if answer.is_open:
                return answer
        return None

    async def _connect(self) -> Answer:
        address = self.address
        answer = Answer(self)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self.loop.create_connection(
                    lambda: answer,
                    self._connect_to,
                    self._connect_port,
                    ssl=self._tls,
                    server_hostname=None if self._tls is None else address.host,
                )
        except TimeoutError as error:
            raise ConnectFailed("no connection in time") from error
        except (OSError, UnicodeError) as error:  # the latter for a name that can be none
            raise ConnectFailed(_plainly(error)) from error
        self._open.add(answer)
        return answer


def _plainly(error: OSError | UnicodeError) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _trusting(only: Path | None) -> ssl.SSLContext:
    """Trusts `only` this authority, or the certificates of the system (`SSL_CERT_FILE` counts) and those of the usual
    authorities."""
    if only is not None:
        return ssl.create_default_context(cafile=str(only))
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
