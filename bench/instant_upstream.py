"""An OpenAI-compatible server that answers every chat at once with the same 16 tokens: what gateways stand in front
of in benchmarks. Does as little as a server can. A stream's events leave one by one, as those of an engine do.

    python -m bench.instant_upstream PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

import uvloop

from bench.sockets import HOST

MODEL = "echo"
NUM_TOKENS = 16
_TEXT = "rivers. "
_USAGE = {"prompt_tokens": 8, "completion_tokens": NUM_TOKENS, "total_tokens": 8 + NUM_TOKENS}


def _whole_answer() -> bytes:
    message = {"role": "assistant", "content": _TEXT * NUM_TOKENS}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    return _json_answer(_header("chat.completion") | {"choices": [choice], "usage": _USAGE})


def _model_list() -> bytes:
    """What gateways ask for; also enough for questions after health and metadata."""
    described = {"id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "bench"}
    return _json_answer({"object": "list", "data": [described], "model_path": MODEL, "status": "ok"})


def _stream_pieces() -> list[bytes]:
    events = [_event({"role": "assistant", "content": _TEXT}, None) for _ in range(NUM_TOKENS)]
    usage = json.dumps(_header("chat.completion.chunk") | {"choices": [], "usage": _USAGE}).encode()
    end = _event({}, "length") + b"data: " + usage + b"\n\ndata: [DONE]\n\n"
    head = _head("text/event-stream", "Transfer-Encoding: chunked")
    first, *others = map(_chunk, events)
    return [head + first, *others, _chunk(end) + b"0\r\n\r\n"]


def _event(delta: dict[str, str], finish_reason: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: " + json.dumps(_header("chat.completion.chunk") | {"choices": [choice]}).encode() + b"\n\n"


def _header(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1_700_000_000, "model": MODEL}


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def _json_answer(shape: dict[str, Any]) -> bytes:
    body = json.dumps(shape).encode()
    return _head("application/json", f"Content-Length: {len(body)}") + body


def _head(content_type: str, length: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\n{length}\r\n\r\n".encode()


class InstantAnswers(asyncio.Protocol):
    WHOLE = _whole_answer()
    MODELS = _model_list()
    STREAM = _stream_pieces()

    def __init__(self) -> None:
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

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
            if not head.startswith(b"POST"):
                self._transport.write(self.MODELS)
            elif b'"stream":true' in body.replace(b" ", b""):
                self._write_next(iter(self.STREAM))
            else:
                self._transport.write(self.WHOLE)

    def _write_next(self, pieces: Iterator[bytes]) -> None:
        piece = next(pieces, None)
        if piece is not None:
            assert self._transport is not None
            self._transport.write(piece)
            self._loop.call_soon(self._write_next, pieces)  # what is written in one turn leaves in one packet


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(InstantAnswers, HOST, port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
