"""Organisations, workspaces and keys as the rest of the program sees them, and the functions that read and write
their rows.

No record holds a secret or its digest. Times are Unix seconds. The functions work on a connection that is in a
transaction, and check nothing about callers.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Connection, RowMapping, Table, false, insert, select, tuple_, update

from penstock.core.errors import InvalidRequest, NotFound
from penstock.core.identity import Scope
from penstock.core.request import Tier
from penstock.gateway.store.tables import keys, organizations, tenant_revision, workspaces

KEY_START = "sk-ps-"
# A key is KEY_START, 10 letters that find its row, 32 letters of secret (190 bits) and 6 letters of checksum, all in
# base 62. The checksum turns typing mistakes and random guesses away before anything is looked up. Only the SHA-256
# of the key is stored: with that much entropy in the secret, a slow password hash would protect nothing more.
_LETTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
_NUM_FINDING = 10
_NUM_SECRET = 32
_NUM_CHECKSUM = 6  # 62**6 > 2**32
PREFIX_LENGTH = len(KEY_START) + _NUM_FINDING
_SHAPE = re.compile(rf"{KEY_START}[0-9A-Za-z]{{{_NUM_FINDING + _NUM_SECRET + _NUM_CHECKSUM}}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class NewSecret:
    """A new secret, which is shown to its owner once; only the prefix and the digest are stored."""

    secret: str = field(repr=False)
    prefix: str
    digest: bytes = field(repr=False)


def new_secret() -> NewSecret:
    letters = "".join(secrets.choice(_LETTERS) for _ in range(_NUM_FINDING + _NUM_SECRET))
    secret = KEY_START + letters + _checksum(KEY_START + letters)
    return NewSecret(secret, secret[:PREFIX_LENGTH], digest_of(secret))


def prefix_of(secret: str) -> str | None:
    """Return the prefix that finds the key's row; None when no key has this form."""
    if not _SHAPE.fullmatch(secret):
        return None
    if not hmac.compare_digest(_checksum(secret[:-_NUM_CHECKSUM]), secret[-_NUM_CHECKSUM:]):
        return None
    return secret[:PREFIX_LENGTH]


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def is_secret_of(digest: bytes, secret: str) -> bool:
    """Compare a secret with a digest, in a time that does not depend on how much of the secret is right."""
    return hmac.compare_digest(digest, digest_of(secret))


def _checksum(text: str) -> str:
    number = zlib.crc32(text.encode())
    letters = []
    for _ in range(_NUM_CHECKSUM):
        number, remainder = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[remainder])
    return "".join(letters)


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
    """The fields of a key that is to be made."""

    name: str
    workspace_id: str = DEFAULT_ID
    scopes: tuple[Scope, ...] = (Scope.INFERENCE,)
    allowed_models: tuple[str, ...] | None = None
    best_tier: Tier = Tier.DEFAULT
    caches_responses: bool = False
    expires_at: float | None = None


class KeyChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of a key. A field that is unset stays."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    scopes: tuple[Scope, ...] | msgspec.UnsetType = msgspec.UNSET
    allowed_models: tuple[str, ...] | msgspec.UnsetType | None = msgspec.UNSET
    best_tier: Tier | msgspec.UnsetType = msgspec.UNSET
    caches_responses: bool | msgspec.UnsetType = msgspec.UNSET
    expires_at: float | msgspec.UnsetType | None = msgspec.UNSET


class IssuedKey(msgspec.Struct, frozen=True):
    """A new key, with the secret that cannot be read again."""

    key: Key
    secret: str

    def __repr__(self) -> str:
        return f"IssuedKey({self.key!r})"


def could_be_id(text: str) -> bool:
    """Return whether a text has the form of an id. Other texts are not looked up, because databases do not take every
    text."""
    return 0 < len(text) <= MAX_ID_LENGTH and text.isascii() and text.isprintable()


Row = TypeVar("Row")


class Page(msgspec.Struct, Generic[Row], frozen=True):
    """A page of a list, newest first. The next page comes `after` the last id."""

    data: tuple[Row, ...]
    has_more: bool


