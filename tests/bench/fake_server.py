"""A server that speaks just enough of the completions API to be measured, and can misbehave on request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Behaviour = Literal["good", "refuse", "cut", "error-event", "no-done", "silent", "not-http", "no-usage"]


@dataclass
class FakeServer:
    """Answers every prompt with as many events as tokens were asked for; counts what it saw."""

    behaviour: Behaviour = "good"
    num_cached_tokens: int = 0
    metrics: str | None = None  # "{n}" stands for the number of answers so far
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""
    _at_once: int = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeServer]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
            self.authorizations.append(headers.get("Authorization", ""))
            body = await reader.readexactly(int(headers["Content-Length"]))
            if head.startswith("GET /v1/models "):
                self._plain(writer, 200, {"object": "list", "data": [{"id": "fake-model"}]})
            elif head.startswith("GET /metrics ") and self.metrics is not None:
                self._plain(writer, 200, self.metrics.replace("{n}", str(len(self.bodies))))
            elif head.startswith("GET "):
                self._plain(writer, 404, {"error": {"message": "no such page"}})
            else:
                await self._complete(writer, json.loads(body))
            await writer.drain()
        except ConnectionError:
            pass  # the client has seen enough
        finally:
            self._at_once -= 1
            writer.close()

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        if self.behaviour == "refuse":
            self._plain(writer, 503, {"error": {"message": "too busy"}})
            return
        if self.behaviour == "not-http":
            writer.write(b"hello there\r\n\r\n")
            return
        if self.behaviour == "silent":
            await asyncio.sleep(3600)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for index in range(body["max_tokens"]):
            self._event(writer, {"choices": [{"text": f"t{index}", "finish_reason": None}]})
            await writer.drain()
            await asyncio.sleep(0)
            if self.behaviour == "cut":
                return
            if self.behaviour == "error-event":
                self._event(writer, {"error": {"message": "the engine stopped"}})
        self._event(writer, {"choices": [{"text": "", "finish_reason": "length"}]})
        if self.behaviour != "no-usage":
            details = {"cached_tokens": self.num_cached_tokens}
            usage = {"completion_tokens": body["max_tokens"], "prompt_tokens_details": details}
            self._event(writer, {"choices": [], "usage": usage})
        if self.behaviour != "no-done":
            self._chunk(writer, b"data: [DONE]\n\n")
        self._chunk(writer, b"")

    def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        self._chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, writer: asyncio.StreamWriter, content: bytes) -> None:
        writer.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")

    def _plain(self, writer: asyncio.StreamWriter, status: int, body: dict[str, Any] | str) -> None:
        content = (body if isinstance(body, str) else json.dumps(body)).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
