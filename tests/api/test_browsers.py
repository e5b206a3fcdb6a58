"""Pages of other sites cannot act through the browser of someone who runs an open server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.api.http.authenticate import is_foreign_page
from penstock.core.identity import Scope
from tests.api.tenant_server import TenantServer

OWN = "127.0.0.1:8000"


@pytest.mark.parametrize(
    ("headers", "is_foreign", "is_foreign_to_admin"),
    [
        # Programs say nothing of the sort, whatever name they call us by.
        ({"host": OWN}, False, False),
        ({"host": "penstock.internal:8000"}, False, False),
        # Our own page, with and without a browser that says so.
        ({"host": OWN, "origin": f"http://{OWN}"}, False, False),
        ({"host": OWN, "origin": f"http://{OWN}", "sec-fetch-site": "same-origin"}, False, False),
        ({"host": "localhost:8000", "sec-fetch-site": "none"}, False, False),
        ({"host": "[::1]:8000", "origin": "http://[::1]:8000"}, False, False),
        # Pages of others.
        ({"host": OWN, "origin": "https://evil.example"}, True, True),
        ({"host": OWN, "origin": "http://127.0.0.1:3000"}, True, True),
        ({"host": OWN, "origin": "null"}, True, True),
        ({"host": OWN, "origin": "http://[broken"}, True, True),
        ({"host": OWN, "sec-fetch-site": "cross-site"}, True, True),
        ({"host": OWN, "sec-fetch-site": "same-site"}, True, True),
        ({"origin": "https://evil.example"}, True, True),
        # A name that may have been made to point here.
        (
            {"host": "evil.example", "origin": "http://evil.example", "sec-fetch-site": "same-origin"},
            False,
            True,
        ),
        ({"host": "evil.example", "sec-fetch-site": "same-origin"}, False, True),
        # A proxy that changes the host does not make our own page a stranger.
        ({"host": OWN, "origin": "https://llm.example", "sec-fetch-site": "same-origin"}, False, False),
    ],
)
def test_whose_page_it_is(headers: dict[str, str], is_foreign: bool, is_foreign_to_admin: bool) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert is_foreign_page(raw, needs_local_name=False) is is_foreign
    assert is_foreign_page(raw, needs_local_name=True) is is_foreign_to_admin


async def test_an_open_server_does_nothing_for_a_foreign_page(tmp_path: Path) -> None:
    server = TenantServer(tmp_path, is_open=True)
    async with server.client() as client:
        client.base_url = "http://localhost:8000"
        forged = {"origin": "https://evil.example", "content-type": "text/plain"}
        answer = await client.post("/admin/keys", content='{"name": "k"}', headers=forged)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
        assert (await client.get("/admin/keys")).json()["data"] == []
        assert (await client.post("/admin/keys", content='{"name": "k"}')).status_code == 200
    await server.close()


async def test_a_key_is_good_from_any_page(tmp_path: Path) -> None:
    server = TenantServer(tmp_path, is_open=True)
    issued = await server.make_key()
    async with server.client(issued.secret) as client:
        assert (await client.get("/v1/models", headers={"origin": "https://app.example"})).status_code == 200
    await server.close()


@pytest.mark.parametrize(
    ("listens_on", "host", "path", "status"),
    [
        # A page under a name that was rebound to us reads like a program: without a header that tells.
        ("127.0.0.1", "evil.example:8000", "/v1/models", 403),
        ("127.0.0.1", "evil.example:8000", "/admin/keys", 403),
        ("::1", "evil.example:8000", "/metrics", 403),
        ("::ffff:127.0.0.1", "evil.example:8000", "/v1/models", 403),  # IPv4 on a dual-stack socket
        ("10.0.0.7", "evil.example:8000", "/admin/keys", 403),
        ("127.0.0.1", "localhost:8000", "/v1/models", 200),
        ("127.0.0.1", "penstock.localhost", "/v1/models", 200),
        ("127.0.0.1", "127.0.0.1:8000", "/admin/keys", 200),
        ("::1", "[::1]:8000", "/admin/keys", 200),
        # Where others may come in by design, a name is fine for everything but administration.
        ("10.0.0.7", "penstock.internal:8000", "/v1/models", 200),
        ("10.0.0.7", "10.0.0.7:8000", "/admin/keys", 200),
    ],
)
async def test_an_open_server_is_not_read_by_a_rebound_name(
    tmp_path: Path, listens_on: str, host: str, path: str, status: int
) -> None:
    server = TenantServer(tmp_path, is_open=True)
    app = server.app

    async def at_address(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"server": (listens_on, 8000)}, receive, send)

    server.app = at_address
    async with server.client() as client:
        assert (await client.get(path, headers={"host": host})).status_code == status
    issued = await server.make_key(Scope.ADMIN)
    async with server.client(issued.secret) as client:
        assert (await client.get(path, headers={"host": host})).status_code == 200
    await server.close()
