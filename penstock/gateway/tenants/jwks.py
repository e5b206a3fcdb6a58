"""The public keys of an identity provider, fetched over HTTP and kept. Knows no token.

Providers rotate their keys: a key id that is not known makes us look again, though not more often than every half
minute, so that invented ids cannot make us hammer the provider. Keys that we have stay good while it is unreachable.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import ConfigError, StoreUnavailable

logger = logging.getLogger(__name__)

REFRESH_EVERY_S = 3600.0
LOOK_AGAIN_AFTER_S = 30.0
RETRY_AFTER_S = 3.0  # while there are no keys at all
_MAX_DOCUMENT_BYTES = 1 << 20
_TIMEOUT_S = 5.0
_DISCOVERY_PATH = "/.well-known/openid-configuration"
_NEVER = -math.inf

PublicKey = dict[str, Any]  # a JWK, as the provider wrote it


class PublicKeys:
    """Used from one event loop."""

    def __init__(self, issuer: str, jwks_url: str | None, clock: Clock | None = None) -> None:
        for url in (issuer, jwks_url):
            if url is not None:
                _check_url(url)
        self._issuer = issuer
        self._url = jwks_url
        self._clock = clock or SystemClock()
        self._keys: tuple[PublicKey, ...] = ()
        self._fetched_at_s = _NEVER
        self._asked_at_s = _NEVER
        self._fetching: asyncio.Task[None] | None = None

    async def matching(self, key_id: str | None) -> tuple[PublicKey, ...]:
        """The keys that a token with this key id may be signed with; without an id, any of them."""
        now = self._clock.now()
        found = self._named(key_id)
        is_old = now - self._fetched_at_s >= REFRESH_EVERY_S
        pause_s = LOOK_AGAIN_AFTER_S if self._keys else RETRY_AFTER_S
        if (not found or is_old) and now - self._asked_at_s >= pause_s:
            self._asked_at_s = now
            self._fetching = asyncio.create_task(self._fetch())
        if not found and self._fetching is not None:
            await asyncio.shield(self._fetching)
            found = self._named(key_id)
        if not self._keys:
            raise StoreUnavailable(
                "The identity provider's keys cannot be had at the moment.", retry_after_s=RETRY_AFTER_S
            )
        return found

    def _named(self, key_id: str | None) -> tuple[PublicKey, ...]:
        return tuple(key for key in self._keys if key_id is None or key.get("kid") == key_id)

    async def _fetch(self) -> None:
        try:
            async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
                if self._url is None:
                    self._url = await self._discover(client)
                document = await _get_json(client, self._url)
            keys = tuple(key for key in document["keys"] if isinstance(key, dict))
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            logger.warning(
                "the keys of %s cannot be fetched: %s", self._issuer, error or type(error).__name__
            )
            return
        if keys:
            self._keys = keys
            self._fetched_at_s = self._clock.now()
        else:
            logger.warning("%s publishes no keys; those that were known stay in use", self._issuer)

    async def _discover(self, client: httpx.AsyncClient) -> str:
        document = await _get_json(client, self._issuer.rstrip("/") + _DISCOVERY_PATH)
        if document.get("issuer") != self._issuer:
            raise ValueError("its discovery document names another issuer")
        url = str(document["jwks_uri"])
        if not _is_safe(url):
            raise ValueError("its discovery document names a key set that is not served over HTTPS")
        return url


async def _get_json(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """Redirects are not followed: a false answer must not choose where the keys come from."""
    body = bytearray()
    async with client.stream("GET", url, headers={"accept": "application/json"}) as response:
        if response.status_code != 200:
            raise ValueError(f"{url} answered {response.status_code}")
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > _MAX_DOCUMENT_BYTES:
                raise ValueError(f"{url} answered with more than {_MAX_DOCUMENT_BYTES} bytes")
    return msgspec.json.decode(bytes(body), type=dict[str, Any])


def _check_url(url: str) -> None:
    if not _is_safe(url):
        raise ConfigError(
            f"[oidc] must name {url!r} with https://.",
            hint="Whoever can change keys on their way here could sign tokens. Only loopback may use http://.",
        )


def _is_safe(url: str) -> bool:
    parts = urlsplit(url)
    if parts.scheme != "http":
        return parts.scheme == "https" and bool(parts.hostname)
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return parts.hostname == "localhost"
