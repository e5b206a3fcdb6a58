"""Responses in the background whose gateway was killed: whoever asks for one is told, and waits no longer."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from penstock.api.app import create_app
from penstock.core.errors import StoreUnavailable
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.core.request import FinishReason
from penstock.gateway.gateway import Gateway
from penstock.gateway.responses import service as responses_service
from penstock.gateway.responses.service import LEASE_S
from penstock.gateway.responses.store import ResponseStore
from penstock.gateway.store.database import Database, sqlite_url
from tests.gateway.fake_engine import FakeEngine, script_text

BACKGROUND = {"model": "bytes", "input": "x", "background": True}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(sqlite_url(tmp_path))
    yield database
    database.close()


def gateway_process(database: Database, engine: FakeEngine) -> httpx.AsyncClient:
    """One of several that share a database."""
    gateway = Gateway(engine, GatewayConfig())
    app = create_app(gateway, ServerConfig(), responses=ResponseStore(database))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def look_up(client: httpx.AsyncClient, response_id: str) -> Any:
    return (await client.get(f"/v1/responses/{response_id}")).json()


def kill_a_gateway_with_a_response(folder: Path) -> str:
    """The id of a response that a process began, which then died without a word."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:

        async def begin() -> None:
            client = gateway_process(Database(sqlite_url(folder)), FakeEngine())
            made = (await client.post("/v1/responses", json=BACKGROUND)).json()
            os.write(writing, made["id"].encode())
            os._exit(9)

        asyncio.run(begin())
    os.close(writing)
    with os.fdopen(reading) as pipe:
        response_id = pipe.read()
    os.waitpid(child, 0)
    return response_id


def test_a_response_of_a_killed_gateway_has_failed(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(responses_service, "LEASE_S", 0.3)
        response_id = kill_a_gateway_with_a_response(tmp_path)
    assert response_id

    async def ask() -> None:
        async with gateway_process(database, FakeEngine(script_text("on"))) as client:
            deadline = time.monotonic() + 60
            while (found := await look_up(client, response_id))["status"] == "in_progress":
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            assert found["status"] == "failed"
            assert found["error"]["code"] == "server_error"
            cancelled = await client.post(f"/v1/responses/{response_id}/cancel")
            assert cancelled.json()["status"] == "failed"
            again = {"model": "bytes", "input": "y", "previous_response_id": response_id}
            assert (await client.post("/v1/responses", json=again)).json()["status"] == "completed"

    asyncio.run(ask())


async def test_a_response_that_is_still_being_made_is_not_given_up(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_at, renewals = time.time(), asyncio.Queue[float]()
    clock = AsyncMock(return_value=began_at)
    monkeypatch.setattr(ResponseStore, "time", clock)
    monkeypatch.setattr(responses_service, "RENEWAL_S", 0.001)
    renew = ResponseStore.renew

    async def noted(store: ResponseStore, names: frozenset[str], lease_until: float) -> frozenset[str]:
        wanted = await renew(store, names, lease_until)
        renewals.put_nowait(lease_until)
        return wanted

    monkeypatch.setattr(ResponseStore, "renew", noted)
    engine = FakeEngine()
    async with gateway_process(database, engine) as maker, gateway_process(database, FakeEngine()) as other:
        made = (await maker.post("/v1/responses", json=BACKGROUND)).json()
        for now in (began_at + 0.9 * LEASE_S, began_at + 1.8 * LEASE_S):  # longer than its first lease
            clock.return_value = now
            while await renewals.get() < now + LEASE_S:
                pass
        assert (await look_up(other, made["id"]))["status"] == "in_progress"
        await maker.post(f"/v1/responses/{made['id']}/cancel")
        assert (await look_up(other, made["id"]))["status"] == "cancelled"


async def test_an_outage_of_the_store_costs_no_outcome(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses_service, "STORED_AGAIN_S", 0.001, raising=False)
    began_at, refused = time.time(), asyncio.Queue[str]()
    clock = AsyncMock(return_value=began_at)
    monkeypatch.setattr(ResponseStore, "time", clock)
    engine = FakeEngine()
    async with gateway_process(database, engine) as client:
        made = (await client.post("/v1/responses", json=BACKGROUND)).json()["id"]
        with monkeypatch.context() as outage:

            async def refuse(*_: object) -> None:
                refused.put_nowait("")
                raise StoreUnavailable("The database is away.")

            outage.setattr(ResponseStore, "replace", refuse)
            engine.emit(f"{made.removeprefix('resp_')}-0", *b"ab", finish_reason=FinishReason.STOP)
            await refused.get()
            clock.return_value = began_at + 2 * LEASE_S
            assert (await look_up(client, made))["status"] == "in_progress"
        async with asyncio.timeout(60):
            while (found := await look_up(client, made))["status"] == "in_progress":
                await asyncio.sleep(0.001)
        assert found["status"] == "completed"
        assert found["output"][0]["content"][0]["text"] == "ab"


@pytest.mark.parametrize("ending", ["cancel", "delete"])
async def test_a_response_that_another_process_ends_is_generated_no_further(
    database: Database, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(responses_service, "RENEWAL_S", 0.001)
    engine = FakeEngine()
    async with gateway_process(database, engine) as maker, gateway_process(database, FakeEngine()) as other:
        ended = (await maker.post("/v1/responses", json=BACKGROUND)).json()["id"]
        kept = (await maker.post("/v1/responses", json=BACKGROUND)).json()["id"]
        if ending == "cancel":
            assert (await other.post(f"/v1/responses/{ended}/cancel")).json()["status"] == "cancelled"
        else:
            assert (await other.delete(f"/v1/responses/{ended}")).json()["deleted"]
        async with asyncio.timeout(60):
            while not engine.aborted:
                await asyncio.sleep(0.001)
        assert engine.aborted == [f"{ended.removeprefix('resp_')}-0"]
        await maker.post(f"/v1/responses/{kept}/cancel")
