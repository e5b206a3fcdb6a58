"""Writes what an operator ordered through the API into the audit log."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request

from penstock.api.http.context import principal_of, request_id_of
from penstock.gateway.store.database import Database
from penstock.gateway.tenants.directory import Actor, announce, write_entry


def actor_of(request: Request) -> Actor:
    return Actor(principal_of(request).key_id, request_id_of(request))


async def audit(
    database: Database, request: Request, action: str, target: str, after: msgspec.Struct
) -> None:
    actor, at = actor_of(request), time.time()
    announce(
        await database.run(
            lambda connection: write_entry(connection, actor, action, target, at=at, after=after)
        )
    )
