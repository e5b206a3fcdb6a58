"""Bearer tokens (JWT) of an identity provider: checked, then translated into a Principal. Knows no HTTP header.

Only algorithms with public keys are taken, and a key is used only for the algorithm family it is made for: a token
cannot choose to be checked as something else. The answer for a token is remembered, because checking a signature
costs a hundred times more than the rest of a request's start.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jwt
import msgspec

from penstock.core.errors import AuthenticationFailed, PermissionDenied
from penstock.core.gateway_config import OidcConfig
from penstock.core.identity import Principal, Scope
from penstock.gateway.tenants.jwks import PublicKey, PublicKeys
from penstock.gateway.tenants.keyring import KeyRing

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
        self._remembered: OrderedDict[bytes, tuple[Principal, float]] = OrderedDict()  # digest → until when

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
            claims = await self._verified_claims(token)
            principal = self._principal(claims)
            expires_at = float(claims["exp"]) + self._config.leeway_s
            self._remember(digest, principal, min(expires_at, self._wall_time() + REMEMBER_S))
        return await self._placed(principal)

    async def _verified_claims(self, token: str) -> dict[str, Any]:
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
            return self._decode(token, candidates[0], algorithm)
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

    def _decode(self, token: str, key: PublicKey, algorithm: str) -> dict[str, Any]:
        claims: dict[str, Any] = jwt.decode(
            token,
            jwt.PyJWK(key, algorithm),
            algorithms=[algorithm],
            audience=self._config.audience,
            issuer=self._config.issuer,
            leeway=self._config.leeway_s,
            options={"require": _REQUIRED_CLAIMS},
        )
        return claims

    def _principal(self, claims: dict[str, Any]) -> Principal:
        """What the claims say, before the workspace was looked up."""
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
        """A claim that is configured but missing allows no model: silence must not widen what a token may do."""
        if self._config.models_claim is None:
            return None
        return frozenset(_words(_claim(claims, self._config.models_claim)))

    async def _placed(self, principal: Principal) -> Principal:
        """With the organisation of its workspace, which must be there and not archived."""
        workspace = await self._ring.workspace(principal.workspace_id)
        if workspace is None:
            raise PermissionDenied("The token names no workspace of this server.")
        return msgspec.structs.replace(principal, organization_id=workspace.organization_id)

    def _remember(self, digest: bytes, principal: Principal, until: float) -> None:
        self._remembered[digest] = (principal, until)
        if len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)


def _subject(claims: dict[str, Any]) -> str:
    """Refused rather than cut or mended: two subjects must never become one."""
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
    """The claim itself, or what a dotted path leads to; None where there is nothing."""
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
