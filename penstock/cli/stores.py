"""Where a server's data is, from its settings and the environment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.environment import state_dir
from penstock.core.gateway_config import StoreConfig

if TYPE_CHECKING:
    from penstock.gateway.store.database import Database


def data_dir(config: StoreConfig) -> Path:
    """Absolute, so that it means the same in every process. It may not exist yet."""
    return (Path(config.data_dir).expanduser() if config.data_dir else state_dir()).absolute()


def open_database(config: StoreConfig) -> Database:
    """Nothing is read or written before it is used."""
    from penstock.gateway.store.database import Database, sqlite_url

    return Database(config.database_url or sqlite_url(data_dir(config)))
