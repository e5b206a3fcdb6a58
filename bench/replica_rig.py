"""Real engine processes behind a fleet, without HTTP before them, for benchmarks of several replicas."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from penstock.cli.console import fetch_model
from penstock.cluster.fleet import Fleet
from penstock.cluster.local import LocalLauncher
from penstock.cluster.replica import ReplicaSpec, RunningReplica
from penstock.cluster.supervisor import Supervisor
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig
from penstock.core.errors import PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request
from penstock.dispatch import DispatchConfig
from penstock.engine.echo import ECHO_MODEL
from penstock.router import ReplicaState
from penstock.serve.control import shared_engine

POLL_S = 0.01


@dataclass
class Answer:
    """What came back for one request."""

    sent_s: float
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    first_token_s: float | None = None
    last_event_s: float = 0.0
    longest_gap_s: float = 0.0  # between two events of the stream
    finish_reason: FinishReason | None = None
    error: PenstockError | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.sent_s


class Rig:
    def __init__(self, supervisor: Supervisor, fleet: Fleet) -> None:
        self.supervisor = supervisor
        self.fleet = fleet
        self.answers: list[Answer] = []  # to everything that was asked, in that order, finished or not

    async def ask(self, request: Request, fleet: Fleet | None = None) -> Answer:
        answer = Answer(time.perf_counter())
        self.answers.append(answer)
        is_over = asyncio.Event()

        def on_event(event: TokenEvent) -> None:
            now = time.perf_counter()
            if answer.first_token_s is None:
                answer.first_token_s = now
            else:
                answer.longest_gap_s = max(answer.longest_gap_s, now - answer.last_event_s)
            answer.last_event_s = now
            answer.tokens += event.token_ids
            answer.cached_tokens += event.num_cached_tokens or 0
            if event.finish_reason is not None:
                answer.finish_reason = event.finish_reason
                is_over.set()

        def on_error(error: PenstockError) -> None:
            answer.error = error
            is_over.set()

        asked = fleet or self.fleet
        asked.add(request, timeout_s=None, on_event=on_event, on_error=on_error)
        try:
            await is_over.wait()
        finally:
            asked.abort(request.id)  # if the caller does not wait for the end
        return answer

    def num_ready(self) -> int:
        return sum(link.state is ReplicaState.READY for link in self.fleet.replicas.values())

    async def until_ready(self, count: int) -> None:
        while self.num_ready() < count:
            await asyncio.sleep(POLL_S)

    def signal(self, replica_id: str, number: signal.Signals) -> None:
        pid = self.supervisor.pid(replica_id)
        assert pid is not None
        os.kill(pid, number)


class RememberingLauncher:
    """Remembers every process, so that each can be asked afterwards how it ended."""

    def __init__(self) -> None:
        self._launcher = LocalLauncher(log_level="ERROR")
        self.launched: dict[str, RunningReplica] = {}

    async def launch(self, spec: ReplicaSpec, replica_id: str) -> RunningReplica:
        running = self.launched[replica_id] = await self._launcher.launch(spec, replica_id)
        return running


def spec_for(model: str, count: int, num_kv_blocks: int | None = None) -> ReplicaSpec:
    """One of `count` replicas that share this machine."""
    engine = EngineConfig(model=ModelConfig(model=model), cache=CacheConfig(num_kv_blocks=num_kv_blocks))
    path = Path(ECHO_MODEL) if model == ECHO_MODEL else fetch_model(model)
    return ReplicaSpec(model=model, engine=shared_engine(engine, count, ()), model_path=str(path))


@contextlib.asynccontextmanager
async def running(spec: ReplicaSpec, count: int, config: DispatchConfig) -> AsyncIterator[Rig]:
    """Fails when an engine that serves at the end has lost track of a KV block."""
    launcher = RememberingLauncher()
    supervisor = Supervisor({"local": launcher})
    fleet = Fleet(config)
    supervisor.on_change.append(fleet.update)
    rig = Rig(supervisor, fleet)
    survivors: list[str] = []
    try:
        await asyncio.gather(*(supervisor.launch(spec) for _ in range(count)))
        await rig.until_ready(count)
        yield rig
        survivors = [link.id for link in fleet.replicas.values()]
    finally:
        await supervisor.close()
        fleet.close()
    for replica_id in survivors:
        code = await launcher.launched[replica_id].wait()
        if code:
            raise RuntimeError(f"{replica_id} left with exit code {code}: see what it logged")
