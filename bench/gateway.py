"""How much CPU the gateway spends per token that it streams.

Serves a fake engine that makes one token for every live request per step, as fast as the gateway takes them, and
reads the streams from another process over plain sockets. From the repository root:

    python -m bench.gateway [--streams 32 256] [--tokens 400] [--chat]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import uvicorn

from penstock.api.app import create_app
from penstock.core.errors import PenstockError
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.core.messages import EngineStats
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request
from penstock.gateway.gateway import Gateway
from tests.gateway.fake_engine import engine_ready, model_card

HOST = "127.0.0.1"
PORT = 8765
CONTEXT_TOKENS = 1 << 20


class FloodEngine:
    """Gives every live request one token per step. A step begins when the loop has handled the previous one."""

    def __init__(self) -> None:
        self.ready = engine_ready(model_card(max_model_len=CONTEXT_TOKENS), max_output_tokens=CONTEXT_TOKENS)
        self.models = {self.ready.model.name: self.ready}
        self.stats = EngineStats()
        self._remaining: dict[str, int] = {}
        self._on_event: dict[str, Callable[[TokenEvent], None]] = {}

    def add(
        self,
        request: Request,
        *,
        timeout_s: float | None,
        on_event: Callable[[TokenEvent], None],
        on_error: Callable[[PenstockError], None],
    ) -> None:
        if not self._remaining:
            asyncio.get_running_loop().call_soon(self._step)
        self._remaining[request.id] = request.sampling.max_tokens
        self._on_event[request.id] = on_event

    def abort(self, request_id: str) -> None:
        self._remaining.pop(request_id, None)
        self._on_event.pop(request_id, None)

    def _step(self) -> None:
        for request_id in list(self._remaining):
            self._remaining[request_id] -= 1
            is_last = not self._remaining[request_id]
            event = TokenEvent(
                request_id, (ord("a"),), finish_reason=FinishReason.LENGTH if is_last else None
            )
            self._on_event[request_id](event)
            if is_last:
                self.abort(request_id)
        if self._remaining:
            asyncio.get_running_loop().call_soon(self._step)


def serve() -> None:
    app = create_app(Gateway(FloodEngine(), GatewayConfig()), ServerConfig())
    uvicorn.run(app, host=HOST, port=PORT, log_level="warning", access_log=False)


@dataclass(frozen=True)
class StreamCount:
    chunks: int
    tokens: int


async def read_stream(num_tokens: int, *, chat: bool) -> StreamCount:
    prompt = {"messages": [{"role": "user", "content": "go"}]} if chat else {"prompt": "go"}
    options = {"max_tokens": num_tokens, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(prompt | options).encode()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    reader, writer = await asyncio.open_connection(HOST, PORT)
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = bytearray()
    while data := await reader.read(1 << 16):
        answer += data
    writer.close()
    if b"[DONE]" not in answer:
        raise RuntimeError(f"a stream broke off: {bytes(answer[-300:])!r}")
    _, _, after = answer.rpartition(b'"completion_tokens":')
    return StreamCount(answer.count(b"data: ") - 2, int(after.partition(b",")[0]))


async def measure(server: psutil.Process, num_streams: int, num_tokens: int, *, chat: bool) -> None:
    before, started = server.cpu_times(), time.perf_counter()
    counts = await asyncio.gather(*(read_stream(num_tokens, chat=chat) for _ in range(num_streams)))
    elapsed_s, after = time.perf_counter() - started, server.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    tokens, chunks = sum(count.tokens for count in counts), sum(count.chunks for count in counts)
    print(
        f"{num_streams:4d} streams: {tokens / elapsed_s:8.0f} tok/s, {1e6 * cpu_s / tokens:5.1f} µs CPU per token, "
        f"{1e6 * cpu_s / chunks:5.1f} µs per chunk ({tokens / chunks:.2f} tokens a chunk)"
    )


async def wait_for_server() -> None:
    for _ in range(200):
        try:
            _, writer = await asyncio.open_connection(HOST, PORT)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
    raise RuntimeError("the server did not start")


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--tokens", type=int, default=400, help="per stream")
    parser.add_argument("--chat", action="store_true", help="use /v1/chat/completions")
    arguments = parser.parse_args()
    process = subprocess.Popen([sys.executable, "-c", "from bench.gateway import serve; serve()"])
    try:
        await wait_for_server()
        await read_stream(50, chat=arguments.chat)
        for num_streams in arguments.streams:
            await measure(psutil.Process(process.pid), num_streams, arguments.tokens, chat=arguments.chat)
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    asyncio.run(main())
