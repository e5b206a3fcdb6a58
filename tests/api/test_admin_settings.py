"""/admin/settings: versions, lost races, refusals, and who may change them."""

from __future__ import annotations

import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from penstock.api.app import create_app
from penstock.core.config import ServeConfig
from penstock.core.gateway_config import GatewayConfig, ServerConfig, StoreConfig
from penstock.core.identity import Scope
from penstock.gateway.gateway import Gateway
from penstock.gateway.store.database import Database
from penstock.gateway.tenants.authenticator import Tenants
from penstock.gateway.tenants.directory import Actor
from penstock.gateway.tenants.records import NewKey
from penstock.serve.gateway_state import GatewayState, open_gateway_state
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.store.ready_made import ready_made_database

FILE = "[response_cache]\nttl_s = 2\n[prices.default]\ninput = 0.15\noutput = 0.6\n"


class Server:
    database: Database
    state: GatewayState
    gateway: Gateway
    client: httpx.AsyncClient
    limited: httpx.AsyncClient


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    (tmp_path / "settings.toml").write_text(FILE)
    server = Server()
    server.database = ready_made_database(tmp_path)
    config = ServeConfig(
        gateway=GatewayConfig(settings=str(tmp_path / "settings.toml")),
        store=StoreConfig(data_dir=str(tmp_path)),
    )
    tenants = Tenants(server.database, static_key="root")
    new_key = NewKey(name="k", scopes=(Scope.INFERENCE,))
    secret = (await tenants.directory.create_key(Actor("test"), new_key)).secret
    async with open_gateway_state(config, server.database, is_open=False) as state:
        limiter = state.build_limiter(config.gateway)
        server.gateway = state.build_gateway(FakeEngine(), config.gateway, limiter)
        app = create_app(
            server.gateway, ServerConfig(), tenants=tenants, more_routes=state.routes(server.database)
        )
        server.state = state
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)

        def client(key: str) -> httpx.AsyncClient:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)

        async with client("root") as server.client, client(secret) as server.limited:
            yield server
        await limiter.close()
    await tenants.close()
    server.database.close()


def match(version: int | str) -> dict[str, str]:
    return {"if-match": f'"{version}"' if version != "*" else "*"}


async def test_from_the_file_to_the_database_and_back(server: Server) -> None:
    shown = await server.client.get("/admin/settings")
    assert shown.headers["etag"] == '"0"'
    assert shown.headers["cache-control"] == "no-store"
    assert shown.json()["settings"]["prices"]["default"] == {"input": 0.15, "output": 0.6}
    patch = {"response_cache": {"ttl_s": 9}, "tiers": {"best": "batch"}}
    changed = await server.client.patch("/admin/settings", json=patch, headers=match(0))
    assert changed.status_code == 200, changed.text
    assert changed.headers["etag"] == '"1"'
    assert changed.json()["settings"]["prices"]["default"]["input"] == 0.15, "the file's settings come along"
    assert server.gateway.tiers.best == "batch", "the gateway that answers uses the change at once"
    replaced = await server.client.put(
        "/admin/settings", json={"response_cache": {"ttl_s": 4}}, headers=match(1)
    )
    assert replaced.json()["version"] == 2
    assert server.state.settings.current.response_cache.ttl_s == 4
    reverted = await server.client.post("/admin/settings/revert", json={"version": 1}, headers=match(2))
    assert reverted.json()["version"] == 3
    assert server.state.settings.current.response_cache.ttl_s == 9
    history = (await server.client.get("/admin/settings/versions", params={"limit": 2})).json()
    assert [row["version"] for row in history["data"]] == [3, 2]
    assert history["has_more"]
    older = (await server.client.get("/admin/settings/versions", params={"after": 2})).json()
    assert [row["version"] for row in older["data"]] == [1]
    one = (await server.client.get("/admin/settings/versions/2")).json()
    assert one["settings"] == {"response_cache": {"ttl_s": 4}}
    assert one["actor"] == "static"
    away = await server.client.post("/admin/settings/revert", json={"version": 0}, headers=match("*"))
    assert away.json()["settings"] is None
    assert server.state.settings.current.response_cache.ttl_s == 2
    audit = (await server.client.get("/admin/audit", params={"target": "settings"})).json()["data"]
    assert [entry["after"]["version"] for entry in audit] == [4, 3, 2, 1]


