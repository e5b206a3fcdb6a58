"""When a server asks for keys, when it stays open, and when it refuses to start."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest

from penstock.cli.serve import check_exposure, keys_were_made
from penstock.core.config import ServeConfig
from penstock.core.errors import ConfigError
from penstock.core.gateway_config import OidcConfig, ServerConfig, StoreConfig, TenantsConfig
from penstock.gateway.tenants.directory import Actor, Directory
from penstock.gateway.tenants.records import NewKey
from penstock.serve.environment import open_database

ACTOR = Actor("test", "request-1")

LOOPBACK = ["127.0.0.1", "::1", "localhost", "127.8.8.8"]
BEYOND = ["0.0.0.0", "::", "192.168.1.5", "example.org", ""]
OIDC = OidcConfig(issuer="https://issuer.example", audience="penstock")


def is_open(
    *, host: str = "127.0.0.1", tenants: TenantsConfig | None = None, has_keys: bool = False, **server: object
) -> bool:
    config = ServerConfig(host=host, **server)  # type: ignore[arg-type]
    return check_exposure(config, tenants or TenantsConfig(), has_keys=has_keys)


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_needs_no_key(host: str, caplog: pytest.LogCaptureFixture) -> None:
    assert is_open(host=host)
    assert caplog.text == ""


@pytest.mark.parametrize("host", BEYOND)
def test_beyond_loopback_a_key_or_a_word_is_needed(host: str) -> None:
    with pytest.raises(ConfigError, match="without a key") as caught:
        is_open(host=host)
    assert "penstock keys create" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="without a key"):
        is_open(host=host, has_keys=True, tenants=TenantsConfig(require_keys=False))
    assert not is_open(host=host, api_key="k")
    assert not is_open(host=host, has_keys=True)
    assert not is_open(host=host, tenants=TenantsConfig(oidc=OIDC))
    assert not is_open(host=host, tenants=TenantsConfig(require_keys=True))


def test_being_open_to_strangers_is_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert is_open(host="0.0.0.0", allow_open=True)
    assert "WARNING" in caplog.text
    assert "asks for no key" in caplog.text


@pytest.mark.parametrize("host", [*LOOPBACK, *BEYOND])
def test_allowing_to_be_open_does_not_switch_keys_off(host: str) -> None:
    assert not is_open(host=host, allow_open=True, api_key="k")
    assert not is_open(host=host, allow_open=True, has_keys=True)


def test_keys_that_were_made_are_asked_for_even_on_loopback() -> None:
    assert not is_open(has_keys=True)
    assert is_open(has_keys=True, tenants=TenantsConfig(require_keys=False))


@pytest.mark.parametrize("tenants", [TenantsConfig(require_keys=False), TenantsConfig()])
def test_a_key_on_the_command_line_always_counts(tenants: TenantsConfig) -> None:
    assert not is_open(api_key="k", tenants=tenants)


def test_a_server_that_nobody_can_use_yet_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not is_open(tenants=TenantsConfig(require_keys=True))
    assert "penstock keys create" in caplog.text


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty API key"):
        is_open(api_key="")


@pytest.mark.parametrize("end", ["expired", "revoked"])
def test_a_server_does_not_open_when_its_last_key_dies(
    tmp_path: Path, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = ServeConfig(store=StoreConfig(data_dir=str(tmp_path)))
    assert not keys_were_made(config)
    database = open_database(config.store)

    async def make_a_key_and_end_it() -> None:
        an_hour_ago = Directory(database, lambda: time.time() - 3600)
        issued = await an_hour_ago.create_key(
            ACTOR, NewKey(name="k", expires_at=time.time() - 1800 if end == "expired" else None)
        )
        if end == "revoked":
            await an_hour_ago.revoke_key(ACTOR, issued.key.id)

    try:
        asyncio.run(make_a_key_and_end_it())
    finally:
        database.close()
    assert not is_open(has_keys=keys_were_made(config))
    assert "penstock keys create" in caplog.text


def test_an_ipv4_loopback_address_in_ipv6_is_loopback() -> None:
    assert is_open(host="::ffff:127.0.0.1")
