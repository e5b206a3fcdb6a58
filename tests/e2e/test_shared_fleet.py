"""`penstock engine` and `penstock gateway` as processes of their own: the host of a stream is killed, and leaves."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from penstock.core.messages import WIRE_VERSION

from .conftest import PENSTOCK

pytestmark = pytest.mark.slow

WAIT_S = 240.0
BODY = {"prompt": "hello there", "max_tokens": 3000, "ignore_eos": True, "stream": True}


def start(
    folder: Path, name: str, *arguments: str, program: Sequence[str] = (PENSTOCK,)
) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "PENSTOCK_REGISTRY": f"sqlite:///{folder / 'registry.db'}",
        "PENSTOCK_JOIN_TOKEN": "a token for the test of a shared fleet",
        "PENSTOCK_DATA_DIR": str(folder / name),
    }
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen([*program, *arguments], stdout=log, stderr=subprocess.STDOUT, env=environment)


def wait_for(path: Path, text: str) -> str:
    deadline = time.monotonic() + WAIT_S
    while text not in (log := path.read_text(errors="replace")):
        assert time.monotonic() < deadline, log
        time.sleep(0.05)
    return log


def test_a_stream_outlives_the_machine_that_computes_it(tmp_path: Path) -> None:
    hosts = [start(tmp_path, name, "engine", "echo") for name in ("north", "south")]
    gateway = start(tmp_path, "gateway", "gateway", "--port", "0")
    try:
        for name in ("north", "south"):
            wait_for(tmp_path / f"{name}.log", "to the gateways of the fleet")
        log = wait_for(tmp_path / "gateway.log", "http://127.0.0.1:")
        url = next(word for word in log.split() if word.startswith("http://127.0.0.1:"))
        deadline = time.monotonic() + WAIT_S
        while True:
            replicas = httpx.get(f"{url}/admin/cluster", timeout=60).json()["replicas"]
            if [replica["state"] for replica in replicas] == ["ready", "ready"]:
                break
            assert time.monotonic() < deadline, replicas
            time.sleep(0.05)
        num_events = 0
        with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=60) as answer:
            for line in answer.iter_lines():
                num_events += line.startswith("data: {")
                if num_events == 3:
                    # Whichever computes the answer: the other one goes on, and both may not be killed.
                    hosts[0].send_signal(signal.SIGKILL)
                    hosts[0].wait()
        assert line == "data: [DONE]" or not line
        hosts[1].send_signal(signal.SIGTERM)
        assert hosts[1].wait(timeout=WAIT_S) == 0
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(timeout=WAIT_S) == 0
    finally:
        for process in (*hosts, gateway):
            process.kill()
            process.wait()


def test_a_machine_with_another_token_joins_nothing_and_says_so(tmp_path: Path) -> None:
    """A host, a gateway and a control process, while a host of the fleet serves."""
    first = start(tmp_path, "first", "engine", "echo")
    others: list[subprocess.Popen[bytes]] = []
    try:
        wait_for(tmp_path / "first.log", "to the gateways of the fleet")
        token = ["--join-token", "a token of another shared fleet"]
        roles = {"engine": ["echo"], "gateway": ["--port", "0"], "control": []}
        others += [start(tmp_path, role, role, *rest, *token) for role, rest in roles.items()]
        for role, process in zip(roles, others, strict=True):
            assert process.wait(timeout=WAIT_S) == 2
            log = (tmp_path / f"{role}.log").read_text()
            assert "joins nothing" in log
            assert "The join token belongs to another fleet: there is 1 host in the registry" in log
        assert first.poll() is None
        with sqlite3.connect(tmp_path / "registry.db") as registry:
            assert registry.execute("select count(*) from fleet_hosts").fetchone() == (1,)
            assert registry.execute("select count(*) from fleet_leases").fetchone() == (0,)
    finally:
        for process in (first, *others):
            process.kill()
            process.wait()


NEWER = """
import penstock.core.messages as messages
messages.WIRE_VERSION += 1
from penstock.main import main
main()
"""


def test_machines_of_two_versions_of_the_messages_serve_side_by_side(tmp_path: Path) -> None:
    """A host of a later version is there first. The gateway of this version leaves it out and says so, and serves as
    soon as a host of its own version has joined, which says so as well."""
    processes = [start(tmp_path, "newer", "engine", "echo", program=(sys.executable, "-c", NEWER))]
    try:
        wait_for(tmp_path / "newer.log", "to the gateways of the fleet")
        processes.append(start(tmp_path, "gateway", "gateway", "--port", "0"))
        said = (
            f"with version {WIRE_VERSION + 1} of the messages, and this machine speaks version {WIRE_VERSION}"
        )
        wait_for(tmp_path / "gateway.log", said)
        wait_for(tmp_path / "gateway.log", f"speaks version {WIRE_VERSION + 1} of the messages")
        processes.append(start(tmp_path, "ours", "engine", "echo"))
        wait_for(tmp_path / "ours.log", said)
        log = wait_for(tmp_path / "gateway.log", "http://127.0.0.1:")
        url = next(word for word in log.split() if word.startswith("http://127.0.0.1:"))
        replicas = httpx.get(f"{url}/admin/cluster", timeout=60).json()["replicas"]
        assert len(replicas) == 1, "the other host is left out"
        answer = httpx.post(
            f"{url}/v1/completions", json=BODY | {"stream": False, "max_tokens": 5}, timeout=60
        )
        assert answer.status_code == 200
    finally:
        for process in processes:
            process.kill()
            process.wait()
