"""Replicas as real processes under a supervisor: started, killed, frozen, drained, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.cluster import replica_process
from penstock.cluster.fleet import Fleet
from penstock.cluster.local import LocalLauncher
from penstock.cluster.replica import Member
from penstock.cluster.supervisor import Supervisor
from penstock.cluster.transport import ZmqEngineClient
from penstock.cluster.worker import Worker
from penstock.core.errors import EngineUnavailable, ModelLoadError, NotFound
from penstock.router import ReplicaState
from tests.cluster.engines import ENDLESS, echo_spec, lose_patience, make_request, send, until


class History:
    """What gateways heard of each replica."""

    def __init__(self) -> None:
        self.states: dict[str, list[ReplicaState]] = {}

    def note(self, members: tuple[Member, ...]) -> None:
        present = {member.id: member.replica.state for member in members}
        for replica_id in {*self.states, *present}:
            known = self.states.setdefault(replica_id, [])
            state = present.get(replica_id, ReplicaState.GONE)
            if not known or known[-1] is not state:
                known.append(state)


@asynccontextmanager
async def supervised() -> AsyncIterator[tuple[Supervisor, History]]:
    supervisor = Supervisor({"local": LocalLauncher()}, heartbeat_timeout_s=60.0)
    history = History()
    supervisor.on_change.append(history.note)
    try:
        yield supervisor, history
    finally:
        await supervisor.close()


def kill(supervisor: Supervisor, replica_id: str, number: signal.Signals) -> int:
    pid = supervisor.pid(replica_id)
    assert pid is not None
    os.kill(pid, number)
    return pid


# Python runs it in every engine process. The worker that first meets the file removes the file and hangs.
_FREEZING_SITE = """
import os, time

def sleep_for_a_day():
    time.sleep(86_400)

getppid = os.getppid

def getppid_or_freeze():
    try:
        os.remove({marker!r})
    except FileNotFoundError:
        return getppid()
    sleep_for_a_day()

os.getppid = getppid_or_freeze
"""
BEGINNING = [ReplicaState.STARTING, ReplicaState.WARMING, ReplicaState.READY]


async def test_a_killed_replica_is_followed_by_another_one() -> None:
    async with supervised() as (supervisor, history):
        first = await supervisor.launch(echo_spec())
        killed = kill(supervisor, first, signal.SIGKILL)
        await until(lambda: supervisor.num_restarts)
        await until(lambda: supervisor.members()[0].replica.state is ReplicaState.READY)
        (successor,) = supervisor.members()
        assert successor.id != first
        assert supervisor.pid(successor.id) != killed
        assert supervisor.num_restarts == 1
        assert history.states == {first: [*BEGINNING, ReplicaState.GONE], successor.id: BEGINNING}
        with pytest.raises(NotFound):
            supervisor.stats(first)


async def test_a_frozen_replica_is_killed_and_followed_by_another_one() -> None:
    async with supervised() as (supervisor, history):
        first = await supervisor.launch(echo_spec())
        kill(supervisor, first, signal.SIGSTOP)
        lose_patience(supervisor, first)
        await until(lambda: supervisor.num_restarts and history.states[first][-1] is ReplicaState.GONE)
        assert history.states[first] == [*BEGINNING, ReplicaState.UNHEALTHY, ReplicaState.GONE]
        await until(lambda: supervisor.members()[0].replica.state is ReplicaState.READY)


async def test_a_drained_replica_finishes_what_it_has() -> None:
    async with supervised() as (supervisor, history):
        fleet = Fleet()
        supervisor.on_change.append(fleet.update)
        replica_id = await supervisor.launch(echo_spec())
        await fleet.wait_ready()
        inbox = send(fleet, make_request("long", max_tokens=5_000))
        await inbox.until(lambda inbox: bool(inbox.tokens))
        assert await supervisor.drain(replica_id, timeout_s=60.0)
        assert bytes(inbox.tokens) == (b"abc" * 2_000)[:5_000]
        assert supervisor.resume(replica_id)
        assert history.states[replica_id][-1] is ReplicaState.READY
        endless = send(fleet, make_request("endless", max_tokens=ENDLESS))
        await endless.until(lambda inbox: bool(inbox.tokens))
        assert not await supervisor.drain(replica_id, timeout_s=0.1)
        await supervisor.stop(replica_id)
        assert supervisor.members() == ()
        assert isinstance(endless.error, EngineUnavailable)
        fleet.close()


async def test_one_that_dies_while_it_drains_is_not_replaced() -> None:
    async with supervised() as (supervisor, _):
        replica_id = await supervisor.launch(echo_spec())
        draining = asyncio.create_task(supervisor.drain(replica_id, timeout_s=60.0))
        await asyncio.sleep(0)
        kill(supervisor, replica_id, signal.SIGKILL)
        assert await draining
        await until(lambda: not supervisor.members())


async def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    async with supervised() as (supervisor, history):
        with pytest.raises(ModelLoadError, match=r"broken\.gguf"):
            await supervisor.launch(replace(echo_spec(), model_path=str(broken)))
        assert supervisor.members() == ()
        assert history.states == {"replica-1": [ReplicaState.STARTING, ReplicaState.GONE]}


async def test_the_reason_of_a_failed_start_waits_for_the_process_that_asked(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path / 'engine.sock'}"
    worker = Worker(endpoint)
    reporting = asyncio.create_task(asyncio.to_thread(worker.report_failure, ModelLoadError("no weights")))
    await asyncio.sleep(0.2)  # long after the worker has looked into its inbox for the first time
    client = ZmqEngineClient(endpoint)
    client.start()
    try:
        with pytest.raises(ModelLoadError, match="no weights"):
            await asyncio.wait_for(client.wait_ready(), 60)
        await reporting
    finally:
        client.close()
        worker.close()


async def test_a_frozen_engine_leaves_its_stacks_in_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_FREEZING_SITE.format(marker=str(tmp_path / "freeze")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(replica_process, "STACK_DUMP_S", 600.0)
    log = ""

    def has_stacks() -> bool:
        nonlocal log
        log += capfd.readouterr().err
        return "in sleep_for_a_day" in log

    async with supervised() as (supervisor, history):
        first = await supervisor.launch(echo_spec())
        freeze = tmp_path / "freeze"
        freeze.touch()
        await until(lambda: not freeze.exists())
        lose_patience(supervisor, first)
        await until(has_stacks)
        kill(supervisor, first, signal.SIGKILL)
        await until(lambda: supervisor.num_restarts and history.states[first][-1] is ReplicaState.GONE)
    assert history.states[first] == [*BEGINNING, ReplicaState.UNHEALTHY, ReplicaState.GONE]


async def test_a_replica_can_be_stopped_while_it_starts() -> None:
    async with supervised() as (supervisor, _):
        launching = asyncio.create_task(supervisor.launch(echo_spec()))
        await until(lambda: supervisor.members() and supervisor.pid(supervisor.members()[0].id))
        await supervisor.stop(supervisor.members()[0].id)
        with pytest.raises(EngineUnavailable):
            await launching
        assert supervisor.members() == ()
