"""Sign-in at an identity provider with a browser: authorization code with PKCE (RFC 7636). Knows no HTTP header.

The browser makes the secrets of one sign-in (state, nonce, code verifier) and keeps them in its tab. The gateway only
exchanges the code for a token, so that the page speaks to nobody but the gateway, and a client secret stays here. The
gateway keeps nothing: the token is checked again with every request, like a token that a program sends.
"""

from __future__ import annotations

import asyncio
import hmac
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import (
    AuthenticationFailed,
    ConfigError,
    Overloaded,
    PenstockError,
    StoreUnavailable,
)
from penstock.core.gateway_config import OidcConfig
from penstock.gateway.tenants.tokens import TIMEOUT_S, TokenVerifier, discover, read_json

_MAX_AT_ONCE = 8  # exchanges; a sign-in costs the provider a request, and needs no key
_RETRY_AFTER_S = 3.0
_ENDPOINTS = ("authorization_endpoint", "token_endpoint")


class Provider(msgspec.Struct, frozen=True, kw_only=True):
    """The data with which a page sends its user to the identity provider."""

    issuer: str
    authorization_endpoint: str
    client_id: str
    scope: str


class SignIn:
    """Used from one event loop. `config` must have a client id."""

    def __init__(self, config: OidcConfig, verifier: TokenVerifier, clock: Clock | None = None) -> None:
        assert config.client_id is not None
        self._client_id = config.client_id
        self._config = config
        self._verifier = verifier
        self._secret = _read_secret(config.client_secret_file)
        self._found: dict[str, Any] | None = None  # the discovery document
        self._asking = asyncio.Lock()
        self._ask_again_at_s = 0.0
        self._clock = clock or SystemClock()
        self._num_running = 0

    async def provider(self) -> Provider:
        """Raises StoreUnavailable while the provider cannot be reached."""
        document = await self._document()
        return Provider(
            issuer=self._config.issuer,
            authorization_endpoint=document["authorization_endpoint"],
            client_id=self._client_id,
            scope=" ".join(self._config.sign_in_scopes),
        )

    async def exchange(self, *, code: str, code_verifier: str, redirect_uri: str, nonce: str) -> str:
        """Return a token that this server accepts: the access token if it is meant for this server, else the ID
        token. Raises AuthenticationFailed or PermissionDenied."""
        if self._num_running >= _MAX_AT_ONCE:
            raise Overloaded("Too many people sign in at once.", retry_after_s=_RETRY_AFTER_S)
        self._num_running += 1
        try:
            tokens = await self._ask(code, code_verifier, redirect_uri)
        finally:
            self._num_running -= 1
        id_token = tokens.get("id_token")
        if not isinstance(id_token, str):
            raise AuthenticationFailed(
                "The identity provider gave no ID token.", hint="[oidc] sign_in_scopes must have 'openid'."
            )
        claims = await self._verifier.verified_claims(id_token, audience=self._client_id)
        if not hmac.compare_digest(str(claims.get("nonce", "")).encode(), nonce.encode()):
            raise AuthenticationFailed("The identity provider answered another sign-in than this one.")
        if claims.get("azp", self._client_id) != self._client_id:
            raise AuthenticationFailed("The token was made for another client.")
        return await self._accepted(tokens.get("access_token"), id_token)

    async def _accepted(self, access_token: object, id_token: str) -> str:
        refusal: PenstockError | None = None
        for token in (access_token, id_token):
            if isinstance(token, str) and token.count(".") == 2:
                try:
                    await self._verifier.identify(token)
                except PenstockError as error:
                    refusal = refusal or error
                else:
                    return token
        assert refusal is not None  # the ID token has two dots, because its claims could be read
        raise refusal

    async def _ask(self, code: str, code_verifier: str, redirect_uri: str) -> dict[str, Any]:
        url = (await self._document())["token_endpoint"]
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "code_verifier": code_verifier,
            "redirect_uri": redirect_uri,
            "client_id": self._client_id,
        }
        headers = {"accept": "application/json"}
        auth = (
            None if self._secret is None else (quote(self._client_id, safe=""), quote(self._secret, safe=""))
        )
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                httpx.AsyncClient(auth=auth) as client,
                client.stream("POST", url, data=form, headers=headers) as response,
            ):
                answer = await read_json(response)
        except (httpx.HTTPError, TimeoutError, ValueError) as error:
            raise _unreachable() from error
        if response.status_code != 200:
            # The code of RFC 6749, such as invalid_grant. A description may hold anything, and is not repeated.
            reason = str(answer.get("error", response.status_code))[:40]
            raise AuthenticationFailed(
                f"The identity provider refused the sign-in: {reason}.", hint="Try again."
            )
        return answer

    async def _document(self) -> dict[str, Any]:
        """Anybody may ask for this, so a provider that does not answer is left alone for a while."""
        async with self._asking:
            if self._found is None:
                if self._clock.now() < self._ask_again_at_s:
                    raise _unreachable()
                try:
                    async with asyncio.timeout(TIMEOUT_S), httpx.AsyncClient() as client:
                        self._found = await discover(client, self._config.issuer, _ENDPOINTS)
                except (httpx.HTTPError, TimeoutError, ValueError, KeyError) as error:
                    self._ask_again_at_s = self._clock.now() + _RETRY_AFTER_S
                    raise _unreachable() from error
            return self._found


def _unreachable() -> StoreUnavailable:
    return StoreUnavailable(
        "The identity provider cannot be reached at the moment.", retry_after_s=_RETRY_AFTER_S
    )


def _read_secret(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The client secret of [oidc] cannot be read from {path}: {error}.") from error
