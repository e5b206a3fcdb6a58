"""Pages of other sites cannot act through the browser of someone who runs an open server."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.api.http.browsers import check_web_settings, is_foreign_page
from penstock.core.errors import ConfigError
from penstock.core.gateway_config import ServerConfig
from penstock.core.identity import Scope
from tests.api.bounded_server import ThreadedEngine, bounded_server
from tests.api.tenant_server import TenantServer
from tests.certificates import self_signed

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


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


async def test_a_browser_on_an_allowed_origin_may_call_and_read(tmp_path: Path) -> None:
    server = TenantServer(tmp_path, config=ServerConfig(allowed_origins=("https://app.example",)))
    issued = await server.make_key()
    page = {"origin": "https://app.example"}
    async with server.client() as client:
        preflight = await client.options("/v1/chat/completions", headers=page | PREFLIGHT)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        assert (
            preflight.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        )
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "access-control-allow-private-network" not in preflight.headers
        inside = await client.options(
            "/v1/messages", headers=page | PREFLIGHT | {"access-control-request-private-network": "true"}
        )
        assert inside.headers["access-control-allow-private-network"] == "true"
        refused = await client.get("/v1/models", headers=page)
        assert refused.status_code == 401  # and the page can read why
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        other = await client.options("/v1/models", headers={"origin": "https://evil.example"} | PREFLIGHT)
        assert other.status_code == 403
        assert "access-control-allow-origin" not in other.headers
        assert "--allowed-origins" in other.text
    async with server.client(issued.secret) as client:
        answer = await client.get("/v1/models", headers=page)
        assert (answer.status_code, answer.headers["vary"]) == (200, "Origin")
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "request-id", "warning", "retry-after-ms", "x-should-retry"} < set(exposed)
        assert {"x-ratelimit-remaining-tokens", "anthropic-ratelimit-input-tokens-reset"} < set(exposed)
        answer = await client.get("/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers
    await server.close()


async def test_any_origin_is_for_servers_with_keys(tmp_path: Path) -> None:
    page = {"origin": "https://app.example"}
    server = TenantServer(tmp_path, config=ServerConfig(allowed_origins=("*",)), is_open=True)
    issued = await server.make_key()
    async with server.client() as client:
        client.base_url = "http://localhost:8000"
        assert (await client.options("/v1/models", headers=page | PREFLIGHT)).status_code == 204
        assert (await client.get("/v1/models", headers=page)).status_code == 403
    async with server.client(issued.secret) as client:
        assert (await client.get("/v1/models", headers=page)).status_code == 200
    await server.close()


async def test_an_open_server_lets_a_named_origin_ask_but_not_administer(tmp_path: Path) -> None:
    server = TenantServer(
        tmp_path, config=ServerConfig(allowed_origins=("https://app.example",)), is_open=True
    )
    page = {"origin": "https://app.example"}
    async with server.client() as client:
        client.base_url = "http://localhost:8000"
        assert (await client.get("/v1/models", headers=page)).status_code == 200
        assert (await client.get("/admin/keys", headers=page)).status_code == 403
    await server.close()


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://app.example/path", ""])
def test_an_origin_that_no_browser_would_send_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="not an origin"):
        check_web_settings(ServerConfig(allowed_origins=(origin,)))


def test_tls_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="cannot be used"):
        check_web_settings(ServerConfig(ssl_certfile=str(tmp_path / "cert.pem")))
    for certificate, key in [("absent.pem", None), ("cert.pem", "absent.pem")]:
        with pytest.raises(ConfigError, match=r"absent.pem cannot be read: No such file"):
            check_web_settings(
                ServerConfig(
                    ssl_certfile=str(tmp_path / certificate), ssl_keyfile=key and str(tmp_path / key)
                )
            )
    with pytest.raises(ConfigError, match="needs a certificate"):
        check_web_settings(ServerConfig(ssl_keyfile=str(tmp_path / "key.pem")))


def test_a_server_with_a_certificate_speaks_https(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    config = ServerConfig(ssl_certfile=str(certificate), ssl_keyfile=str(key))
    check_web_settings(config)
    with bounded_server(
        ThreadedEngine(), config, ssl_certfile=config.ssl_certfile, ssl_keyfile=config.ssl_keyfile
    ) as served:
        trusting = ssl.create_default_context(cafile=str(certificate))
        answer = httpx.get(f"https://127.0.0.1:{served.port}/v1/models", verify=trusting)
        assert answer.status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{served.port}/v1/models")
