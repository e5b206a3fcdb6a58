"""What one workspace keeps does not exist for another: not by id, not in lists, not by a different error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio

from penstock.api.app import create_app
from penstock.core.gateway_config import ServerConfig
from penstock.core.identity import Scope
from penstock.gateway.batches.runner import StoredWork
from penstock.gateway.blobs.blobs import FileFolder
from penstock.gateway.responses.store import ResponseStore
from tests.api.tenant_server import ACTOR, TenantServer
from tests.gateway.fake_engine import FakeEngine, script_text


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[TenantServer]:
    server = TenantServer(tmp_path, FakeEngine(script_text("fine")))
    server.app = create_app(
        server.gateway,
        ServerConfig(),
        tenants=server.tenants,
        work=StoredWork(server.database, FileFolder(tmp_path / "files")),
        responses=ResponseStore(server.database),
    )
    yield server
    await server.close()


async def client_of_new_workspace(server: TenantServer, *scopes: Scope) -> httpx.AsyncClient:
    workspace = await server.tenants.directory.create_workspace(ACTOR, "W")
    return server.client((await server.make_key(*scopes, workspace_id=workspace.id)).secret)


async def made(client: httpx.AsyncClient, path: str, **request: Any) -> str:
    answer = await client.post(path, **request)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def keep_things(client: httpx.AsyncClient) -> dict[str, str]:
    """One of everything that can be kept: what it is found under → its id."""
    chat = {"model": "bytes", "max_tokens": 4, "messages": [{"role": "user", "content": "secret"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    upload = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", json.dumps(line).encode())}}
    file_id = await made(client, "/v1/files", **upload)
    batch = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return {
        "/v1/files": file_id,
        "/v1/batches": await made(client, "/v1/batches", json=batch),
        "/v1/responses": await made(client, "/v1/responses", json={"model": "bytes", "input": "secret"}),
        "/v1/messages/batches": await made(
            client, "/v1/messages/batches", json={"requests": [{"custom_id": "a", "params": chat}]}
        ),
        "/v1/chat/completions": await made(client, "/v1/chat/completions", json=chat | {"store": True}),
        "/v1/conversations": await made(
            client,
            "/v1/conversations",
            json={"items": [{"role": "user", "content": "secret", "id": "msg_1"}]},
        ),
        "/v1/uploads": await made(
            client, "/v1/uploads", json={"bytes": 6, "filename": "in.jsonl", "purpose": "batch"}
        ),
    }


# What is done with an id, by what it is an id of. Reading comes first; what ends things comes last.
USES = {
    "/v1/files": [("GET", ""), ("GET", "/content"), ("DELETE", "")],
    "/v1/batches": [("GET", ""), ("POST", "/cancel")],
    "/v1/responses": [("GET", ""), ("GET", "/input_items"), ("DELETE", "")],
    "/v1/messages/batches": [("GET", ""), ("GET", "/results"), ("POST", "/cancel"), ("DELETE", "")],
    "/v1/chat/completions": [("GET", ""), ("GET", "/messages"), ("POST", ""), ("DELETE", "")],
    "/v1/conversations": [
        *[("GET", ""), ("GET", "/items"), ("GET", "/items/msg_1"), ("POST", ""), ("POST", "/items")],
        *[("DELETE", "/items/msg_1"), ("DELETE", "")],
    ],
    "/v1/uploads": [("POST", "/parts"), ("POST", "/complete"), ("POST", "/cancel")],
}

BODIES: dict[str, Any] = {
    "": {"metadata": {"a": "b"}},
    "/items": {"items": [{"role": "user", "content": "a"}]},
    "/complete": {"part_ids": ["part_1"]},
}


async def exists(client: httpx.AsyncClient, path: str, row_id: str) -> bool:
    if path == "/v1/uploads":  # which nobody can look at
        return (await client.post(f"{path}/{row_id}/cancel")).status_code == 200
    return (await client.get(f"{path}/{row_id}")).status_code == 200


def comparable(answer: httpx.Response, row_id: str) -> tuple[int, str]:
    """Without what differs between any two answers: the id asked for, and the request's own."""
    request_id = answer.headers.get("request-id") or answer.headers.get("x-request-id", "")
    return answer.status_code, answer.text.replace(row_id, "ID").replace(request_id, "REQUEST")


async def test_another_workspaces_ids_are_like_ids_that_do_not_exist(server: TenantServer) -> None:
    owner, stranger = await client_of_new_workspace(server), await client_of_new_workspace(server)
    async with owner, stranger:
        kept = await keep_things(owner)
        for path, row_id in kept.items():
            start, _, letters = row_id.rpartition("_")
            missing_id = f"{start}_{letters[::-1]}"
            for method, action in USES[path]:
                body = {"json": BODIES.get(action, {})} if method == "POST" else {}
                foreign = await stranger.request(method, f"{path}/{row_id}{action}", **body)
                missing = await stranger.request(method, f"{path}/{missing_id}{action}", **body)
                assert foreign.status_code == 404, (method, path, action, foreign.text)
                assert comparable(foreign, row_id) == comparable(missing, missing_id)
            assert await exists(owner, path, row_id), "a stranger's requests change nothing"


async def test_lists_show_the_callers_workspace_only(server: TenantServer) -> None:
    owner, stranger = await client_of_new_workspace(server), await client_of_new_workspace(server)
    async with owner, stranger:
        kept = await keep_things(owner)
        for path in ("/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/chat/completions"):
            own = (await owner.get(path)).json()["data"]
            assert kept[path] in [row["id"] for row in own]
            foreign = (await stranger.get(path)).json()["data"]
            assert foreign == []


async def test_another_workspaces_ids_cannot_be_used_in_requests(server: TenantServer) -> None:
    owner, stranger = await client_of_new_workspace(server), await client_of_new_workspace(server)
    async with owner, stranger:
        kept = await keep_things(owner)
        batch = {
            "input_file_id": kept["/v1/files"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        assert (await stranger.post("/v1/batches", json=batch)).status_code in (400, 404)
        follow_up = {"model": "bytes", "input": "go on", "previous_response_id": kept["/v1/responses"]}
        assert (await stranger.post("/v1/responses", json=follow_up)).status_code in (400, 404)
        assert (await owner.post("/v1/responses", json=follow_up)).status_code == 200
        for further in (
            {"conversation": kept["/v1/conversations"]},
            {"input": [{"type": "item_reference", "id": f"msg_{kept['/v1/responses'][5:]}_0"}]},
        ):
            request = {"model": "bytes", "input": "go on", **further}
            assert (await stranger.post("/v1/responses", json=request)).status_code == 404


async def test_two_keys_of_one_workspace_share_what_it_keeps(server: TenantServer) -> None:
    workspace = await server.tenants.directory.create_workspace(ACTOR, "W")
    clients = [server.client((await server.make_key(workspace_id=workspace.id)).secret) for _ in range(2)]
    async with clients[0] as first, clients[1] as second:
        kept = await keep_things(first)
        for path, row_id in kept.items():
            assert await exists(second, path, row_id)


async def test_the_prefix_cache_is_salted_by_workspace(server: TenantServer) -> None:
    owner, stranger = await client_of_new_workspace(server), await client_of_new_workspace(server)
    chat = {"messages": [{"role": "user", "content": "the same prompt"}]}
    async with owner, stranger:
        for client in (owner, owner, stranger):
            assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
    first, again, foreign = (request.tenant for request in server.engine.added)
    assert first == again
    assert first != foreign
