"""How many gateway processes a server has when nobody says."""

from __future__ import annotations

import msgspec
import pytest

from penstock.core.config import ExternalServerConfig, ServeConfig
from penstock.core.gateway_config import ServerConfig
from penstock.serve import api_workers
from penstock.serve.api_workers import MAX_API_WORKERS, with_api_workers

RELAY = ServeConfig(external=(ExternalServerConfig(url="http://gpu-1:8000"),), runs_engines=False)


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_workers, "usable_cores", lambda: 64)


def test_a_server_with_keys_that_only_passes_requests_on_has_several_processes() -> None:
    assert with_api_workers(RELAY, has_keys=True).server.num_api_workers == MAX_API_WORKERS


def test_a_machine_with_few_cores_gets_no_more_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_workers, "usable_cores", lambda: 2)
    assert with_api_workers(RELAY, has_keys=True).server.num_api_workers == 2


@pytest.mark.parametrize(
    ("config", "has_keys"),
    [
        (RELAY, False),
        (msgspec.structs.replace(RELAY, runs_engines=True), True),
        (
            msgspec.structs.replace(
                RELAY, external=(ExternalServerConfig(url="http://gpu-1:8000", max_concurrent=8),)
            ),
            True,
        ),
        (msgspec.structs.replace(RELAY, server=ServerConfig(api_workers=1)), True),
    ],
    ids=["no keys", "engines", "a bounded server", "as told"],
)
def test_other_servers_have_one(config: ServeConfig, has_keys: bool) -> None:
    assert with_api_workers(config, has_keys=has_keys).server.num_api_workers == 1
