"""The places where a server keeps its data, its database and its models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.gateway_config import StoreConfig
from penstock.serve.environment import cache_dir, hub_token, state_dir

if TYPE_CHECKING:
    from penstock.gateway.store.database import Database
    from penstock.models.hub import ModelHub


def data_dir(config: StoreConfig) -> Path:
    """Return the data folder of a server as an absolute path. The folder may not exist yet."""
    return (Path(config.data_dir).expanduser() if config.data_dir else state_dir()).absolute()


def open_database(config: StoreConfig) -> Database:
    """Return the database of a server. Nothing is read or written before the first query."""
    from penstock.gateway.store.database import Database, sqlite_url

    return Database(config.database_url or sqlite_url(data_dir(config)))


def model_hub() -> ModelHub:
    """The cache of models on this machine, with the user's Hugging Face token."""
    from penstock.models.hub import ModelHub

    return ModelHub(cache_dir(), hub_token=hub_token())
