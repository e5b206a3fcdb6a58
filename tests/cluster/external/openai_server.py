"""A small OpenAI-compatible server of somebody else's, on a real socket. A test scripts what it answers."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.servers import listening

Script = Callable[[dict[str, Any]], Sequence[dict[str, Any] | float | Response]]


def text_chunks(
    *pieces: str, finish_reason: str = "stop", usage: dict[str, Any] | None = None, **choice: Any
) -> list[dict[str, Any]]:
    """As vLLM sends them: a role, the text, the end, and usage on its own."""
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        *({"content": each} for each in pieces),
    ]
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason, **choice}]})
    told = usage or {"prompt_tokens": 7, "completion_tokens": len(pieces), "total_tokens": 7 + len(pieces)}
    return [*chunks, {"choices": [], "usage": told}]


def whole_answer(steps: Sequence[dict[str, Any] | float | Response]) -> dict[str, Any]:
    """What a server says at once that would have streamed these chunks."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    whole: dict[str, Any] = {"choices": []}
    text = ""
    for step in steps:
        if not isinstance(step, dict):
            continue
        for choice in step.get("choices", ()):
            text += choice.get("text", "")
            delta = choice.pop("delta", {})
            message["content"] += delta.pop("content", None) or ""
            for call in delta.pop("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if call["index"] < len(calls):
                    calls[call["index"]]["function"]["arguments"] += call["function"].get("arguments", "")
                else:
                    calls.append({name: value for name, value in call.items() if name != "index"})
            message |= delta
            kind = {"text": text} if "text" in choice else {"message": message}
            whole["choices"] = [{**choice, **kind}]
        whole |= {name: value for name, value in step.items() if name != "choices"}
    return whole


class OpenAIServer:
    """`script` gives, for a request's body, what is sent: chunks, seconds to wait, or a whole other response."""

    def __init__(self, *models: str, script: Script | None = None) -> None:
        self.models = models or ("theirs",)
        self.owned_by = "vllm"
        self.max_model_len: int | None = None
        self.script: Script = script or (lambda body: text_chunks("Hel", "lo"))
        self.metrics: str | None = None
        self.is_well = True
        self.num_probes = 0
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.num_abandoned = 0
        self.url = ""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/metrics", self._metrics),
                Route("/v1/chat/completions", self._answer, methods=["POST"]),
                Route("/v1/completions", self._answer, methods=["POST"]),
                Route("/v1/embeddings", self._answer, methods=["POST"]),
            ]
        )

    async def _models(self, request: Request) -> Response:
        self.num_probes += 1
        if not self.is_well:
            return Response(status_code=503)
        described = {"owned_by": self.owned_by, "max_model_len": self.max_model_len}
        return JSONResponse({"object": "list", "data": [{"id": name, **described} for name in self.models]})

    async def _metrics(self, request: Request) -> Response:
        return Response(status_code=404) if self.metrics is None else PlainTextResponse(self.metrics)

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.url.path)
        steps = self.script(body)
        if steps and isinstance(steps[0], Response):
            return steps[0]
        if not body.get("stream"):
            return JSONResponse(whole_answer(copy.deepcopy(steps)))

        async def events() -> AsyncIterator[bytes]:
            is_whole = False
            try:
                for step in steps:
                    if isinstance(step, float):
                        await asyncio.sleep(step)
                    elif isinstance(step, asyncio.Event):
                        await step.wait()
                    else:
                        yield b"data: " + json.dumps(step, ensure_ascii=False).encode() + b"\n\n"
                is_whole = True
                yield b"data: [DONE]\n\n"
            finally:
                self.num_abandoned += not is_whole

        return StreamingResponse(events(), media_type="text/event-stream")


@asynccontextmanager
async def serving(*servers: OpenAIServer) -> AsyncIterator[None]:
    """Each on a port of its own, on this event loop; a server's `url` says where."""
    async with AsyncExitStack() as stack:
        for server in servers:
            server.url = await stack.enter_async_context(listening(server.app()))
        yield
