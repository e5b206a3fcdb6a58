"""Finds ports for servers that start later."""

from __future__ import annotations

import random
import socket

# Below the ports that the kernel takes for outgoing connections, so that none of these takes a server's port between
# the choice and the start; and below the node ports of Kubernetes.
SERVER_PORTS = range(20_000, 30_000)
_NUM_ATTEMPTS = 32

_random = random.SystemRandom()  # processes that were forked from one another must not choose the same ports


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port. If another process takes the port first, the server fails and must be started again."""
    for port in _random.sample(SERVER_PORTS, _NUM_ATTEMPTS):
        try:
            return _bind(host, port)
        except OSError:
            continue
    return _bind(host, 0)


def _bind(host: str, port: int) -> int:
    """Bind to the port for a moment, and return the port. 0 lets the kernel choose."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, port))
        return int(probe.getsockname()[1])
