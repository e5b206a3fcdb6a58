"""Names of processes that may hold the lease, made so that others on the same machine can tell when one is dead."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket


def new_holder() -> str:
    return f"{_machine()}:{os.getpid()}:{secrets.token_hex(6)}"


def is_dead(holder: str) -> bool:
    """True only for a process of this machine that no longer exists; it need not be waited for."""
    machine, _, rest = holder.partition(":")
    pid = rest.partition(":")[0]
    if machine != _machine() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:  # somebody else's process
        return False
    return False


def _machine() -> str:
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=6).hexdigest()