async def test_a_lost_race(server: Server) -> None:
    body = {"response_cache": {"ttl_s": 4}}
    await server.client.put("/admin/settings", json=body, headers=match(0))
    for method, path, content in (
        ("PUT", "/admin/settings", body),
        ("PATCH", "/admin/settings", body),
        ("POST", "/admin/settings/revert", {"version": 1}),
    ):
        lost = await server.client.request(method, path, json=content, headers=match(0))
        assert (lost.status_code, lost.json()["error"]["code"]) == (412, "precondition_failed")
        unsure = await server.client.request(method, path, json=content)
        assert (unsure.status_code, unsure.json()["error"]["code"]) == (428, "precondition_required")
        odd = await server.client.request(method, path, json=content, headers={"if-match": "new"})
        assert odd.status_code == 400
    assert (await server.client.get("/admin/settings")).json()["version"] == 1


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"response_cache": {"ttl_s": -1}}, "response_cache.ttl_s is wrong"),
        ({"nothing": {}}, "there is no setting 'nothing'"),
        ({"guards": {"default_policy": "gone"}}, "which does not exist"),
        ([], "a JSON object"),
        ("text", "a JSON object"),
        (None, "not valid JSON"),
    ],
)
async def test_a_refused_change_changes_nothing(server: Server, body: Any, sentence: str) -> None:
    refused = await server.client.put("/admin/settings", json=body, headers=match("*"))
    assert refused.status_code == 400
    assert sentence in refused.json()["error"]["message"]
    assert (await server.client.get("/admin/settings")).json()["version"] == 0
    assert (await server.client.get("/admin/settings/versions")).json()["data"] == []


async def test_settings_are_read_and_written_as_a_file(server: Server) -> None:
    toml = {"accept": "application/toml"}
    shown = await server.client.get("/admin/settings", headers=toml)
    assert shown.headers["etag"] == '"0"'
    assert tomllib.loads(shown.text) == tomllib.loads(FILE)
    headers = match(0) | {"content-type": "application/toml; charset=utf-8"}
    for text, sentence in (
        ("[limits.key]\nrequests_per_minit = 3\n", "the settings, line 2: there is no setting"),
        ("[limits.key\n", "the settings is not valid TOML"),
        (b"\xff", "not UTF-8"),
    ):
        refused = await server.client.put("/admin/settings", content=text, headers=headers)
        assert refused.status_code == 400
        assert sentence in refused.json()["error"]["message"]
    made = await server.client.put("/admin/settings", content=FILE + "ttl_s=1\n", headers=headers)
    assert made.status_code == 400, "an unknown key of the last table"
    made = await server.client.put("/admin/settings", content=FILE.replace("2", "7"), headers=headers)
    assert (made.status_code, made.json()["version"]) == (200, 1)
    assert server.state.settings.current.response_cache.ttl_s == 7


async def test_bad_requests(server: Server) -> None:
    assert (await server.client.get("/admin/settings/versions/99")).status_code == 404
    assert (await server.client.get("/admin/settings/versions/x")).status_code == 404
    assert (await server.client.get("/admin/settings/versions", params={"limit": 0})).status_code == 400
    missing = await server.client.post("/admin/settings/revert", json={"version": 7}, headers=match("*"))
    assert missing.status_code == 404
    large = {"models": {"aliases": {"a" * (1 << 20): "b"}}}
    assert (await server.client.put("/admin/settings", json=large, headers=match(0))).status_code == 413


async def test_only_administrators(server: Server) -> None:
    for method, path in (
        ("GET", "/admin/settings"),
        ("PUT", "/admin/settings"),
        ("PATCH", "/admin/settings"),
        ("POST", "/admin/settings/revert"),
        ("GET", "/admin/settings/versions"),
        ("GET", "/admin/settings/versions/1"),
    ):
        answer = await server.limited.request(method, path, headers=match("*"), json={})
        assert answer.status_code == 403, (method, path)


async def test_reloading_a_file_that_is_not_used(server: Server) -> None:
    assert (await server.client.post("/admin/settings/reload")).json()["changes"] == []
    await server.client.put("/admin/settings", json={}, headers=match(0))
    refused = await server.client.post("/admin/settings/reload")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
