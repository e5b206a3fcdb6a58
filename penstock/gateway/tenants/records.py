"""Organisations, workspaces and keys as the rest of the program sees them. None holds a secret or its digest.

Times are Unix seconds.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.core.identity import Scope
from penstock.core.request import Tier

DEFAULT_ID = "default"  # of the organisation and the workspace that every database begins with
MAX_ID_LENGTH = 64
MAX_NAME_LENGTH = 256
MAX_ALLOWED_MODELS = 256
MAX_PAGE = 1000
MAX_TIME = 253_402_300_799.0  # the last second of the year 9999

KeyStatus: TypeAlias = Literal["active", "expired", "revoked"]


class Organization(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    created_at: float
    archived_at: float | None


class Workspace(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    organization_id: str
    name: str
    created_at: float
    archived_at: float | None


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """`prefix` is the beginning of the key, enough to recognise it in a list and useless to sign in with."""

    id: str
    workspace_id: str
    name: str
    prefix: str
    scopes: tuple[Scope, ...]
    allowed_models: tuple[str, ...] | None  # None allows every model
    best_tier: Tier
    caches_responses: bool
    created_at: float
    created_by: str
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None  # a minute late at most

    def status(self, now: float) -> KeyStatus:
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """What a key is asked to be."""

    name: str
    workspace_id: str = DEFAULT_ID
    scopes: tuple[Scope, ...] = (Scope.INFERENCE,)
    allowed_models: tuple[str, ...] | None = None
    best_tier: Tier = Tier.DEFAULT
    caches_responses: bool = False
    expires_at: float | None = None


class KeyChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What of a key shall change; what is unset stays."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    scopes: tuple[Scope, ...] | msgspec.UnsetType = msgspec.UNSET
    allowed_models: tuple[str, ...] | msgspec.UnsetType | None = msgspec.UNSET
    best_tier: Tier | msgspec.UnsetType = msgspec.UNSET
    caches_responses: bool | msgspec.UnsetType = msgspec.UNSET
    expires_at: float | msgspec.UnsetType | None = msgspec.UNSET


class IssuedKey(msgspec.Struct, frozen=True):
    """A key just made, with the secret that nobody can ever read again."""

    key: Key
    secret: str

    def __repr__(self) -> str:
        return f"IssuedKey({self.key!r})"


def could_be_id(text: str) -> bool:
    """What no id looks like is not looked up: databases do not take every text."""
    return 0 < len(text) <= MAX_ID_LENGTH and text.isascii() and text.isprintable()


Row = TypeVar("Row")


class Page(msgspec.Struct, Generic[Row], frozen=True):
    """Part of a list, newest first. Ask for what comes `after` the last id."""

    data: tuple[Row, ...]
    has_more: bool


def checked_name(name: str) -> str:
    """A name that can be shown in one line anywhere."""
    name = name.strip()
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise InvalidRequest(
            f"A name has 1 to {MAX_NAME_LENGTH} characters, all of them printable.", param="name"
        )
    return name


def checked_scopes(scopes: tuple[Scope, ...]) -> tuple[Scope, ...]:
    if not scopes:
        raise InvalidRequest(
            "A key without scopes could do nothing.",
            param="scopes",
            hint=f"Give one or more of {', '.join(Scope)}.",
        )
    return tuple(scope for scope in Scope if scope in scopes)


def checked_models(models: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if models is None:
        return None
    if not 0 < len(models) <= MAX_ALLOWED_MODELS or not all(map(_could_be_model, models)):
        raise InvalidRequest(
            f"allowed_models names 1 to {MAX_ALLOWED_MODELS} models.",
            param="allowed_models",
            hint="Leave it out, or make it null, to allow every model.",
        )
    return tuple(sorted(set(models)))


def _could_be_model(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()


def checked_expiry(expires_at: float | None, now: float) -> float | None:
    if expires_at is not None and not now < expires_at <= MAX_TIME:
        raise InvalidRequest("expires_at is a time in the future, in Unix seconds.", param="expires_at")
    return expires_at
