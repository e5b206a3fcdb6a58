"""A fleet in the middle of an upgrade: engines and gateways of the version before, from git, beside this version.

Opt-in, because it needs the history and takes a minute: PENSTOCK_PREVIOUS names the commit or tag of the version
before.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import httpx
import pytest

from penstock.core.machine import free_port
from tests.gateway.ratelimits.redis_server import RedisServer, running_redis

ROOT = Path(__file__).parents[2]
WAIT_S = 300.0
pytestmark = pytest.mark.slow


@pytest.fixture
def previous(tmp_path: Path) -> Path:
    """The files of the version before."""
    ref = os.environ.get("PENSTOCK_PREVIOUS")
    if not ref:
        pytest.skip("PENSTOCK_PREVIOUS names no version to run beside this one")
    archive = subprocess.run(["git", "archive", ref, "penstock"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode != 0:
        pytest.skip(f"git has no {ref} here: {archive.stderr.decode().strip()}")
    folder = tmp_path / "previous"
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


class Roles:
    def __init__(self, folder: Path, redis_url: str) -> None:
        self._folder = folder
        self._registry = redis_url
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, files: Path, name: str, *command: str) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(files),
            "PENSTOCK_REGISTRY": self._registry,
            "PENSTOCK_JOIN_TOKEN": "a token that both versions have",
            "PENSTOCK_DATA_DIR": str(self._folder / name),
        }
        with (self._folder / f"{name}.log").open("wb") as log:
            arguments = [sys.executable, "-m", "penstock.main", *command]
            self._running.append(
                subprocess.Popen(arguments, cwd=files, env=environment, stdout=log, stderr=log)
            )

    def close(self) -> None:
        for process in self._running:
            process.terminate()
        for process in self._running:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def replicas(url: str) -> list[str]:
    try:
        view = httpx.get(f"{url}/admin/cluster", timeout=60).json()
    except (httpx.HTTPError, ValueError):
        return []
    return [replica["id"] for replica in view.get("replicas", ()) if replica["state"] == "ready"]


def test_both_versions_serve_one_fleet(previous: Path, redis: RedisServer, tmp_path: Path) -> None:
    roles = Roles(tmp_path, redis.url)
    urls = [f"http://127.0.0.1:{port}" for port in (free_port("127.0.0.1"), free_port("127.0.0.1"))]
    try:
        for number, files in enumerate((previous, ROOT)):
            roles.start(files, f"engine-{number}", "engine", "echo")
            port = urls[number].rpartition(":")[2]
            roles.start(files, f"gateway-{number}", "gateway", "--port", port)
        roles.start(ROOT, "control", "control", "--min-replicas", "2")
        end_s = time.monotonic() + WAIT_S
        while any(len(replicas(url)) < 2 for url in urls):
            assert time.monotonic() < end_s, [log.read_text()[-600:] for log in tmp_path.glob("*.log")]
            time.sleep(0.2)
        for url in urls:
            for number in range(8):  # enough for both engines of each gateway
                prompt = f"question {number} to {url} "
                body = {"model": "echo", "prompt": prompt, "max_tokens": 40}
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["text"] == (prompt * 3)[:40]
    finally:
        roles.close()
