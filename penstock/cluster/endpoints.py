"""Endpoints of engines: a socket file of this machine, or TCP with a key (CURVE).

An endpoint on the network is `tcp://host:port#key`. All traffic is encrypted, and only clients with the key get an
answer: a CURVE server never sends its public key, so a client that knows the key was given it. The key is made for
one engine process, travels with the endpoint alone, and is never logged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import zmq


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The keys of one engine. The public key is only for clients that may reach the engine."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return "KeyPair()"

    @staticmethod
    def make() -> KeyPair:
        public, secret = zmq.curve_keypair()
        return KeyPair(public.decode(), secret.decode())


def with_key(address: str, public_key: str) -> str:
    return f"{address}#{public_key}"


def bind(socket: zmq.Socket[Any], address: str, secret_key: str | None) -> None:
    """Bind a socket to an address without a key."""
    if secret_key is not None:
        socket.curve_secretkey = secret_key.encode()
        socket.curve_server = True
    socket.bind(address)


def connect(socket: zmq.Socket[Any], endpoint: str) -> None:
    address, _, server_key = endpoint.partition("#")
    if server_key:
        public, secret = zmq.curve_keypair()
        socket.curve_publickey = public
        socket.curve_secretkey = secret
        socket.curve_serverkey = server_key.encode()
    socket.connect(address)
