"""The socket that a server listens on, and the folder of its data."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, UsageError
from penstock.core.gateway_config import ServerConfig, StoreConfig
from penstock.serve.environment import data_dir
from penstock.serve.server import announce_leave, bind


def test_a_port_in_use_and_a_foreign_address_have_their_own_hints() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(UsageError, match="Address already in use") as caught:
            bind(ServerConfig(port=taken.getsockname()[1]))
        assert "--port" in (caught.value.hint or "")
    for host in ("192.0.2.1", "256.1.1.1"):
        with pytest.raises(UsageError, match=f"Cannot listen on {host}") as caught:
            bind(ServerConfig(host=host, port=0))
        assert "--host" in (caught.value.hint or "")


def test_a_data_folder_that_is_a_file_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="is a file"):
        data_dir(StoreConfig(data_dir=str(file)))


def test_one_line_says_what_a_leaving_server_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    announce_leave(ServerConfig(lame_duck_s=2, drain_timeout=3))
    announce_leave(ServerConfig(drain_timeout=3))
    leaving, draining = caplog.messages
    assert "requests are taken for 2 s more, then running answers get 3 s" in leaving
    assert draining == "draining: running answers get 3 s to finish"
