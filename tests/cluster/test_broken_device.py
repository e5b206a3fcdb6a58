"""A device that breaks under a running step: the process goes, its requests go on, and another process comes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.cluster.fleet import Fleet
from penstock.cluster.local import LocalLauncher
from penstock.cluster.supervisor import Supervisor
from penstock.core.request import FinishReason
from penstock.router import ReplicaState
from tests.cluster.engines import echo_spec, make_request, send, until

# Python runs it in every engine process. Whichever first meets the file in a late step takes it away, and breaks.
_SITE = """
import importlib.abc, importlib.util, os, sys

class Breaking(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "penstock.engine.echo":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), break_into(module.EchoExecutor))
        return spec

def break_into(executor):
    collect, num_steps = executor.collect, 0
    def collect_or_break(self):
        nonlocal num_steps
        num_steps += 1
        if num_steps < {break_at_step}:
            return collect(self)
        try:
            os.remove({marker!r})
        except FileNotFoundError:
            return collect(self)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    executor.collect = collect_or_break

sys.meta_path.insert(0, Breaking())
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "break"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(_SITE.format(marker=str(path), break_at_step=50))
    site = [str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(site))
    return path


@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_requests_survive_it(
    marker: Path, num_replicas: int, capfd: pytest.CaptureFixture[str]
) -> None:
    supervisor = Supervisor({"local": LocalLauncher()}, heartbeat_timeout_s=60.0)
    fleet = Fleet()
    supervisor.on_change.append(fleet.update)
    try:
        first = [await supervisor.launch(echo_spec()) for _ in range(num_replicas)]
        await fleet.wait_ready()
        marker.touch()
        inboxes = [
            send(fleet, make_request(f"{n}", b"xyz", max_tokens=8_000), timeout_s=240.0) for n in range(3)
        ]
        for inbox in inboxes:
            await inbox.until_over()
            assert (inbox.error, inbox.finish_reason) == (None, FinishReason.LENGTH)
            assert bytes(inbox.tokens) == b"xyz" * 2_666 + b"xy"
        assert not marker.exists()
        await until(lambda: supervisor.num_restarts == 1)
        await until(
            lambda: (
                [member.replica.state for member in supervisor.members()]
                == [ReplicaState.READY] * num_replicas
            )
        )
        assert len(set(first) - {member.id for member in supervisor.members()}) == 1
    finally:
        await supervisor.close()
    log = capfd.readouterr().err
    assert "Traceback (most recent call last)" in log
    assert "illegal memory access" in log
