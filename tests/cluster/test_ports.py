from __future__ import annotations

import socket

import pytest

from penstock.core import machine
from penstock.core.machine import SERVER_PORTS, free_port


def test_a_port_is_free_and_no_outgoing_connection_gets_it() -> None:
    port = free_port()
    assert port in SERVER_PORTS
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_taken_port_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_NUM_ATTEMPTS", 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(machine, "SERVER_PORTS", range(port, port + 1))
        assert free_port() != port


def test_a_host_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")
