"""Engines on the network: who has the key is answered, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from penstock.cluster.transport import KeyPair, bind, connect, with_key


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        context.setsockopt(zmq.LINGER, 0)
        yield context


def is_answered(context: zmq.Context[zmq.Socket[bytes]], engine: zmq.Socket[bytes], endpoint: str) -> bool:
    with context.socket(zmq.DEALER) as gateway:
        connect(gateway, endpoint)
        gateway.send(b"hello")
        if not engine.poll(300):
            return False
        sender, message = engine.recv_multipart()
        engine.send_multipart((sender, message))
        return gateway.poll(2000) != 0 and gateway.recv() == b"hello"


def test_only_who_has_the_key_is_answered(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    keys = KeyPair.make()
    with context.socket(zmq.ROUTER) as engine:
        bind(engine, "tcp://127.0.0.1:*", keys.secret)
        address = engine.getsockopt_string(zmq.LAST_ENDPOINT)
        assert is_answered(context, engine, with_key(address, keys.public))
        assert not is_answered(context, engine, with_key(address, KeyPair.make().public))
        assert not is_answered(context, engine, address)
    assert keys.public not in repr(keys)


def test_a_socket_file_needs_none(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with context.socket(zmq.ROUTER) as engine:
        bind(engine, "ipc://*", None)
        assert is_answered(context, engine, engine.getsockopt_string(zmq.LAST_ENDPOINT))
