"""Responses in the background that are also streamed: read, left, taken up again, in this process or another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.api.app import create_app
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.core.request import FinishReason
from penstock.gateway.gateway import Gateway
from penstock.gateway.responses import service as responses_service
from penstock.gateway.responses.store import ResponseStore, StoredResponse
from penstock.gateway.store.database import Database
from tests.api.conftest import Serve
from tests.api.scripted import scripted
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.store.ready_made import ready_made_database

STREAMED: Any = {"model": "bytes", "input": "x", "background": True, "stream": True}


def test_a_stream_is_taken_up_where_it_was_left(serve: Serve) -> None:
    served = serve(FakeEngine())
    sdk = served.sdk()
    with sdk.responses.create(**STREAMED) as stream:
        created = next(iter(stream))
        assert created.type == "response.created"
        assert created.response.status == "in_progress"
        response_id = created.response.id
    (request,) = served.engine.added
    loop_events: list[Any] = []
    with sdk.responses.retrieve(response_id, stream=True, starting_after=created.sequence_number) as again:
        engine_emits(served, request.id)
        loop_events = list(again)
    assert [event.sequence_number for event in loop_events] == list(range(1, 1 + len(loop_events)))
    assert loop_events[0].type == "response.in_progress"
    assert loop_events[-1].type == "response.completed"
    assert loop_events[-1].response.output_text == "ab"
    later = list(sdk.responses.retrieve(response_id, stream=True))
    assert [event.sequence_number for event in later] == list(range(len(loop_events) + 1))
    assert later[1:] == loop_events
    tail = list(sdk.responses.retrieve(response_id, stream=True, starting_after=later[-2].sequence_number))
    assert [event.type for event in tail] == ["response.completed"]
    assert list(sdk.responses.retrieve(response_id, stream=True, starting_after=10_000)) == []
    assert sdk.responses.retrieve(response_id).output_text == "ab"
    sdk.responses.delete(response_id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(response_id, stream=True)


def engine_emits(served: Any, request_id: str) -> None:
    """The answer "ab", from the server's own loop, which the callbacks belong to."""
    stream = served.engine.streams[request_id]
    loop = served_loop(served)
    loop.call_soon_threadsafe(served.engine.emit, request_id, *b"a")
    loop.call_soon_threadsafe(lambda: served.engine.emit(request_id, *b"b", finish_reason=FinishReason.STOP))
    assert stream.request.id == request_id


def served_loop(served: Any) -> asyncio.AbstractEventLoop:
    (live,) = served.gateway._live
    loop: asyncio.AbstractEventLoop = live._waiter.get_loop()
    return loop


def test_a_response_that_was_not_streamed_is_refused(serve: Serve) -> None:
    sdk = serve(scripted("ok")).sdk()
    response = sdk.responses.create(model="bytes", input="x")
    with pytest.raises(openai.BadRequestError, match="background and stream"):
        sdk.responses.retrieve(response.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        sdk.responses.retrieve(response.id, stream=True, starting_after=-5)


def test_a_cancelled_stream_ends(serve: Serve) -> None:
    served = serve(FakeEngine())
    sdk = served.sdk()
    with sdk.responses.create(**STREAMED) as stream:
        events = iter(stream)
        response_id = next(events).response.id  # type: ignore[union-attr]
        assert sdk.responses.cancel(response_id).status == "cancelled"
        assert [event.type for event in events] == ["response.in_progress"]
    assert served.engine.aborted


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = ready_made_database(tmp_path)
    yield database
    database.close()


class WatchedResponses(ResponseStore):
    """A store that tells when a response has been added, and when events have been read."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.added: asyncio.Queue[str] = asyncio.Queue()
        self.reads: asyncio.Queue[str] = asyncio.Queue()

    async def add(self, response: StoredResponse) -> None:
        await super().add(response)
        self.added.put_nowait(response.id)

    async def events(self, workspace_id: str, response_id: str, first: int) -> list[tuple[int, bytes]]:
        found = await super().events(workspace_id, response_id, first)
        self.reads.put_nowait(response_id)
        return found


def gateway_process(store: ResponseStore, engine: FakeEngine) -> httpx.AsyncClient:
    app = create_app(Gateway(engine, GatewayConfig()), ServerConfig(), responses=store)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def events_of(answer: httpx.Response) -> list[Any]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


async def test_another_process_follows_and_a_restarted_one_replays(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses_service, "FOLLOWED_EVERY_S", 0.01)
    engine = FakeEngine()
    made_by, read_by = WatchedResponses(database), WatchedResponses(database)
    async with gateway_process(made_by, engine) as maker, gateway_process(read_by, FakeEngine()) as other:
        making = asyncio.create_task(maker.post("/v1/responses", json=STREAMED))
        path = f"/v1/responses/{await made_by.added.get()}"
        following = asyncio.create_task(other.get(path, params={"stream": "true"}))
        for _ in range(2):  # the other process waits for news when it asks a second time
            await read_by.reads.get()
        (request,) = engine.added
        engine.emit(request.id, *b"a")
        engine.emit(request.id, *b"b", finish_reason=FinishReason.STOP)
        made, followed = await making, await following
    assert events_of(made) == events_of(followed)
    assert events_of(made)[-1]["type"] == "response.completed"
    async with gateway_process(ResponseStore(database), FakeEngine()) as restarted:
        replayed = await restarted.get(path, params={"stream": "true", "starting_after": "2"})
        assert events_of(replayed) == events_of(made)[3:]


async def test_the_stream_of_a_lost_response_ends_with_its_failure(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses_service, "LEASE_S", 0.05)
    monkeypatch.setattr(responses_service, "FOLLOWED_EVERY_S", 0.01)
    store = WatchedResponses(database)
    maker, other = gateway_process(store, FakeEngine()), gateway_process(store, FakeEngine())
    making = asyncio.create_task(maker.post("/v1/responses", json=STREAMED))
    path = f"/v1/responses/{await store.added.get()}"
    followed = await other.get(path, params={"stream": "true"})  # the lease is not renewed in time
    events = events_of(followed)
    assert [event["type"] for event in events][-1] == "response.failed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    again = events_of(await other.get(path, params={"stream": "true"}))
    assert again == events
    making.cancel()
    await asyncio.gather(making, return_exceptions=True)
