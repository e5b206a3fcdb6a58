"""A PostgreSQL server of our own: a new cluster in a temporary folder, on a free port, gone with the test."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from penstock.core.machine import free_port


class PostgresServer:
    """Listens at `host`. `namespace` is the file of the network namespace that has this address, if not our own."""

    def __init__(
        self,
        binaries: Path,
        folder: Path,
        user: str | None,
        host: str = "127.0.0.1",
        namespace: Path | None = None,
    ) -> None:
        self._host, self._namespace = host, namespace
        self._binaries = binaries
        self._data = folder / "data"
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None
        self._port = free_port()

    @property
    def url(self) -> str:
        return f"postgresql://penstock@{self._host}:{self._port}/postgres"

    def new_database(self, name: str) -> str:
        """Make an empty database. Returns its URL."""
        command = [
            str(self._binaries / "createdb"),
            "-h",
            self._host,
            "-p",
            str(self._port),
            "-U",
            "penstock",
        ]
        subprocess.run([*command, name], check=True, capture_output=True)
        return f"postgresql://penstock@{self._host}:{self._port}/{name}"

    def create(self) -> None:
        command = [
            str(self._binaries / "initdb"),
            "-D",
            str(self._data),
            "-U",
            "penstock",
            "--auth=trust",
            "-N",
        ]
        subprocess.run(command, check=True, capture_output=True, user=self._user)
        with (self._data / "pg_hba.conf").open("a") as file:
            file.write(f"host all all {self._host}/24 trust\n")

    def start(self) -> None:
        command = [
            *(str(self._binaries / "postgres"), "-D", str(self._data), "-p", str(self._port)),
            *("-c", f"listen_addresses={self._host}", "-c", "unix_socket_directories=", "-c", "fsync=off"),
        ]
        user = self._user
        if (
            self._namespace is not None and user is not None
        ):  # only root may enter, so it changes the user afterwards
            account = pwd.getpwnam(user)
            ids = [f"--setuid={account.pw_uid}", f"--setgid={account.pw_gid}"]
            command, user = ["nsenter", f"--net={self._namespace}", *ids, *command], None
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL, user=user)
        deadline = time.monotonic() + 60
        while not self._answers():
            assert self._process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.05)

    def become(self, role: Literal["standby", "primary"]) -> None:
        """Start again as a standby, which takes no writes, or as a primary."""
        self.stop()
        signal_file = self._data / "standby.signal"
        if role == "standby":
            signal_file.touch()
            if self._user is not None:
                shutil.chown(signal_file, self._user)
        else:
            signal_file.unlink()
        self.start()

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # does not wait for clients to leave
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        command = [str(self._binaries / "pg_isready"), "-h", self._host, "-p", str(self._port)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def running_postgres(host: str = "127.0.0.1", namespace: Path | None = None) -> Iterator[PostgresServer]:
    binaries = _find_binaries() or _install()
    is_root = os.geteuid() == 0
    user = _unprivileged_user() if is_root else None  # the server refuses to run as root
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if user is not None:
            shutil.chown(folder, user)
        server = PostgresServer(binaries, folder, user, host, namespace)
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _find_binaries() -> Path | None:
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("initdb")
    candidates = [*installed, *([Path(on_path).resolve().parent] if on_path else [])]
    return next((folder for folder in candidates if (folder / "initdb").exists()), None)


def _install() -> Path:
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        pytest.skip("PostgreSQL is not installed, and this user cannot install it")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        [apt, "install", "-y", "--no-install-recommends", "postgresql"], env=environment, check=False
    )
    binaries = _find_binaries()
    if done.returncode != 0 or binaries is None:
        pytest.skip("PostgreSQL is not installed, and the package manager could not get it")
    return binaries


def _unprivileged_user() -> str:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    pytest.skip("PostgreSQL does not run as root, and there is no other user")
