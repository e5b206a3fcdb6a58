"""Clients that leave and an engine that fails at any moment, for tests of what must hold all the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message

from penstock.core.errors import EngineUnavailable, Overloaded, PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request
from tests.gateway.fake_engine import EOS_ID, FakeEngine, FakeStream, engine_ready, model_card

VECTOR = b"\0\0\x80?" * 4
SOON_S = 0.004  # the longest pause between two things that happen


class UnreliableEngine(FakeEngine):
    """Answers a few tokens with pauses in between, and ends in every way that an engine can."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(ready=engine_ready(model_card(embedding_size=4, max_model_len=2048)))
        self._dice = dice
        self._tasks: set[asyncio.Task[None]] = set()

    def add(
        self,
        request: Request,
        *,
        timeout_s: float | None,
        on_event: Callable[[TokenEvent], None],
        on_error: Callable[[PenstockError], None],
    ) -> None:
        if self._dice.random() < 0.05:
            on_error(EngineUnavailable("not now"))
            return
        stream = self.streams[request.id] = FakeStream(request, timeout_s, on_event, on_error)
        task = asyncio.create_task(self._answer(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, stream: FakeStream) -> None:
        request = stream.request
        ending = self._dice.choices(
            ("stop", "length", "rejected", "gone", "error", "abort", "deadline", "silence"),
            (12, 4, 1, 1, 1, 1, 1, 1),
        )[0]
        num_tokens = self._dice.randrange(1, min(9, request.sampling.max_tokens + 1))
        for position in range(
            self._dice.randrange(num_tokens) if ending not in ("stop", "length") else num_tokens
        ):
            await asyncio.sleep(self._dice.random() * SOON_S)
            if ending in ("stop", "length") and position == num_tokens - 1:
                break
            first = {"num_cached_tokens": self._dice.choice((0, 3)), "queue_s": 0.0} if not position else {}
            if not self._tell(request.id, TokenEvent(request.id, (self._dice.choice(b"abc."),), **first)):
                return
        await asyncio.sleep(self._dice.random() * SOON_S)
        self._end(request, ending)

    def _end(self, request: Request, ending: str) -> None:
        match ending:
            case "rejected" | "gone":
                stream = self.streams.pop(request.id, None)
                if stream is not None:
                    stream.on_error(Overloaded("full") if ending == "rejected" else EngineUnavailable("gone"))
            case "stop" if request.pooling is not None:
                self._tell(
                    request.id, TokenEvent(request.id, finish_reason=FinishReason.STOP, embedding=VECTOR)
                )
            case "stop" | "length":
                token_id = EOS_ID if ending == "stop" else 97
                self._tell(
                    request.id, TokenEvent(request.id, (token_id,), finish_reason=FinishReason(ending))
                )
            case "error" | "abort" | "deadline":
                self._tell(request.id, TokenEvent(request.id, finish_reason=FinishReason(ending)))

    def _tell(self, request_id: str, event: TokenEvent) -> bool:
        stream = self.streams.get(request_id)
        if stream is None:
            return False
        if event.finish_reason is not None:
            del self.streams[request_id]
        stream.on_event(event)
        return True


class FickleClient:
    """Calls an application as a server would, and may hang up at any moment."""

    def __init__(self, app: ASGIApp, secret: str, dice: random.Random) -> None:
        self._app = app
        self._secret = secret
        self._dice = dice

    def _scope(self, kind: str, path: str, headers: dict[str, str]) -> dict[str, Any]:
        raw = {"host": "test", "authorization": f"Bearer {self._secret}"} | headers
        return {
            "type": kind,
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in raw.items()],
            "server": ("test", 80),
            "client": ("test", 1),
            "extensions": {"websocket.http.response": {}},
        }

    async def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int | None, bytes]:
        """The status, None when the client left before it, and what it got to see of the answer."""
        gone = asyncio.Event()
        incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        status: int | None = None
        seen = bytearray()

        async def receive() -> Message:
            if incoming:
                return incoming.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status, seen
            if self._dice.random() < 0.2:
                await asyncio.sleep(self._dice.random() * SOON_S)
            if gone.is_set():
                return
            if message["type"] == "http.response.start":
                status = message["status"]
            seen += message.get("body", b"")

        leaving = None
        if self._dice.random() < 0.4:
            leaving = asyncio.get_running_loop().call_later(self._dice.random() * 6 * SOON_S, gone.set)
        await self._app(self._scope("http", path, headers or {}), receive, send)
        if leaving is not None:
            leaving.cancel()
        return status, bytes(seen)

    async def talk(self, messages: list[dict[str, Any]]) -> None:
        """Over one WebSocket, which ends before all answers have come."""
        incoming: asyncio.Queue[Message] = asyncio.Queue()
        incoming.put_nowait({"type": "websocket.connect"})

        async def send(message: Message) -> None:
            if self._dice.random() < 0.2:
                await asyncio.sleep(self._dice.random() * SOON_S)

        talking = asyncio.create_task(
            self._app(self._scope("websocket", "/v1/stream", {}), incoming.get, send)
        )
        for message in messages:
            await asyncio.sleep(self._dice.random() * 2 * SOON_S)
            incoming.put_nowait({"type": "websocket.receive", "text": json.dumps(message)})
        await asyncio.sleep(self._dice.random() * 3 * SOON_S)
        incoming.put_nowait({"type": "websocket.disconnect", "code": 1006})
        with contextlib.suppress(asyncio.CancelledError):
            await talking