def checked_name(name: str) -> str:
    """Return a name that can be shown in one line anywhere."""
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


Record = TypeVar("Record", bound=msgspec.Struct)

_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 20


@dataclass(frozen=True, slots=True)
class Kind(Generic[Record]):
    """A table of tenants and the records that its rows are."""

    noun: str  # in sentences
    action: str  # in the audit log, before the verb
    id_prefix: str
    table: Table
    record_of: Callable[[RowMapping], Record]

    def new_id(self) -> str:
        return f"{self.id_prefix}_{''.join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))}"


def _key_of(row: RowMapping) -> Key:
    fields = {name: row[name] for name in Key.__struct_fields__}
    fields["scopes"] = tuple(map(Scope, row["scopes"]))
    fields["best_tier"] = Tier(row["best_tier"])
    if row["allowed_models"] is not None:
        fields["allowed_models"] = tuple(row["allowed_models"])
    return Key(**fields)


ORGANIZATIONS = Kind(
    "organisation",
    "organization",
    "org",
    organizations,
    lambda row: Organization(**{name: row[name] for name in Organization.__struct_fields__}),
)
WORKSPACES = Kind(
    "workspace",
    "workspace",
    "ws",
    workspaces,
    lambda row: Workspace(**{name: row[name] for name in Workspace.__struct_fields__}),
)
KEYS = Kind("key", "key", "key", keys, _key_of)


def next_revision(connection: Connection) -> int:
    """Return the number of this change. Its row stays locked until the transaction ends, so numbers rise in the order
    of commits, and a reader that has seen number N has seen every change up to N."""
    bump = update(tenant_revision).values(revision=tenant_revision.c.revision + 1)
    return int(connection.execute(bump.returning(tenant_revision.c.revision)).scalar_one())


def add(connection: Connection, kind: Kind[Record], record: Record, **unseen: Any) -> None:
    """Insert a record. `unseen` are columns that no record shows."""
    values = {**msgspec.to_builtins(record), **unseen, "revision": next_revision(connection)}
    connection.execute(insert(kind.table).values(values))


def alter(connection: Connection, kind: Kind[Record], row_id: str, values: Mapping[str, Any]) -> None:
    changed = {**msgspec.to_builtins(values), "revision": next_revision(connection)}
    connection.execute(update(kind.table).where(kind.table.c.id == row_id).values(changed))


def find(connection: Connection, kind: Kind[Record], row_id: str) -> Record:
    row = None
    if could_be_id(row_id):
        query = select(kind.table).where(kind.table.c.id == row_id)
        row = connection.execute(query).mappings().one_or_none()
    if row is None:
        raise NotFound(f"There is no {kind.noun} with the id {row_id[:80]!r}.")
    return kind.record_of(row)


def page(
    connection: Connection,
    kind: Kind[Record],
    *,
    limit: int,
    after: str | None,
    where: tuple[ColumnElement[bool], ...],
) -> Page[Record]:
    """At most `limit` records that were made before the record with the id `after`, newest first."""
    check_limit(limit)
    table = kind.table
    query = select(table).where(*where)
    if after is not None:
        found = select(table.c.created_at, table.c.id).where(table.c.id == after)
        place = connection.execute(found).first() if could_be_id(after) else None
        if place is None:
            raise InvalidRequest("after is not the id of anything in this list.", param="after")
        query = query.where(tuple_(table.c.created_at, table.c.id) < tuple_(*place))
    query = query.order_by(table.c.created_at.desc(), table.c.id.desc()).limit(limit + 1)
    records = [kind.record_of(row) for row in connection.execute(query).mappings()]
    return Page(tuple(records[:limit]), len(records) > limit)


def equals(column: ColumnElement[str], row_id: str | None) -> tuple[ColumnElement[bool], ...]:
    """Return the condition that a column holds this id; no condition for None."""
    if row_id is None:
        return ()
    return (column == row_id,) if could_be_id(row_id) else (false(),)


def check_limit(limit: int) -> None:
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"limit is a whole number from 1 to {MAX_PAGE}.", param="limit")
