"""Bearer tokens (JWT) of an identity provider: checked, then translated into a Principal. Knows no HTTP header.

Only algorithms with public keys are taken, and a key is used only for the algorithm family it is made for: a token
cannot choose to be checked as something else. The result for a token is cached, because checking a signature costs a
hundred times more than the rest of a request's start.

`PublicKeys` fetches the provider's keys over HTTP and keeps them. Providers rotate their keys: an unknown key id
makes a gateway look again, though at most every half minute, so that invented ids cannot flood the provider with
requests. Known keys stay valid while the provider is unreachable.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import math
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import msgspec

from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import (
    AuthenticationFailed,
    ConfigError,
    Overloaded,
    PenstockError,
    PermissionDenied,
    StoreUnavailable,
)
from penstock.core.gateway_config import OidcConfig
from penstock.core.identity import Principal, Scope
from penstock.core.lru import LruCache
from penstock.gateway.tenants.keyring import KeyRing

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

REFRESH_EVERY_S = 3600.0
LOOK_AGAIN_AFTER_S = 30.0
RETRY_AFTER_S = 3.0  # while there are no keys at all
_MAX_DOCUMENT_BYTES = 1 << 20
TIMEOUT_S = 5.0
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
        """Return the keys that a token with this key id may be signed with; without an id, any of them."""
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
        import httpx

        try:
            async with asyncio.timeout(TIMEOUT_S), httpx.AsyncClient() as client:
                if self._url is None:
                    self._url = (await discover(client, self._issuer, ("jwks_uri",)))["jwks_uri"]
                document = await _get_json(client, self._url)
            keys = tuple(key for key in document["keys"] if isinstance(key, dict))
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, KeyError, TypeError) as error:
            logger.warning(
                "the keys of %s cannot be fetched: %s", self._issuer, error or type(error).__name__
            )
            return
        if keys:
            self._keys = keys
            self._fetched_at_s = self._clock.now()
        else:
            logger.warning("%s publishes no keys; those that were known stay in use", self._issuer)


async def discover(client: httpx.AsyncClient, issuer: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the issuer's discovery document, in which `names` are URLs that may be trusted. Raises ValueError,
    KeyError or httpx.HTTPError."""
    document = await _get_json(client, issuer.rstrip("/") + _DISCOVERY_PATH)
    if document.get("issuer") != issuer:
        raise ValueError("its discovery document names another issuer")
    for name in names:
        if not _is_safe(str(document[name])):
            raise ValueError(f"its discovery document names a {name} that is not served over HTTPS")
    return document


