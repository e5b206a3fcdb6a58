"""Builds the directory and the authenticator of a server."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.core.clock import Clock
from penstock.core.gateway_config import OidcConfig
from penstock.gateway.store.database import Database
from penstock.gateway.tenants.authenticator import Authenticator
from penstock.gateway.tenants.directory import Directory
from penstock.gateway.tenants.jwks import PublicKeys
from penstock.gateway.tenants.keyring import KeyRing
from penstock.gateway.tenants.metrics import AuthenticationMetrics
from penstock.gateway.tenants.tokens import TokenVerifier


class Tenants:
    """Lives as long as the server. `close` writes what is still to be written; the database stays its owner's."""

    def __init__(
        self,
        database: Database,
        *,
        static_key: str | None = None,
        oidc: OidcConfig | None = None,
        is_open: bool = False,
        clock: Clock | None = None,
        wall_time: Callable[[], float] = time.time,
    ) -> None:
        metrics = AuthenticationMetrics()
        self._ring = KeyRing(database, clock=clock, wall_time=wall_time, metrics=metrics)
        # What is revoked through this gateway is refused by it at once; the others notice within seconds.
        self.directory = Directory(database, wall_time, on_change=self._ring.doubt)
        tokens = None
        if oidc is not None:
            public_keys = PublicKeys(oidc.issuer, oidc.jwks_url, clock)
            tokens = TokenVerifier(oidc, public_keys, self._ring, wall_time)
        self.authenticator = Authenticator(
            static_key=static_key, ring=self._ring, tokens=tokens, is_open=is_open, metrics=metrics
        )

    async def close(self) -> None:
        await self._ring.close()
