"""One workspace's responses do not exist for another, whichever way it asks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest_asyncio

from penstock.api.app import create_app
from penstock.core.errors import StoreUnavailable
from penstock.core.gateway_config import ServerConfig
from penstock.gateway.responses.store import ResponseStore, StoredResponse
from penstock.gateway.store.database import Database
from tests.api.tenant_server import ACTOR, TenantServer
from tests.gateway.fake_engine import FakeEngine, script_text


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[TenantServer]:
    server = TenantServer(tmp_path, FakeEngine(script_text("fine")), static_key="root")
    yield server
    await server.close()


async def client_in_new_workspace(server: TenantServer, name: str) -> httpx.AsyncClient:
    workspace = await server.tenants.directory.create_workspace(ACTOR, name, "default")
    return server.client((await server.make_key(workspace_id=workspace.id)).secret)


async def test_responses_of_another_workspace_do_not_exist(server: TenantServer) -> None:
    async with (
        await client_in_new_workspace(server, "a") as owner,
        await client_in_new_workspace(server, "b") as other,
    ):
        made = (await owner.post("/v1/responses", json={"input": "secret"})).json()
        path = f"/v1/responses/{made['id']}"
        unknown = "/v1/responses/resp_" + "0" * 32
        for method, suffix in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            answers = [await other.request(method, each + suffix) for each in (path, unknown)]
            assert [answer.status_code for answer in answers] == [404, 404]
            messages = [answer.json()["error"]["message"] for answer in answers]
            assert messages[0].replace(made["id"], "") == messages[1].replace(unknown.rpartition("/")[2], "")
        continued = await other.post("/v1/responses", json={"input": "x", "previous_response_id": made["id"]})
        assert continued.status_code == 404
        assert (await owner.get(path)).status_code == 200
        assert len(server.engine.added) == 1


async def test_models_are_those_that_a_key_may_use(server: TenantServer) -> None:
    allowed = await server.make_key(allowed_models=("bytes",))
    barred = await server.make_key(allowed_models=("other",))
    async with server.client(allowed.secret) as client:
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["bytes"]
        assert (await client.get("/v1/models/bytes")).status_code == 200
    async with server.client(barred.secret) as client:
        assert (await client.get("/v1/models")).json()["data"] == []
        hidden = await client.get("/v1/models/bytes")
        assert hidden.status_code == 404
        assert hidden.json()["error"]["code"] == "model_not_found"
        unknown = await client.get("/v1/models/never")
        assert unknown.json()["error"]["message"] == hidden.json()["error"]["message"].replace(
            "bytes", "never"
        )
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            assert (await client.post(path, json=body)).status_code == 403
        counted = await client.post("/v1/responses/input_tokens", json={"input": "x"})
        assert counted.status_code == 403


async def test_a_background_response_that_cannot_be_stored_does_not_run(server: TenantServer) -> None:
    class NoRoom(ResponseStore):
        async def add(self, response: StoredResponse) -> None:
            raise StoreUnavailable("no room")

    app = create_app(
        server.gateway, ServerConfig(), tenants=server.tenants, responses=NoRoom(Database("sqlite://"))
    )
    server.engine.script, server.app = None, app
    async with server.client((await server.make_key()).secret) as client:
        answer = await client.post("/v1/responses", json={"input": "x", "background": True})
    assert answer.status_code == 503
    assert server.gateway.num_live == 0
    assert not server.engine.streams
