"""A real object store for tests: moto's server, in a process of its own that can be stopped and frozen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
import pytest

from penstock.core.machine import free_port
from penstock.gateway.blobs.bucket import S3Access, S3Client

BUCKET = "penstock-tests"


class ObjectStore:
    """Keeps its port over `stop` and `start`, and its data only while it runs. `prefix` goes before its command, to
    run it where the address `host` is."""

    def __init__(self, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> None:
        self._host, self._prefix = host, prefix
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{self._host}:{self._port}"

    @property
    def access(self) -> S3Access:
        return S3Access("id", "secret", endpoint=self.endpoint)

    def client(self, prefix: str = "files") -> S3Client:
        return S3Client(f"s3://{BUCKET}/{prefix}", self.access)

    def start(self) -> None:
        server = [sys.executable, "-m", "moto.server", "-H", self._host, "-p", str(self._port)]
        command = [*self._prefix, *server]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.put(f"{self.endpoint}/{BUCKET}").raise_for_status()
                return
            except httpx.TransportError:
                assert self._process.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.05)

    def freeze(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def running_store(host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> Iterator[ObjectStore]:
    pytest.importorskip("moto", reason="needs the extra dev")
    store = ObjectStore(host, prefix)
    store.start()
    try:
        yield store
    finally:
        store.stop()
