"""Idempotency keys in the database: they outlive a restart, and hold across all gateways that share it.

A row is claimed by whoever starts the request and leased to it; the lease is renewed while the request runs, so that
the claim of a process that died lapses. Plain functions of a database connection. Times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql, sqlite

from penstock.gateway.store.tables import idempotent_answers

_columns = idempotent_answers.c


class KeyClaim(msgspec.Struct, frozen=True, kw_only=True):
    workspace_id: str
    idempotency_key: str
    fingerprint: bytes
    owner: str  # unique to this attempt


class Claimed(msgspec.Struct, frozen=True):
    """The request is the claimant's to run."""


class RunsElsewhere(msgspec.Struct, frozen=True):
    fingerprint: bytes


class Answered(msgspec.Struct, frozen=True):
    fingerprint: bytes
    answer: bytes


ClaimResult: TypeAlias = Claimed | RunsElsewhere | Answered


def claim_key(
    connection: Connection, claim: KeyClaim, now: float, lease_until: float, expires_at: float
) -> ClaimResult:
    values = msgspec.structs.asdict(claim) | {"lease_until": lease_until, "expires_at": expires_at}
    insert: Any = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(
        idempotent_answers
    )
    statement = insert.on_conflict_do_nothing().returning(_columns.owner)
    if connection.execute(statement, values).first() is not None:
        return Claimed()
    # The row is too old, or the process that ran the request has died. The condition makes taking it over atomic.
    has_lapsed = sa.or_(
        _columns.expires_at <= now, sa.and_(_columns.answer.is_(None), _columns.lease_until <= now)
    )
    taken = connection.execute(
        sa.update(idempotent_answers).where(_same_key(claim), has_lapsed).values(**values, answer=None)
    )
    if taken.rowcount:
        return Claimed()
    row = connection.execute(sa.select(_columns.fingerprint, _columns.answer).where(_same_key(claim))).first()
    if row is None:  # released meanwhile; the caller asks again
        return RunsElsewhere(claim.fingerprint)
    return RunsElsewhere(row.fingerprint) if row.answer is None else Answered(row.fingerprint, row.answer)


def keep_answer(connection: Connection, claim: KeyClaim, answer: bytes, expires_at: float) -> None:
    connection.execute(
        sa.update(idempotent_answers).where(_own(claim)).values(answer=answer, expires_at=expires_at)
    )


def release_key(connection: Connection, claim: KeyClaim) -> None:
    """The request came to nothing, so that the next with the same key may run."""
    connection.execute(sa.delete(idempotent_answers).where(_own(claim), _columns.answer.is_(None)))


def renew_leases(connection: Connection, claims: Sequence[KeyClaim], lease_until: float) -> None:
    owners = [claim.owner for claim in claims]
    connection.execute(
        sa.update(idempotent_answers)
        .where(_columns.owner.in_(owners), _columns.answer.is_(None))
        .values(lease_until=lease_until)
    )


def delete_expired(connection: Connection, now: float) -> int:
    return connection.execute(sa.delete(idempotent_answers).where(_columns.expires_at <= now)).rowcount


def _same_key(claim: KeyClaim) -> sa.ColumnElement[bool]:
    return sa.and_(
        _columns.workspace_id == claim.workspace_id, _columns.idempotency_key == claim.idempotency_key
    )


def _own(claim: KeyClaim) -> sa.ColumnElement[bool]:
    return sa.and_(_same_key(claim), _columns.owner == claim.owner)
