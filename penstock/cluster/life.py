"""One life of one replica: from launching its process to the end of it, by whichever hand. Never starts another:
`supervisor` does. Knows no gateway and no request of a client.

    starting   the process exists and loads the model
    warming    it answers a request of ours, so that no client's is the first
    ready      it serves
    draining   it finishes what it has and gets no more; may become ready again
    unhealthy  it is silent for too long, and is killed
    gone       the process has ended
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from penstock.cluster.replica import Launcher, Member, ReplicaSpec, RunningReplica
from penstock.cluster.silence import Silence
from penstock.cluster.transport import ZmqEngineClient
from penstock.cluster.warm_up import warm_up
from penstock.core.errors import EngineUnavailable, PenstockError
from penstock.core.messages import HEARTBEAT_INTERVAL_S, EngineReady, EngineStats, LoadProgress
from penstock.router import Replica, ReplicaState

log = logging.getLogger(__name__)

LAST_WORDS_S = 0.2  # for what a process sent before it died to arrive
STACK_DUMP_S = 0.2  # for a frozen process to write the stacks of its threads before it is killed
T = TypeVar("T")


def processor_s(pid: int | None) -> float | None:
    """Processor time that a process of this machine has used; None where nobody knows."""
    try:
        # The name of the program, in parentheses, may hold spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask_for_stacks(pid: int | None) -> None:
    """Ask a worker process of this machine to write the stacks of its threads to its log."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)


class ReplicaLife:
    def __init__(
        self,
        replica_id: str,
        spec: ReplicaSpec,
        *,
        heartbeat_timeout_s: float,
        on_change: Callable[[], None],
        on_progress: Callable[[LoadProgress], None] | None = None,
    ) -> None:
        self.id = replica_id
        self.spec = spec
        self._on_change = on_change
        self._on_progress = on_progress
        self._silence = Silence(heartbeat_timeout_s, spec.engine.scheduler.max_num_batched_tokens)
        self._state = ReplicaState.STARTING
        self._running: RunningReplica | None = None
        self._client: ZmqEngineClient | None = None
        self._watching: asyncio.Task[str] | None = None
        self.heartbeats = 0  # received so far

    @property
    def state(self) -> ReplicaState:
        return self._state

    @property
    def ready(self) -> EngineReady | None:
        return None if self._client is None else self._client.ready

    @property
    def stats(self) -> EngineStats:
        return EngineStats() if self._client is None else self._client.stats

    @property
    def pid(self) -> int | None:
        return None if self._running is None else self._running.pid

    def member(self) -> Member:
        ready = self.ready
        return Member(
            replica=Replica(
                id=self.id,
                models=frozenset((self.spec.model,)),
                state=self._state,
                revision=self.spec.revision,
                region=self.spec.region,
                block_size=self.spec.engine.cache.block_size,
                num_kv_blocks=None if ready is None else ready.num_kv_blocks,
                max_step_tokens=self.spec.engine.scheduler.max_num_batched_tokens,
            ),
            spec=self.spec,
            endpoint="" if self._running is None else self._running.endpoint,
        )

    async def begin(self, launcher: Launcher) -> None:
        """Returns when the replica is ready; raises what kept it from that."""
        self._running = await launcher.launch(self.spec, self.id)
        self._client = ZmqEngineClient(
            self._running.endpoint, on_progress=self._on_progress, on_stats=self._on_stats
        )
        self._client.start()
        self._watching = asyncio.create_task(self._watch(self._running, self._client))
        ready = await self._unless_over(self._client.wait_ready())
        self._become(ReplicaState.WARMING)
        self._silence.token_s = await self._unless_over(warm_up(self._client, ready))
        self._become(ReplicaState.READY)

    async def over(self) -> str:
        """Returns when the process has ended: how, as the rest of a sentence about it."""
        assert self._watching is not None, "begin() comes first"
        return await asyncio.shield(self._watching)

    def drain(self) -> None:
        if self._state is ReplicaState.READY:
            self._become(ReplicaState.DRAINING)

    def resume(self) -> bool:
        """Whether a draining replica serves again."""
        if self._state is ReplicaState.DRAINING:
            self._become(ReplicaState.READY)
        return self._state is ReplicaState.READY

    async def end(self, *, at_once: bool = False) -> None:
        """Ask the process to leave and wait until it has; `at_once`, or before it listens, it is killed."""
        was_listening = self._client is not None and self._client.ready is not None
        self._become(ReplicaState.GONE)
        try:
            if self._running is not None:
                if at_once or not was_listening:
                    self._running.kill()
                elif self._client is not None:
                    self._client.shut_down_engine()
                await self._running.stop()
            if self._watching is not None:
                await self._watching
        finally:  # also when whoever waits for the end is called off: an open socket would keep us from leaving
            if self._client is not None:
                self._client.close()

    def _become(self, state: ReplicaState) -> None:
        if state is not self._state and self._state is not ReplicaState.GONE:
            self._state = state
            self._on_change()

    def _on_stats(self, stats: EngineStats) -> None:
        self.heartbeats += 1
        self._silence.heard(stats)

    async def _watch(self, running: RunningReplica, client: ZmqEngineClient) -> str:
        exited = asyncio.ensure_future(running.wait())
        how = ""
        worked_s = None
        while not (await asyncio.wait((exited,), timeout=HEARTBEAT_INTERVAL_S))[0]:
            if client.ready is None or how:  # a model that loads says nothing for as long as that takes
                continue
            worked_before_s, worked_s = worked_s, processor_s(running.pid)
            is_working = worked_s != worked_before_s
            if self._silence.is_too_long(HEARTBEAT_INTERVAL_S, is_working=is_working):
                how = f"was silent for {self._silence.patience_s:.1f} s and was killed"
                self._become(ReplicaState.UNHEALTHY)
                ask_for_stacks(running.pid)
                await asyncio.sleep(STACK_DUMP_S)
                running.kill()
        code = exited.result()
        how = how or (f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}")
        return how if client.failure is None else f"{how} ({client.failure.message})"

    async def _unless_over(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._watching is not None
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._watching), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait((task,), timeout=LAST_WORDS_S)
            if task.done():
                return task.result()
            raise EngineUnavailable(f"The engine process {self._watching.result()}.", retry_after_s=5.0)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, PenstockError):
                await task