async def _get_json(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """Redirects are not followed: a false answer must not choose where the keys come from."""
    async with client.stream("GET", url, headers={"accept": "application/json"}) as response:
        if response.status_code != 200:
            raise ValueError(f"{url} answered {response.status_code}")
        return await read_json(response)


async def read_json(response: httpx.Response) -> dict[str, Any]:
    """Return a JSON object of bounded size. Raises ValueError."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > _MAX_DOCUMENT_BYTES:
            raise ValueError(f"{response.url} answered with more than {_MAX_DOCUMENT_BYTES} bytes")
    return msgspec.json.decode(bytes(body), type=dict[str, Any])


def _check_url(url: str) -> None:
    if not _is_safe(url):
        raise ConfigError(
            f"[oidc] must name {url!r} with https://.",
            hint="An attacker who changes keys in transit could sign tokens. Only loopback may use http://.",
        )


def _is_safe(url: str) -> bool:
    parts = urlsplit(url)
    if parts.scheme != "http":
        return parts.scheme == "https" and bool(parts.hostname)
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return parts.hostname == "localhost"


_FAMILIES = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}  # of an algorithm's first letters
_REQUIRED_CLAIMS = ["exp", "iss", "aud", "sub"]
_MAX_TOKEN_LENGTH = 16 << 10
_MAX_REMEMBERED = 10_000
REMEMBER_S = 300.0  # then its signature is checked again, in case the provider withdrew the key
_MAX_SUBJECT_LENGTH = 200


class TokenVerifier:
    """Used from one event loop. Workspaces are looked up in `ring`, so archiving one ends its tokens too."""

    def __init__(
        self,
        config: OidcConfig,
        public_keys: PublicKeys,
        ring: KeyRing,
        wall_time: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._public_keys = public_keys
        self._ring = ring
        self._wall_time = wall_time
        self._remembered = LruCache[bytes, tuple[Principal, float]](_MAX_REMEMBERED)  # digest → until when
        # Now: all requests would wait for them, a tenth of a second each, while the first token is read.
        import_module("jwt")
        import_module("httpx")

    async def identify(self, token: str) -> Principal:
        """Raises AuthenticationFailed for a token that is not good, PermissionDenied for a good one that maps to no
        workspace."""
        if len(token) > _MAX_TOKEN_LENGTH:
            raise AuthenticationFailed("The token is too long.")
        digest = hashlib.sha256(token.encode()).digest()
        remembered = self._remembered.get(digest)
        if remembered is not None and self._wall_time() < remembered[1]:
            principal = remembered[0]
        else:
            claims = await self.verified_claims(token)
            principal = self._principal(claims)
            expires_at = float(claims["exp"]) + self._config.leeway_s
            self._remembered.put(digest, (principal, min(expires_at, self._wall_time() + REMEMBER_S)))
        return await self._placed(principal)

    async def verified_claims(self, token: str, audience: str | None = None) -> dict[str, Any]:
        """Return the claims of a valid token. `audience` is the expected audience, if not this server."""
        import jwt

        try:
            header = jwt.get_unverified_header(token)
        except jwt.InvalidTokenError as error:
            raise AuthenticationFailed("The token is not a JWT.") from error
        algorithm, key_id = header.get("alg"), header.get("kid")
        if algorithm not in self._config.algorithms:
            raise AuthenticationFailed("The token is signed with an algorithm that is not accepted here.")
        candidates = [
            key for key in await self._public_keys.matching(key_id) if _is_meant_for(key, algorithm)
        ]
        if len(candidates) != 1:
            # None is known by that id; or there is no id, and trying several would invite guessing.
            raise AuthenticationFailed(
                "The token is signed with a key that the identity provider does not have."
            )
        try:
            return self._decode(token, candidates[0], algorithm, audience or self._config.audience)
        except jwt.ExpiredSignatureError as error:
            raise AuthenticationFailed("The token has expired.") from error
        except jwt.InvalidAudienceError as error:
            raise AuthenticationFailed("The token is meant for another audience.") from error
        except jwt.InvalidIssuerError as error:
            raise AuthenticationFailed("The token comes from another issuer.") from error
        except jwt.MissingRequiredClaimError as error:
            raise AuthenticationFailed(f"The token lacks the claim '{error.claim}'.") from error
        except jwt.ImmatureSignatureError as error:
            raise AuthenticationFailed("The token is not valid yet.") from error
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError) as error:
            raise AuthenticationFailed("The token's signature is wrong.") from error

    def _decode(self, token: str, key: PublicKey, algorithm: str, audience: str) -> dict[str, Any]:
        import jwt

        claims: dict[str, Any] = jwt.decode(
            token,
            jwt.PyJWK(key, algorithm),
            algorithms=[algorithm],
            audience=audience,
            issuer=self._config.issuer,
            leeway=self._config.leeway_s,
            options={"require": _REQUIRED_CLAIMS},
        )
        return claims

    def _principal(self, claims: dict[str, Any]) -> Principal:
        """Return the identity that the claims state, before the workspace is looked up."""
        config = self._config
        return Principal(
            workspace_id=self._workspace_id(claims),
            key_id=f"oidc:{_subject(claims)}",
            scopes=self._scopes(claims),
            allowed_models=self._models(claims),
            best_tier=config.tiers.get(str(_claim(claims, config.tier_claim)), config.default_tier),
        )

    def _workspace_id(self, claims: dict[str, Any]) -> str:
        value = _claim(claims, self._config.workspace_claim)
        if value is None:
            workspace_id = self._config.default_workspace
        elif self._config.workspaces:
            workspace_id = self._config.workspaces.get(str(value))
        else:
            workspace_id = str(value)
        if workspace_id is None:
            raise PermissionDenied("The token names no workspace of this server.")
        return workspace_id

    def _scopes(self, claims: dict[str, Any]) -> frozenset[Scope]:
        words = _words(_claim(claims, self._config.scopes_claim))
        scopes = frozenset(self._config.scopes[word] for word in words if word in self._config.scopes)
        return scopes or frozenset(self._config.default_scopes)

    def _models(self, claims: dict[str, Any]) -> frozenset[str] | None:
        """Return the models that a token may use. A claim that is configured but missing allows no model."""
        if self._config.models_claim is None:
            return None
        return frozenset(_words(_claim(claims, self._config.models_claim)))

    async def _placed(self, principal: Principal) -> Principal:
        """Return the principal with the organisation of its workspace. The workspace must exist and not be
        archived."""
        workspace = await self._ring.workspace(principal.workspace_id)
        if workspace is None:
            raise PermissionDenied("The token names no workspace of this server.")
        return msgspec.structs.replace(principal, organization_id=workspace.organization_id)


def _subject(claims: dict[str, Any]) -> str:
    """Return the subject of a token. A bad subject is refused rather than shortened, because two subjects must never
    become one."""
    subject = str(claims["sub"])
    if not 0 < len(subject) <= _MAX_SUBJECT_LENGTH or not subject.isprintable():
        raise AuthenticationFailed("The token's subject is too long, or cannot be printed.")
    return subject


def _is_meant_for(key: PublicKey, algorithm: str) -> bool:
    return (
        key.get("kty") == _FAMILIES[algorithm[:2]]
        and key.get("alg", algorithm) == algorithm
        and key.get("use", "sig") == "sig"
    )


def _claim(claims: dict[str, Any], path: str) -> Any:
    """Return the claim of this name, or the value at a dotted path; None if there is none."""
    if path in claims:
        return claims[path]
    value: Any = claims
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return value.split()
    return [str(word) for word in value] if isinstance(value, list) else []


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
    """Sign-in at an identity provider with a browser: authorization code with PKCE (RFC 7636). Used from one event
    loop; `config` must have a client id.

    The browser makes the secrets of one sign-in (state, nonce, code verifier) and keeps them in its tab. The gateway
    only exchanges the code for a token. The page therefore sends requests only to the gateway, and the client secret
    stays here. The gateway keeps nothing: the token is checked again with every request, like a token that a program
    sends.
    """

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
        import httpx

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
        import httpx

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
