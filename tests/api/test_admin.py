"""The admin API: what it makes, shows, changes and ends; whom it lets in; what it refuses."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from penstock.core.identity import Scope
from tests.api.tenant_server import TenantServer
from tests.gateway.fake_engine import FakeEngine, script_text


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[TenantServer]:
    server = TenantServer(tmp_path, FakeEngine(script_text("fine")), static_key="root")
    yield server
    await server.close()


@pytest_asyncio.fixture
async def admin(server: TenantServer) -> AsyncIterator[httpx.AsyncClient]:
    async with server.client("root") as client:
        yield client


async def made(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


async def test_from_an_organisation_to_an_answer(server: TenantServer, admin: httpx.AsyncClient) -> None:
    organization = await made(admin, "/admin/organizations", name="Acme")
    workspace = await made(admin, "/admin/workspaces", name="Prod", organization_id=organization["id"])
    key = await made(
        admin,
        "/admin/keys",
        name="ci",
        workspace_id=workspace["id"],
        scopes=["inference"],
        best_tier="priority",
        allowed_models=["bytes"],
        expires_at=time.time() + 3600,
    )
    assert key["object"] == "key"
    assert key["status"] == "active"
    assert key["created_by"] == "static"
    assert key["secret"].startswith(key["prefix"])
    async with server.client(key["secret"]) as client:
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
    assert server.engine.added[0].tenant == workspace["id"]


async def test_the_secret_is_shown_once(admin: httpx.AsyncClient) -> None:
    answer = await admin.post("/admin/keys", json={"name": "k"})
    assert answer.headers["cache-control"] == "no-store"
    key = answer.json()
    secret = key.pop("secret")
    assert (await admin.get(f"/admin/keys/{key['id']}")).json() == key
    for path in ("/admin/keys", f"/admin/keys/{key['id']}", "/admin/audit"):
        assert secret not in (await admin.get(path)).text
        assert "digest" not in (await admin.get(path)).text
    changed = await admin.patch(f"/admin/keys/{key['id']}", json={"name": "k2"})
    assert secret not in changed.text


async def test_a_key_changes_and_ends(admin: httpx.AsyncClient) -> None:
    key = await made(admin, "/admin/keys", name="k", allowed_models=["a"])
    path = f"/admin/keys/{key['id']}"
    changed = await admin.patch(path, json={"allowed_models": None, "scopes": ["usage"], "expires_at": None})
    assert (changed.json()["allowed_models"], changed.json()["scopes"]) == (None, ["usage"])
    revoked = await admin.delete(path)
    assert (revoked.status_code, revoked.json()["status"]) == (200, "revoked")
    assert (await admin.delete(path)).status_code == 409
    assert (await admin.patch(path, json={"name": "x"})).status_code == 409
    assert (await admin.get(path)).json()["status"] == "revoked"


async def test_the_gateway_that_revokes_a_key_refuses_it_at_once(
    server: TenantServer, admin: httpx.AsyncClient
) -> None:
    key = await made(admin, "/admin/keys", name="k")
    async with server.client(key["secret"]) as client:
        assert (await client.get("/v1/models")).status_code == 200
        await admin.delete(f"/admin/keys/{key['id']}")
        answer = await client.get("/v1/models")
    assert answer.status_code == 401
    assert "revoked" in answer.json()["error"]["message"]


async def test_workspaces_and_organisations_are_renamed_and_archived(admin: httpx.AsyncClient) -> None:
    organization = await made(admin, "/admin/organizations", name="Acme")
    workspace = await made(admin, "/admin/workspaces", name="W", organization_id=organization["id"])
    for path in (f"/admin/workspaces/{workspace['id']}", f"/admin/organizations/{organization['id']}"):
        assert (await admin.patch(path, json={"name": "New"})).json()["name"] == "New"
        assert (await admin.delete(path)).json()["archived_at"] is not None
        assert (await admin.delete(path)).status_code == 409
        assert (await admin.get(path)).json()["name"] == "New"
    assert (await admin.delete("/admin/workspaces/default")).status_code == 409


async def test_lists_come_in_pages(admin: httpx.AsyncClient) -> None:
    ids = [(await made(admin, "/admin/keys", name=f"k{number}"))["id"] for number in range(5)]
    seen: list[str] = []
    parameters: dict[str, Any] = {"limit": 2}
    while True:
        page = (await admin.get("/admin/keys", params=parameters)).json()
        assert page["object"] == "list"
        page_ids = [key["id"] for key in page["data"]]
        assert (page["first_id"], page["last_id"]) == (page_ids[0], page_ids[-1])
        seen += page_ids
        if not page["has_more"]:
            break
        parameters["after"] = page["last_id"]
    assert sorted(seen) == sorted(ids)
    for workspace_id in ("ws_none", "\0", ""):
        empty = (await admin.get("/admin/keys", params={"workspace_id": workspace_id})).json()
        assert (empty["data"], empty["first_id"], empty["has_more"]) == ([], None, False)
    assert len((await admin.get("/admin/organizations")).json()["data"]) == 1
    only = {"organization_id": "default"}
    assert len((await admin.get("/admin/workspaces", params=only)).json()["data"]) == 1


async def test_what_was_done_is_in_the_audit_log_with_who_and_which_request(admin: httpx.AsyncClient) -> None:
    answer = await admin.post("/admin/keys", json={"name": "k"})
    key_id, request_id = answer.json()["id"], answer.headers["x-request-id"]
    await admin.patch(f"/admin/keys/{key_id}", json={"name": "k2"})
    await admin.patch(f"/admin/keys/{key_id}", json={"name": ""})  # refused, so nothing was done
    log = (await admin.get("/admin/audit", params={"target": key_id})).json()
    assert [(entry["action"], entry["actor"]) for entry in log["data"]] == [
        ("key.update", "static"),
        ("key.create", "static"),
    ]
    assert log["data"][1]["request_id"] == request_id
    assert (log["data"][0]["before"], log["data"][0]["after"]) == ({"name": "k"}, {"name": "k2"})
    older = await admin.get("/admin/audit", params={"limit": 1, "after": log["first_id"]})
    assert [entry["id"] for entry in older.json()["data"]] == [log["last_id"]]


@pytest.mark.parametrize("scopes", [(Scope.INFERENCE,), (Scope.USAGE, Scope.METRICS)])
async def test_only_admins_come_here(
    server: TenantServer, admin: httpx.AsyncClient, scopes: tuple[Scope, ...]
) -> None:
    issued = await server.make_key(*scopes)
    async with server.client(issued.secret) as client:
        for method, path in (
            ("GET", "/admin/organizations"),
            ("POST", "/admin/organizations"),
            ("GET", "/admin/workspaces/default"),
            ("PATCH", "/admin/workspaces/default"),
            ("GET", "/admin/keys"),
            ("POST", "/admin/keys"),
            ("GET", f"/admin/keys/{issued.key.id}"),
            ("PATCH", f"/admin/keys/{issued.key.id}"),
            ("DELETE", f"/admin/keys/{issued.key.id}"),
            ("GET", "/admin/audit"),
            ("GET", "/admin/nothing-here"),
        ):
            answer = await client.request(method, path, json={"name": "x", "scopes": ["admin"]})
            assert answer.status_code == 403, path
    audit = (await admin.get("/admin/audit")).json()["data"]
    assert [entry["actor"] for entry in audit] == ["test"], "nothing but the key's making"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "/admin/keys", {}, 400, None),
        ("POST", "/admin/keys", {"name": ""}, 400, "name"),
        ("POST", "/admin/keys", {"name": 5}, 400, "name"),
        ("POST", "/admin/keys", {"name": "k", "expire_at": 1}, 400, None),
        ("POST", "/admin/keys", {"name": "k", "expires_at": 1}, 400, "expires_at"),
        ("POST", "/admin/keys", {"name": "k", "expires_at": "soon"}, 400, "expires_at"),
        ("POST", "/admin/keys", {"name": "k", "scopes": ["root"]}, 400, "scopes"),
        ("POST", "/admin/keys", {"name": "k", "scopes": []}, 400, "scopes"),
        ("POST", "/admin/keys", {"name": "k", "best_tier": "gold"}, 400, "best_tier"),
        ("POST", "/admin/keys", {"name": "k", "allowed_models": []}, 400, "allowed_models"),
        ("POST", "/admin/keys", {"name": "k", "workspace_id": "ws_none"}, 404, None),
        ("POST", "/admin/keys", {"name": "k", "workspace_id": "a\0b"}, 404, None),
        ("POST", "/admin/keys", {"name": "k", "allowed_models": ["a\0b"]}, 400, "allowed_models"),
        ("POST", "/admin/keys", [], 400, None),
        ("POST", "/admin/workspaces", {"name": "w", "organization_id": "org_none"}, 404, None),
        ("POST", "/admin/organizations", {"name": "a\u0000b"}, 400, "name"),
        ("PATCH", "/admin/keys/key_none", {"name": "k"}, 404, None),
        ("PATCH", "/admin/keys/key_none", {}, 400, None),
        ("PATCH", "/admin/keys/key_none", {"prefix": "x"}, 400, None),
        ("GET", "/admin/keys/key_none", None, 404, None),
        ("GET", "/admin/keys/%00", None, 404, None),
        ("GET", "/admin/keys?after=%00", None, 400, "after"),
        ("GET", "/admin/keys?after=%ff", None, 400, "after"),
        ("GET", "/admin/keys?limit=0", None, 400, "limit"),
        ("GET", "/admin/keys?limit=ten", None, 400, "limit"),
        ("GET", "/admin/keys?limit=99999999999999999999", None, 400, "limit"),
        ("GET", "/admin/keys?limit=٣", None, 400, "limit"),
        ("GET", "/admin/keys?after=nothing", None, 400, "after"),
        ("GET", "/admin/audit?after=x", None, 400, "after"),
        ("GET", "/admin/audit?after=99999999999999999999999", None, 400, "after"),
        ("PUT", "/admin/keys", None, 405, None),
        ("DELETE", "/admin/organizations/default", None, 409, None),
    ],
)
async def test_bad_input_is_an_error_in_openais_shape(
    admin: httpx.AsyncClient, method: str, path: str, body: Any, status: int, param: str | None
) -> None:
    answer = await admin.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert (await admin.get("/admin/audit")).json()["data"] == []
