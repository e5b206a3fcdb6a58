"""The control plane behind a real server with several gateway processes: a release by command that outlives a
restart, and a fleet that goes to sleep and wakes up."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import PENSTOCK, RunningServer, start_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S = 240.0
BODY = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True, "temperature": 0}


def command(server: RunningServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PENSTOCK, *arguments, "--url", server.url], capture_output=True, text=True, timeout=240, check=False
    )


def cluster(server: RunningServer) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/admin/cluster", timeout=60).raise_for_status()
    document: dict[str, Any] = answer.json()
    return document


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ask(server: RunningServer) -> str:
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_a_release_by_command_is_promoted_and_outlives_a_restart(tmp_path: Path) -> None:
    flags = ("echo", "--data-dir", str(tmp_path))
    server = start_server(tmp_path, *flags, "--api-workers", "2")
    stop = threading.Event()
    texts: set[str] = set()

    def client() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            while not stop.wait(0.02):  # leaves cores to the servers
                answer = http.post("/v1/completions", json=BODY).raise_for_status()
                texts.add(answer.json()["choices"][0]["text"])

    clients = [threading.Thread(target=client) for _ in range(2)]
    try:
        for thread in clients:
            thread.start()
        policy = ["--steps", "0.5", "--mirror", "0.5", "--stage-s", "0", "--min-requests", "5"]
        policy += ["--min-compared", "3", "--max-ttft-ratio", "1000000", "--max-itl-ratio", "1000000"]
        released = command(
            server, "release", "start", "--set", "max_num_seqs=64", "--revision", "second", "--watch", *policy
        )
        assert released.returncode == 0, released.stderr
        assert released.stdout.rstrip().endswith("promoted: last gates passed")
    finally:
        stop.set()
        for thread in clients:
            thread.join()
    assert texts == {"hellohel"}  # no client noticed the release
    assert [replica["revision"] for replica in cluster(server)["replicas"]] == ["second"]
    assert server.stop() == 0

    server = start_server(tmp_path, *flags)
    assert [replica["revision"] for replica in cluster(server)["replicas"]] == ["second"]
    shown = command(server, "top", "--once").stdout
    assert "→ second, promoted" in shown
    assert server.stop() == 0


def test_a_fleet_goes_to_sleep_and_a_request_wakes_it_up(tmp_path: Path) -> None:
    flags = ("--min-replicas", "0", "--max-replicas", "2", "--scale-to-zero-after-s", "1")
    server = start_server(
        tmp_path,
        "echo",
        *flags,
        "--scale-down-pause-s",
        "0.5",
        "--api-workers",
        "2",
        "--data-dir",
        str(tmp_path),
    )
    until(lambda: not cluster(server)["replicas"])
    # A load balancer must not take a fleet that sleeps for one that is ill.
    assert httpx.get(f"{server.url}/ready", timeout=60).status_code == 200
    assert ask(server) == "hellohel"
    page = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert 'penstock_autoscaler_decisions_total{direction="down",model_name="echo",role="both"}' in page
    assert server.stop() == 0
