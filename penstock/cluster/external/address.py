"""The address and name of an external server. Knows no HTTP."""

from __future__ import annotations

from urllib.parse import urlsplit

from penstock.core.config import ExternalServerConfig
from penstock.core.errors import ConfigError


def server_name(config: ExternalServerConfig) -> str:
    """The given name, or else host and port. Raises ConfigError for an invalid URL."""
    address = urlsplit(config.url)
    if address.scheme not in ("http", "https") or not address.netloc:
        raise ConfigError(
            f"The external server {config.url!r} has no URL that begins with http:// or https://."
        )
    return config.name or address.netloc.rpartition("@")[2]


def server_root(config: ExternalServerConfig) -> str:
    """The base URL, before /v1 and /metrics."""
    return config.url.rstrip("/").removesuffix("/v1")
