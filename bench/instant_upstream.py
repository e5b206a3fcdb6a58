"""An OpenAI-compatible server that answers every chat at once with the same 16 tokens: what other gateways stand in
front of in benchmarks. Does as little as a server can.

    python -m bench.instant_upstream PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import uvloop

from bench.sockets import HOST

NUM_TOKENS = 16
_TEXT = "rivers. "


def _whole_answer() -> bytes:
    message = {"role": "assistant", "content": _TEXT * NUM_TOKENS}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    usage = {"prompt_tokens": 8, "completion_tokens": NUM_TOKENS, "total_tokens": 8 + NUM_TOKENS}
    body = json.dumps(_header("chat.completion") | {"choices": [choice], "usage": usage}).encode()
    return _head("application/json", f"Content-Length: {len(body)}") + body


def _event_stream() -> bytes:
    events = [_event({"role": "assistant", "content": _TEXT}, None) for _ in range(NUM_TOKENS)]
    body = b"".join([*events, _event({}, "length"), b"data: [DONE]\n\n"])
    chunk = b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    return _head("text/event-stream", "Transfer-Encoding: chunked") + chunk


def _event(delta: dict[str, str], finish_reason: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: " + json.dumps(_header("chat.completion.chunk") | {"choices": [choice]}).encode() + b"\n\n"


def _header(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1_700_000_000, "model": "echo"}


def _head(content_type: str, length: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\n{length}\r\n\r\n".encode()


class InstantAnswers(asyncio.Protocol):
    WHOLE = _whole_answer()
    STREAM = _event_stream()

    def __init__(self) -> None:
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, _, rest = self._received.partition(b"\r\n\r\n")
            _, _, value = head.lower().partition(b"content-length:")
            length = int(value.partition(b"\r\n")[0] or 0)
            if len(rest) < length:
                return
            body, self._received = rest[:length], rest[length:]
            wants_stream = b'"stream":true' in body.replace(b" ", b"")
            self._transport.write(self.STREAM if wants_stream else self.WHOLE)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(InstantAnswers, HOST, port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
