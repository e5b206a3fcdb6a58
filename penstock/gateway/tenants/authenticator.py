"""Identifies a caller by its credential: a key from the database, the server's one key, a provider's token, or none.
Knows no HTTP."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable

from penstock.core.clock import Clock
from penstock.core.errors import AuthenticationFailed, PenstockError, PermissionDenied
from penstock.core.gateway_config import OidcConfig
from penstock.core.identity import OPEN_PRINCIPAL, Principal, Scope
from penstock.core.request import Tier
from penstock.gateway.store.database import Database
from penstock.gateway.tenants.directory import Directory
from penstock.gateway.tenants.keyring import AuthenticationMetrics, KeyRing
from penstock.gateway.tenants.records import KEY_START, digest_of
from penstock.gateway.tenants.tokens import PublicKeys, SignIn, TokenVerifier

STATIC_KEY_ID = "static"

# A caller with the key that the server was started with may do everything.
STATIC_PRINCIPAL = Principal(key_id=STATIC_KEY_ID, scopes=frozenset(Scope), best_tier=Tier.PRIORITY)


class Authenticator:
    """Identifies callers. With `is_open`, a caller owns the machine unless its credential has the form of this
    server's keys or tokens. Such a credential must be good, because the caller would otherwise act for the wrong
    workspace."""

    def __init__(
        self,
        *,
        static_key: str | None = None,
        ring: KeyRing | None = None,
        tokens: TokenVerifier | None = None,
        is_open: bool = False,
        metrics: AuthenticationMetrics | None = None,
    ) -> None:
        self._static_digest = None if static_key is None else digest_of(static_key)
        self._ring = ring
        self._tokens = tokens
        self.is_open = is_open
        self.metrics = metrics or AuthenticationMetrics()

    def known(self, credential: str, needed: Scope) -> Principal | None:
        """Return the identity of a caller with a good key that is in memory, and may do what the request needs. None
        for all others, whom `authorize` answers."""
        if self._ring is None or self._static_digest is not None or not credential.startswith(KEY_START):
            return None
        principal = self._ring.known(credential)
        return principal if principal is not None and principal.may(needed) else None

    async def authorize(self, credential: str | None, needed: Scope) -> Principal:
        """Return the caller's identity. Raises an error if the caller may not do what the request needs."""
        try:
            principal = await self.identify(credential)
            if not principal.may(needed):
                raise PermissionDenied("This key may not do that.", hint=f"It needs the scope '{needed}'.")
        except PenstockError as error:
            self.metrics.refusals[error.code] += 1
            raise
        return principal

    async def identify(self, credential: str | None) -> Principal:
        if credential is None:
            if self.is_open:
                return OPEN_PRINCIPAL
            raise AuthenticationFailed("The API key is missing.")
        # Digests have one length, so the comparison's time says nothing about the key's.
        if self._static_digest is not None and hmac.compare_digest(
            digest_of(credential), self._static_digest
        ):
            return STATIC_PRINCIPAL
        if self._ring is not None and credential.startswith(KEY_START):
            return await self._ring.identify(credential)
        if self._tokens is not None and credential.count(".") == 2:
            return await self._tokens.identify(credential)
        if self.is_open:
            return OPEN_PRINCIPAL
        raise AuthenticationFailed("Incorrect API key provided.")


class Tenants:
    """Everything about tenants that lives as long as the server. `close` writes the pending records, and leaves
    the database open."""

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
        # This gateway refuses a key at once after revoking it; other gateways notice within seconds.
        self.directory = Directory(database, wall_time, on_change=self._ring.doubt)
        tokens = None
        self.sign_in: SignIn | None = None
        if oidc is not None:
            public_keys = PublicKeys(oidc.issuer, oidc.jwks_url, clock)
            tokens = TokenVerifier(oidc, public_keys, self._ring, wall_time)
            if oidc.client_id is not None:
                self.sign_in = SignIn(oidc, tokens, clock)
        self.authenticator = Authenticator(
            static_key=static_key, ring=self._ring, tokens=tokens, is_open=is_open, metrics=metrics
        )

    async def close(self) -> None:
        await self._ring.close()
