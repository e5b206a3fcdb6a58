"""The audit log: who changed what about tenants, before and after, never a secret.

An entry is written in the same transaction as the change, so that neither is there without the other; the log line
follows once both are committed.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, insert, select

from penstock.gateway.store.tables import audit_log
from penstock.gateway.tenants.records import Page

logger = logging.getLogger("penstock.audit")


class Actor(msgspec.Struct, frozen=True):
    """The author of a change: a key's id, a token's subject, or the user who runs a command."""

    name: str
    request_id: str | None = None


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    at: float
    actor: str
    action: str  # such as key.create
    target: str  # the id of what changed
    request_id: str | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None


def write_entry(
    connection: Connection,
    actor: Actor,
    action: str,
    target: str,
    *,
    at: float,
    before: msgspec.Struct | None = None,
    after: msgspec.Struct | None = None,
) -> AuditEntry:
    """Of a change, only the fields that differ are kept."""
    old, new = _differences(before, after)
    values: dict[str, Any] = {
        "at": at,
        "actor": actor.name,
        "action": action,
        "target": target,
        "request_id": actor.request_id,
        "before": old,
        "after": new,
    }
    result = connection.execute(insert(audit_log).values(values))
    assert result.inserted_primary_key is not None
    return AuditEntry(id=result.inserted_primary_key[0], **values)


def announce(entry: AuditEntry) -> None:
    """Write the entry as one structured log line."""
    logger.info("audit %s", msgspec.json.encode(entry).decode())


def read_entries(
    connection: Connection, *, limit: int, before_id: int | None, where: tuple[ColumnElement[bool], ...]
) -> Page[AuditEntry]:
    """Newest first."""
    query = select(audit_log).where(*where).order_by(audit_log.c.id.desc()).limit(limit + 1)
    if before_id is not None:
        query = query.where(audit_log.c.id < before_id)
    rows = [AuditEntry(**row) for row in connection.execute(query).mappings()]
    return Page(tuple(rows[:limit]), len(rows) > limit)


def _differences(
    before: msgspec.Struct | None, after: msgspec.Struct | None
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    old = msgspec.to_builtins(before) if before is not None else None
    new = msgspec.to_builtins(after) if after is not None else None
    if old is None or new is None:
        return old, new
    changed = [name for name in new if old[name] != new[name]]
    return {name: old[name] for name in changed}, {name: new[name] for name in changed}
