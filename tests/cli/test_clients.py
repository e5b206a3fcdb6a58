"""The way from a command to a server: proxies of the environment, and URLs that are none."""

from __future__ import annotations

import httpx
import pytest

from penstock.cli.clients import ChatClient, http_client
from penstock.core.errors import UsageError

TIMEOUT = httpx.Timeout(5.0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://localhost:8000", "https://[::1]:8000"])
@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9"])
def test_a_server_on_this_machine_is_reached_without_the_proxy(
    monkeypatch: pytest.MonkeyPatch, url: str, proxy: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with http_client(url, None, TIMEOUT) as client:
        assert not client.trust_env


def test_a_server_elsewhere_is_reached_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with http_client("http://gpu-1:8000", None, TIMEOUT) as client:
        assert client.trust_env


def test_a_proxy_that_cannot_be_used_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "nonsense://127.0.0.1:9")
    with pytest.raises(UsageError, match="proxy in the environment cannot be used") as caught:
        http_client("http://gpu-1:8000", None, TIMEOUT)
    assert "NO_PROXY" in (caught.value.hint or "")


def test_a_url_that_is_none_is_a_sentence() -> None:
    with pytest.raises(UsageError, match="is not the URL of a server"):
        ChatClient("http://[::1")
