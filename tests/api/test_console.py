"""The console's files and what its pages ask: whom they let in, under which policy, and what is refused."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.api.app import create_app
from penstock.api.console import HistoryEndpoints
from penstock.core.gateway_config import ServerConfig
from penstock.core.identity import Scope
from penstock.gateway.history.history import History
from penstock.gateway.history.requests import RecentRequests
from tests.api.tenant_server import TenantServer
from tests.gateway.fake_engine import FakeEngine, script_text

MESSAGES = [{"role": "user", "content": "Hi"}]
FOLDER = resources.files("penstock.api").joinpath("static/console")


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[TenantServer]:
    server = TenantServer(tmp_path, FakeEngine(script_text("fine")), static_key="root")
    history = History(server.gateway.metrics, server.engine)
    server.app = create_app(
        server.gateway,
        ServerConfig(),
        tenants=server.tenants,
        more_routes=HistoryEndpoints(history, RecentRequests()).routes(),
    )
    yield server
    await server.close()


@pytest.mark.parametrize("page_path", ["/console", "/"])
async def test_the_pages_and_their_files_need_no_key_and_have_a_strict_policy(
    server: TenantServer, page_path: str
) -> None:
    async with server.client() as client:
        page = await client.get(page_path)
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        named = re.findall(r'(?:src|href)="(/console/[^"]+)"', page.text)
        assert len(named) >= 3
        for path in (page_path, "/console/", *named):
            answer = await client.get(path)
            assert answer.status_code == 200, path
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy
            assert "frame-ancestors 'none'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"


async def test_the_page_has_nothing_that_the_policy_would_stop(server: TenantServer) -> None:
    for entry in FOLDER.iterdir():
        text = entry.read_text()
        if entry.name.endswith(".html"):
            assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", text), entry.name
        if entry.name.endswith(".js"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\(|new Function", text), (
                entry.name
            )
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), entry.name


async def test_every_file_that_a_script_imports_is_there(server: TenantServer) -> None:
    async with server.client() as client:
        for entry in FOLDER.iterdir():
            if not entry.name.endswith(".js"):
                continue
            for name in re.findall(r'(?:from|module:) "\./([\w.]+)"', entry.read_text()):
                assert (await client.get(f"/console/{name}")).status_code == 200, f"{entry.name} wants {name}"


async def test_a_browser_that_has_a_file_is_told_so(server: TenantServer) -> None:
    async with server.client() as client:
        etag = (await client.get("/console/console.js")).headers["etag"]
        again = await client.get("/console/console.js", headers={"if-none-match": etag})
    assert (again.status_code, again.content) == (304, b"")


async def test_no_path_leads_out_of_the_folder(server: TenantServer) -> None:
    async with server.client() as client:
        for name in ("%2e%2e%2fchat.html", "%2e%2e", "nothing.js", "console.js%00", "a/b.js"):
            assert (await client.get(f"/console/{name}")).status_code == 404, name


async def test_what_the_console_shows_needs_the_scope_admin(server: TenantServer) -> None:
    issued = await server.make_key(Scope.INFERENCE)
    for path in ("/admin/console", "/admin/history", "/admin/requests"):
        async with server.client() as client:
            assert (await client.get(path)).status_code == 401
        async with server.client(issued.secret) as client:
            refused = await client.get(path)
            assert refused.status_code == 403
            assert "scope 'admin'" in refused.json()["error"]["message"]
        async with server.client("root") as client:
            shown = await client.get(path)
            assert shown.status_code == 200
            assert shown.headers["cache-control"] == "no-store"


async def test_a_cookie_is_no_key(server: TenantServer) -> None:
    async with server.client() as client:
        answer = await client.get("/admin/console", headers={"cookie": "penstock-key=root; key=root"})
    assert answer.status_code == 401


async def test_history_refuses_what_it_does_not_know(server: TenantServer) -> None:
    async with server.client("root") as client:
        for query, param in (("span=year", "span"), ("modle=x", "modle")):
            refused = await client.get(f"/admin/history?{query}")
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == param
        assert (await client.get("/admin/history?span=day&model=no-such&tier=x")).status_code == 200


async def test_refusals_are_counted_by_reason(server: TenantServer) -> None:
    async with server.client() as client:
        await client.get("/admin/console")
        await client.get("/no-such-path")
        await client.put("/v1/models")
        assert (await client.get("/console/sign-in")).json() == {
            "needs_key": True,
            "provider": None,
            "object": "sign_in",
        }
    async with server.client("root") as client:
        await client.post("/v1/chat/completions", json={"model": "none", "messages": MESSAGES})
        await client.post("/v1/messages", json={})
        metrics = (await client.get("/metrics")).text
    expected = {
        ("401", "invalid_api_key"): 3,
        ("404", "model_not_found"): 1,
        ("400", "invalid_request_error"): 1,
    }
    assert server.gateway.metrics.refusals == expected
    assert 'penstock_http_refusals_total{reason="invalid_api_key",status="401"} 3.0' in metrics


async def test_a_sign_in_that_is_not_offered_or_not_whole_is_refused(server: TenantServer) -> None:
    whole = {"code": "c", "code_verifier": "v" * 43, "nonce": "n" * 16, "redirect_uri": "http://x/console"}
    async with server.client() as client:
        assert (await client.post("/console/sign-in", json=whole)).status_code == 404
        for change in ({"code": ""}, {"code_verifier": "short"}, {"nonce": None}, {"more": 1}):
            assert (await client.post("/console/sign-in", json=whole | change)).status_code == 400, change


def test_the_playground_and_the_console_do_not_style_each_other() -> None:
    """Both style sheets are on one page: a class of one must not change what the other shows."""

    def classes(name: str) -> set[str]:
        return set(re.findall(r"\.([a-z][\w-]*)", FOLDER.joinpath(name).read_text()))

    shared = {"brand", "check", "choice", "danger", "field", "mono", "problem", "row"}
    assert classes("console.css") & classes("playground.css") <= shared
