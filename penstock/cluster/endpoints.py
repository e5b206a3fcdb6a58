"""Where an engine listens and how gateways get there: a socket file of this machine, or TCP with a key (CURVE).

An endpoint on the network is `tcp://host:port#key`. All traffic is encrypted, and only who has the key gets an
answer: in CURVE a server never tells its public key, so that knowing it proves that one was meant to. It is made for
one life of one engine, travels with the endpoint alone, and is never logged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import zmq


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Of one engine. The public one is for those who may reach it, and for nobody else."""

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
    """`address` is without a key."""
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
