"""Two real control processes and a real Redis or PostgreSQL, or our API server of Kubernetes: the leader is paused,
another takes over, and the first wakes up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from penstock.cluster import kubernetes_leases, redis_registry
from penstock.cluster.leadership import LEADER, LeaderDocument, opened
from penstock.core.config import ClusterConfig
from penstock.serve.shared_fleet import open_registry
from tests.cluster.kubernetes_server import running_kubernetes
from tests.cluster.test_fleet_control import TOKENS, Host
from tests.gateway.ratelimits.redis_server import running_redis
from tests.gateway.store.postgres_server import running_postgres

WAIT_S = 240.0


@pytest.fixture(params=["redis", "postgresql", "kubernetes"])
def registry_url(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[str]:
    monkeypatch.setattr(redis_registry, "TIMEOUT_S", 60.0)  # a busy machine is not an outage
    monkeypatch.setattr(kubernetes_leases, "TIMEOUT_S", 60.0)
    if request.param == "kubernetes":
        with running_kubernetes(tmp_path / "kubernetes", is_encrypted=True) as kubernetes:
            for name, value in kubernetes.environment().items():
                monkeypatch.setenv(name, value)
            yield "kubernetes://"
        return
    if request.param == "postgresql":
        pytest.importorskip("psycopg", reason="needs the extra postgres")
    with running_redis() if request.param == "redis" else running_postgres() as server:
        yield server.url


class Control:
    """One `penstock control`."""

    def __init__(self, folder: Path, number: int, registry_url: str, *arguments: str) -> None:
        self._log = folder / f"control-{number}.log"
        environment = {
            **os.environ,
            "PENSTOCK_REGISTRY": registry_url,
            "PENSTOCK_JOIN_TOKEN": TOKENS.tokens[0],
            "PENSTOCK_DATABASE_URL": f"sqlite:///{folder / 'fleet.db'}",
        }
        command = [sys.executable, "-m", "penstock.main", "control", *arguments]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    @property
    def name(self) -> str:
        return self.said.partition(": ready to lead")[0].rpartition("\n")[2]

    @property
    def said(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.slow
async def test_a_paused_leader_wakes_up_and_changes_nothing(registry_url: str, tmp_path: Path) -> None:
    cluster = ClusterConfig(registry=registry_url)
    registry = open_registry(cluster)

    async def leader() -> LeaderDocument | None:
        data = (await registry.documents()).get(LEADER)
        return None if data is None else opened(LEADER, data, TOKENS).read(LeaderDocument)

    async def epochs() -> set[int]:
        documents = await registry.documents()
        return {opened(name, data, TOKENS).epoch for name, data in documents.items()}

    async with AsyncExitStack() as stack, asyncio.timeout(WAIT_S):
        stack.push_async_callback(registry.close)
        own_registry = open_registry(cluster)
        stack.push_async_callback(own_registry.close)
        host = Host(own_registry, "north", most=3)  # type: ignore[arg-type]
        await stack.enter_async_context(host.follower.running())
        await stack.enter_async_context(host.publisher.running())
        await stack.enter_async_context(host.ordered.taking_orders())
        await host.ordered.start_own()
        controls = [Control(tmp_path, number, registry_url, "--min-replicas", "2") for number in range(2)]
        for control in controls:
            stack.callback(control.close)
        while host.states() != ["ready", "ready"] or not all(control.name for control in controls):
            await asyncio.sleep(0.05)
        first = await leader()
        assert first is not None
        paused = next(control for control in controls if control.name == first.name)
        epoch = host.reader.epoch

        paused.process.send_signal(signal.SIGSTOP)
        while (second := await leader()) == first:
            await asyncio.sleep(0.05)
        assert second is not None
        assert second.name != first.name
        while host.reader.epoch == epoch or await epochs() != {host.reader.epoch}:
            await asyncio.sleep(0.05)
        paused.process.send_signal(signal.SIGCONT)
        while "steps down" not in paused.said:
            await asyncio.sleep(0.05)
        assert await epochs() == {host.reader.epoch}
        assert await leader() == second
        assert host.states() == ["ready", "ready"]  # what the first ordered; the second ordered nothing more
