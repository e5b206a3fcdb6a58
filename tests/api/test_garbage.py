"""A request leaves no cycles of objects: full garbage collections are rare in a gateway, so that the prompts of
refused requests would fill its memory."""

from __future__ import annotations

import gc
import http.client
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from penstock.api.http.protocol import BoundedHttpProtocol
from penstock.core.errors import Overloaded, PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request
from tests.api.bounded_server import BoundedServed, bounded_server
from tests.api.conftest import direct_client
from tests.gateway.fake_engine import FakeEngine, engine_ready, model_card, script_text

CHAT = [{"role": "user", "content": "hi"}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": ["a", "b"]}),
    "completion stream": ("/v1/completions", {"prompt": ["a", "b"], "stream": True}),
    "echo": ("/v1/completions", {"prompt": ["a", "b"], "echo": True, "logprobs": 2}),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "n": 2}),
    "chat stream": ("/v1/chat/completions", {"messages": CHAT, "n": 2, "stream": True}),
    "messages": ("/v1/messages", {"messages": CHAT, "max_tokens": 8}),
    "messages stream": ("/v1/messages", {"messages": CHAT, "max_tokens": 8, "stream": True}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "responses stream": ("/v1/responses", {"input": "hi", "stream": True}),
    "ollama": ("/api/chat", {"messages": CHAT}),
    "embeddings": ("/v1/embeddings", {"input": ["a", "b"]}),
}


def refuse(request: Request) -> Sequence[TokenEvent | PenstockError]:
    return [Overloaded("full")]


def answer(request: Request) -> Sequence[TokenEvent | PenstockError]:
    if request.pooling is None:
        return script_text("fine")(request)
    return [TokenEvent(request.id, finish_reason=FinishReason.STOP, embedding=b"\0\0\x80?" * 4)]


async def garbage_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[int, Counter[str]]:
    """Status of a request, and the kinds of our own objects that only a garbage collection frees afterwards."""
    await client.post(path, json=body)  # the first request makes what stays
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        status = (await client.post(path, json=body)).status_code
        gc.collect()
        kinds = [type(each) for each in gc.garbage]
        return status, Counter(kind.__name__ for kind in kinds if kind.__module__.startswith("penstock."))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("script", [answer, refuse])
@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_leaves_no_cycles(name: str, script: Any) -> None:
    path, body = REQUESTS[name]
    body = {"model": "bytes", **body}
    engine = FakeEngine(script, ready=engine_ready(model_card(embedding_size=4)))
    async with direct_client(engine) as client:
        status, kinds = await garbage_of(client, path, body)
    assert status == 200 if script is answer else status in (503, 529)
    assert not kinds


def ask_and_close(served: BoundedServed) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    for _ in range(2):
        connection.request("POST", "/v1/completions", b'{"prompt": "hi", "max_tokens": 2}')
        assert connection.getresponse().read()
    connection.request("GET", "/health")
    assert connection.getresponse().read()
    connection.close()


def leave_early(served: BoundedServed) -> None:
    served.engine.script = None  # answers nothing
    served.ask_and_leave("/v1/completions", {"prompt": "hi", "max_tokens": 2})


def are_connections_kept() -> bool:
    return any(isinstance(each, BoundedHttpProtocol) for each in gc.get_objects())


@pytest.mark.parametrize("client", [ask_and_close, leave_early])
def test_a_connection_leaves_no_cycles(client: Any) -> None:
    with bounded_server(FakeEngine(answer)) as served:
        gc.collect()
        gc.disable()
        try:
            client(served)
            served.wait_until(lambda: not served.connections.num_open and not are_connections_kept())
        finally:
            gc.enable()
