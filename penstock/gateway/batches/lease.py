"""The lease that decides which process runs batches: plain functions of a database connection.

A process takes the lease for some seconds and renews it. Another process may take the lease over when it has expired,
or earlier when its holder is known to be dead. The name of a holder says where its process id is valid, because the
same process id means another process in another container.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from pathlib import Path

from sqlalchemy import Connection, delete, select, update

from penstock.gateway.store.database import insert_once
from penstock.gateway.store.tables import leases

LEASE_NAME = "batches"


class LeaseLost(Exception):
    """Another process runs the batches now."""


def new_holder() -> str:
    return f"{_process_namespace()}:{os.getpid()}:{secrets.token_hex(6)}"


def is_dead(holder: str) -> bool:
    """True only if the holder's process id is valid in this process's namespace and names no process any more."""
    namespace, _, rest = holder.partition(":")
    pid = rest.partition(":")[0]
    if namespace != _process_namespace() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:  # the process belongs to another user
        return False
    return False


def take_lease(connection: Connection, holder: str, now: float, duration_s: float) -> bool:
    """Take or renew the lease. False while another process holds it."""
    row = connection.execute(select(leases).where(leases.c.name == LEASE_NAME)).one_or_none()
    if row is None:
        values = {"name": LEASE_NAME, "holder": holder, "expires_at": now + duration_s}
        return insert_once(connection, leases, values)
    if row.holder != holder and row.expires_at > now and not is_dead(row.holder):
        return False
    is_unchanged = leases.c.holder == row.holder, leases.c.expires_at == row.expires_at
    taken = connection.execute(
        update(leases)
        .where(leases.c.name == LEASE_NAME, *is_unchanged)
        .values(holder=holder, expires_at=now + duration_s)
    )
    return taken.rowcount == 1


def release_lease(connection: Connection, holder: str) -> None:
    connection.execute(delete(leases).where(leases.c.name == LEASE_NAME, leases.c.holder == holder))


def check_lease(connection: Connection, holder: str) -> None:
    """Raises LeaseLost. While the holder's transaction lasts, no other process can take the lease."""
    query = select(leases.c.holder).where(leases.c.name == LEASE_NAME).with_for_update()
    if connection.execute(query).scalar_one_or_none() != holder:
        raise LeaseLost


def _process_namespace() -> str:
    """A name for the space in which this process's id is valid: one boot of one machine, and on Linux one container.
    A process that cannot tell gets a name of its own, so that no other process ever takes it for dead."""
    if sys.platform != "linux":
        parts = [os.uname().nodename]  # no containers share this kernel
    else:
        try:
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            parts = [boot_id, str(os.stat("/proc/self/ns/pid").st_ino)]
        except OSError:
            parts = [_UNIQUE]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()


_UNIQUE = secrets.token_hex(16)
