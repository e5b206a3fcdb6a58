"""Where an external server is, and what it is called. Knows no HTTP."""

from __future__ import annotations

from urllib.parse import urlsplit

from penstock.core.config import ExternalServerConfig
from penstock.core.errors import ConfigError


def server_name(config: ExternalServerConfig) -> str:
    """The name given, else host and port. Raises ConfigError for a URL that is none."""
    address = urlsplit(config.url)
    if address.scheme not in ("http", "https") or not address.netloc:
        raise ConfigError(
            f"The external server {config.url!r} has no URL that begins with http:// or https://."
        )
    return config.name or address.netloc.rpartition("@")[2]


def server_root(config: ExternalServerConfig) -> str:
    """What stands before /v1 and /metrics."""
    return config.url.rstrip("/").removesuffix("/v1")
