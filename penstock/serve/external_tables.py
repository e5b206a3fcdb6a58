"""External servers: the tables `[[external]]` of the config file and `--external URL`, and their keys.

    [[external]]
    url = "http://gpu-1:8000"
    models = ["llama-70b"]                # or { ours = "theirs" }; without the key, all models that the server lists
    region = "eu"
    api_key_variable = "GPU_1_KEY"        # the environment variable that holds the key

Servers given with `--external` get the key in PENSTOCK_EXTERNAL_API_KEY, if it is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.cluster.external.address import server_name
from penstock.core.config import ExternalServerConfig
from penstock.core.errors import ConfigError
from penstock.serve.environment import EXTERNAL_API_KEY_VARIABLE, secret_in


class ExternalTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[external]]` table."""

    url: str
    name: str = ""
    models: dict[str, str] | tuple[str, ...] = ()
    region: str = ""
    api_key_variable: str | None = None

    def to_config(self) -> ExternalServerConfig:
        models = self.models if isinstance(self.models, dict) else {name: name for name in self.models}
        key = None if self.api_key_variable is None else secret_in(self.api_key_variable)
        if self.api_key_variable is not None and key is None:
            raise ConfigError(
                f"The key for {self.url} should be in the environment variable {self.api_key_variable}, which is "
                "not set."
            )
        return ExternalServerConfig(
            url=self.url, name=self.name, models=models, region=self.region, api_key=key
        )


def read_external_tables(value: Any, place: str) -> tuple[ExternalTable, ...]:
    tables = []
    for number, table in enumerate(value, start=1):
        try:
            tables.append(msgspec.convert(table, ExternalTable))
        except msgspec.ValidationError as error:
            raise ConfigError(f"[[external]] number {number} of {place} is wrong: {error}.") from None
    return tuple(tables)


def external_servers(
    tables: Sequence[ExternalTable], urls: Sequence[str]
) -> tuple[ExternalServerConfig, ...]:
    """Return all external servers with their keys. Raises ConfigError if two servers have the same name."""
    by_url = [ExternalServerConfig(url=url, api_key=secret_in(EXTERNAL_API_KEY_VARIABLE)) for url in urls]
    servers = (*(table.to_config() for table in tables), *by_url)
    names: set[str] = set()
    for server in servers:
        name = server_name(server)
        if name in names:
            raise ConfigError(
                f"Two external servers are called {name!r}.", hint="Give one of them another name."
            )
        names.add(name)
    return servers
