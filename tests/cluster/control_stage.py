"""A whole server without HTTP: real engine processes that echo, a supervisor, a fleet, and the control plane."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from penstock.cluster.control_link import ControlLink, SocketChannel
from penstock.cluster.control_plane import ControlPlane
from penstock.cluster.fleet import Fleet
from penstock.cluster.replica import ReplicaSpec
from penstock.cluster.staged_records import (
    ExperimentRecord,
    MemoryRecords,
    RecordStore,
    ReleaseRecord,
    revision_of,
)
from penstock.cluster.supervisor import Supervisor
from penstock.control.autoscaler import AutoscalerConfig
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request, SamplingParams
from tests.copies import CopyingLauncher

WAIT_S = 240.0
INTERVAL_S = 0.05
ENGINE = EngineConfig(model=ModelConfig(model="echo"), cache=CacheConfig(num_kv_blocks=4096), num_threads=1)
SPEC = ReplicaSpec(model="echo", engine=ENGINE, model_path="echo", revision=revision_of(ENGINE, "echo"))


async def resolve(name: str) -> str:
    if name != "echo":
        raise InvalidRequest(f"There is no model {name!r}.", param="weights")
    return name


@dataclass
class Stage:
    supervisor: Supervisor
    plane: ControlPlane
    fleets: list[Fleet]
    links: list[ControlLink]
    answers: list[tuple[int, ...]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def revisions(self) -> set[str]:
        return {member.replica.revision for member in self.supervisor.members()}

    async def ask(self, prompt: bytes = b"abcd", max_tokens: int = 8) -> tuple[int, ...]:
        """One request to one of the gateways. Raises what it was refused with."""
        number = next(self._numbers)
        fleet = self.fleets[number % len(self.fleets)]
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tokens: list[int] = []

        def on_event(event: TokenEvent) -> None:
            tokens.extend(event.token_ids)
            if event.finish_reason is not None:
                assert event.finish_reason is FinishReason.LENGTH
                done.set_result(None)

        def on_error(error: PenstockError) -> None:
            done.set_exception(error)

        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        request = Request(id=f"r{number}", prompt_token_ids=tuple(prompt), sampling=sampling, model="echo")
        fleet.add(request, timeout_s=WAIT_S, on_event=on_event, on_error=on_error)
        try:
            async with asyncio.timeout(WAIT_S):
                await done
        finally:
            fleet.abort(request.id)
        self.answers.append(tuple(tokens))
        return tuple(tokens)

    @contextlib.asynccontextmanager
    async def traffic(self, concurrency: int, **request: int) -> AsyncIterator[None]:
        """Clients that ask again as soon as they are answered."""

        async def client() -> None:
            while True:
                await self.ask(**request)  # type: ignore[arg-type]

        clients = [asyncio.create_task(client()) for _ in range(concurrency)]
        try:
            yield
        finally:
            for task in clients:
                task.cancel()
            for result in await asyncio.gather(*clients, return_exceptions=True):
                if not isinstance(result, asyncio.CancelledError):
                    assert isinstance(result, BaseException)
                    raise result

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, self.plane.view()
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def open_stage(
    folder: Path,
    *,
    scaling: AutoscalerConfig | None = None,
    store: RecordStore[ReleaseRecord] | None = None,
    experiments: RecordStore[ExperimentRecord] | None = None,
    num_replicas: int = 1,
    num_gateways: int = 1,
    spec: ReplicaSpec = SPEC,
) -> AsyncIterator[Stage]:
    supervisor = Supervisor({"local": CopyingLauncher(log_level="WARNING")}, heartbeat_timeout_s=60.0)
    plane = ControlPlane(
        supervisor,
        [(spec, scaling)],
        store or MemoryRecords(),
        resolve,
        drain_timeout_s=10.0,
        look_interval_s=INTERVAL_S,
        experiments=experiments or MemoryRecords(),
    )
    socket = folder / "control.sock"
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(supervisor.close)
        (serving,) = await plane.prepare()
        await asyncio.gather(*(supervisor.launch(serving) for _ in range(num_replicas)))
        await stack.enter_async_context(plane.running(socket))
        stage = Stage(supervisor, plane, [], [])
        for _ in range(num_gateways):
            fleet = Fleet(starts_on_demand=scaling is not None and not scaling.min_replicas)
            stack.callback(fleet.close)
            supervisor.on_change.append(fleet.update)
            stack.callback(supervisor.on_change.remove, fleet.update)
            fleet.update(supervisor.members())
            link = ControlLink(lambda: SocketChannel.connect(socket), fleet, interval_s=INTERVAL_S)
            fleet.observers += [link.traffic, link.experiment_traffic]
            fleet.choose_revisions(link.choose_revision)
            await fleet.wait_ready()
            await stack.enter_async_context(link.running())
            stage.fleets.append(fleet)
            stage.links.append(link)
        yield stage
