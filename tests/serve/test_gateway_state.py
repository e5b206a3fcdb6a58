"""The state of a gateway, as the composition root builds it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.core.config import ServeConfig
from penstock.core.errors import ConfigError
from penstock.core.gateway_config import GatewayConfig, LedgerConfig, StoreConfig
from penstock.core.identity import Principal
from penstock.core.request import Tier
from penstock.gateway.store.database import Database, sqlite_url
from penstock.serve.gateway_state import open_gateway_state
from tests.gateway.fake_engine import FakeEngine

PRICES = "[prices.default]\ninput = 1\noutput = 2\n"


def config_in(folder: Path, settings: str | None = None, **ledger: Any) -> ServeConfig:
    file = folder / "settings.toml"
    if settings is not None:
        file.write_text(settings)
    return ServeConfig(
        gateway=GatewayConfig(settings=None if settings is None else str(file)),
        store=StoreConfig(data_dir=str(folder / "data")),
        ledger=LedgerConfig(**ledger),
    )


@pytest.fixture
def database(tmp_path: Path) -> Any:
    database = Database(sqlite_url(tmp_path / "data"))
    yield database
    database.close()


@pytest.mark.parametrize(
    ("settings", "wants", "is_open", "has_keys", "has_ledger"),
    [
        (None, None, True, False, False),
        (None, None, False, False, False),  # one key on the command line
        (None, None, False, True, True),
        (None, None, True, True, False),
        (PRICES, None, True, False, True),
        ("", None, True, False, False),
        (None, True, True, False, True),
        (PRICES, False, False, True, False),
    ],
)
async def test_when_there_is_a_ledger(
    tmp_path: Path,
    database: Database,
    settings: str | None,
    wants: bool | None,
    is_open: bool,
    has_keys: bool,
    has_ledger: bool,
) -> None:
    if has_keys:
        database.migrate()
    config = config_in(tmp_path, settings, usage_ledger=wants)
    async with open_gateway_state(config, database, is_open=is_open) as state:
        assert (state.ledger is not None) == has_ledger
        assert (state.shared.file is not None) == (settings is not None)
    assert (tmp_path / "data").exists() == (has_keys or has_ledger), (
        "a server that stores nothing leaves no file"
    )


async def test_a_hangup_reloads_every_part(tmp_path: Path, database: Database) -> None:
    config = config_in(tmp_path, PRICES)
    async with open_gateway_state(config, database, is_open=True) as state:
        limiter = state.build_limiter(config.gateway)
        gateway = state.build_gateway(FakeEngine(), config.gateway, limiter)
        assert state.ledger is not None
        (tmp_path / "settings.toml").write_text(
            PRICES.replace("1", "5")
            + "[prompt_cache]\nmin_tokens = 64\n"
            + '[tiers]\nbest = "batch"\n[response_cache]\nenabled = false\n'
            + '[guards]\ndefault_policy = "p"\n[guards.policies.p]\nrules = [{ guard = "pii" }]\n'
        )
        os.kill(os.getpid(), signal.SIGHUP)
        while not state.settings.num_applied:
            await asyncio.sleep(0.001)
        assert state.ledger.spending.prices.rates("any", Tier.DEFAULT).input == 5_000_000
        assert gateway.tiers.best is Tier.BATCH
        assert gateway.prompt_cache.min_tokens == 64
        assert gateway.guards.policy_for(Principal()) is not None
        assert not state.reuse._settings.enabled
        await limiter.close()


async def test_a_bad_file_stops_the_start(tmp_path: Path, database: Database) -> None:
    with pytest.raises(ConfigError, match=r"settings\.toml, line 1: there is no setting 'prizes'"):
        async with open_gateway_state(config_in(tmp_path, "[prizes]\n"), database, is_open=True):
            pass


async def test_a_data_folder_that_is_a_file(tmp_path: Path, database: Database) -> None:
    (tmp_path / "data").write_text("a file is in the way")
    with pytest.raises(ConfigError, match=r"The data folder .* is a file"):
        async with open_gateway_state(config_in(tmp_path, usage_ledger=True), database, is_open=True):
            pass
