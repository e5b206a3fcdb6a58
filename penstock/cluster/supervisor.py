"""Keeps replicas alive: launches them, replaces those that die or freeze, drains and stops them. Lives in the process
that owns the replicas; gateways hear of them as `Member`s.

Every process gets an id of its own, so that no message for a dead process can reach its successor. How many replicas
there are is decided by the callers of `launch` and `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.cluster.replica import Launcher, Member, ReplicaSpec
from penstock.cluster.replica_process import ReplicaProcess
from penstock.cluster.transport import KeyPair
from penstock.core.errors import NotFound, PenstockError
from penstock.core.messages import HEARTBEAT_INTERVAL_S, EngineReady, EngineStats, LoadProgress
from penstock.dispatch import Role
from penstock.router import ReplicaState

logger = logging.getLogger(__name__)

FIRST_RESTART_DELAY_S = 0.5
LAST_RESTART_DELAY_S = 30.0
# A request that a gateway sent before it heard of the drain is seen by the heartbeat after the next.
IDLE_HEARTBEATS = 3


@dataclass(slots=True)
class _Slot:
    """A slot that one replica fills. When the replica dies, another one takes the slot."""

    process: ReplicaProcess
    name: str
    watcher: asyncio.Task[None] | None = None
    num_restarts: int = 0
    is_leaving: bool = field(default=False)  # no successor is started any more


class Supervisor:
    def __init__(
        self,
        launchers: Mapping[str, Launcher],
        *,
        heartbeat_timeout_s: float = 5.0,
        on_progress: Callable[[LoadProgress], None] | None = None,
        name: str = "replica",
        client_keys: KeyPair | None = None,
    ) -> None:
        """Replicas are called `name` and a number; in a shared fleet, names of hosts differ. `client_keys` are for
        engines that ask who connects."""
        self._name = name
        self._client_keys = client_keys
        self._launchers = launchers
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._on_progress = on_progress
        self._slots: list[_Slot] = []
        self._num_processes = 0
        self.on_change: list[Callable[[tuple[Member, ...]], None]] = []  # called with all members

    async def launch(self, spec: ReplicaSpec, slot_name: str = "") -> str:
        """Start a replica and return its id when it is ready. Raises the engine's own error when the engine cannot
        start. From then on, a replica that ends is replaced, whatever the reason. `slot_name` is the same for the
        replica and its successors."""
        # When several replicas load at once, the progress of the first is shown.
        on_progress = self._on_progress if not self._slots else None
        slot = _Slot(self._new_process(spec, on_progress), slot_name)
        self._slots.append(slot)
        self._tell()
        try:
            await slot.process.begin(self._launchers[spec.launcher])
        except BaseException:
            await self._remove(slot)
            raise
        slot.watcher = asyncio.create_task(self._watch(slot))
        return slot.process.id

    def members(self) -> tuple[Member, ...]:
        """Return all replicas that are not gone, in the order of their launch."""
        return tuple(
            slot.process.member() for slot in self._slots if slot.process.state is not ReplicaState.GONE
        )

    def slots(self) -> dict[str, str]:
        """Return the names of slots by the ids of the replicas in them."""
        return {slot.process.id: slot.name for slot in self._slots}

    def stats(self, replica_id: str) -> EngineStats:
        """Return the statistics of the replica's latest heartbeat."""
        return self._slot(replica_id).process.stats

    def ready(self, replica_id: str) -> EngineReady | None:
        """Return the replica's model; None while it loads."""
        return self._slot(replica_id).process.ready

    def pid(self, replica_id: str) -> int | None:
        """Return the process id of a replica on this machine; None elsewhere."""
        return self._slot(replica_id).process.pid

    @property
    def num_restarts(self) -> int:
        """Return how many dead replicas were replaced, in the slots that are still wanted."""
        return sum(slot.num_restarts for slot in self._slots)

    async def drain(self, replica_id: str, timeout_s: float) -> bool:
        """Send the replica no new requests and wait until its requests are finished. Returns False when that took too
        long or the replica was resumed. A replica that dies meanwhile is not replaced."""
        slot = self._slot(replica_id)
        process = slot.process
        slot.is_leaving = True
        process.drain()
        first_heartbeat = process.heartbeats
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while process.state is ReplicaState.DRAINING:
                    if process.stats.num_running or process.stats.num_waiting:
                        first_heartbeat = process.heartbeats
                    elif process.heartbeats >= first_heartbeat + IDLE_HEARTBEATS:
                        return True
                    await asyncio.sleep(HEARTBEAT_INTERVAL_S)
        return process.state is ReplicaState.GONE

    def resume(self, replica_id: str) -> bool:
        """Take a replica out of draining. Returns whether it serves again."""
        slot = self._slot(replica_id)
        slot.is_leaving = not slot.process.resume()
        return not slot.is_leaving

    def convert(self, replica_id: str, role: Role) -> None:
        """Let a replica work in another role from now on, and its successors too. Engines do not know their roles, so
        nothing is loaded and running requests continue."""
        self._slot(replica_id).process.convert(role)

    def why_role_stays(self, replica_id: str) -> str | None:
        return None

    async def stop(self, replica_id: str) -> None:
        """End a replica and its requests, and start no other in its slot."""
        await self._remove(self._slot(replica_id))

    async def close(self) -> None:
        await asyncio.gather(*map(self._remove, tuple(self._slots)))

    def _slot(self, replica_id: str) -> _Slot:
        for slot in self._slots:
            if slot.process.id == replica_id:
                return slot
        raise NotFound(f"There is no replica {replica_id!r}.")

    def _new_process(
        self, spec: ReplicaSpec, on_progress: Callable[[LoadProgress], None] | None = None
    ) -> ReplicaProcess:
        self._num_processes += 1
        return ReplicaProcess(
            f"{self._name}-{self._num_processes}",
            spec,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            on_change=self._tell,
            on_progress=on_progress,
            client_keys=self._client_keys,
        )

    def _tell(self) -> None:
        members = self.members()
        for callback in tuple(self.on_change):
            callback(members)

    async def _remove(self, slot: _Slot) -> None:
        slot.is_leaving = True
        if slot.watcher is not None:
            slot.watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await slot.watcher
        if slot in self._slots:
            self._slots.remove(slot)
            await slot.process.end()
            self._tell()

    async def _watch(self, slot: _Slot) -> None:
        """Fill a slot for as long as it is wanted, with growing pauses between one process and the next."""
        loop = asyncio.get_running_loop()
        delay_s = FIRST_RESTART_DELAY_S
        launcher = self._launchers[slot.process.spec.launcher]
        how = ""
        while True:
            if not how:
                ready_s = loop.time()
                how = await slot.process.over()
                if loop.time() - ready_s > LAST_RESTART_DELAY_S:
                    delay_s = FIRST_RESTART_DELAY_S
            if slot.is_leaving:
                logger.warning("replica %s %s while it drained", slot.process.id, how)
                self._slots.remove(slot)
                await slot.process.end(at_once=True)
                self._tell()
                return
            successor = self._new_process(slot.process.spec)
            logger.error("replica %s %s; %s starts in %.1f s", slot.process.id, how, successor.id, delay_s)
            predecessor, slot.process = slot.process, successor
            slot.num_restarts += 1
            await predecessor.end(at_once=True)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, LAST_RESTART_DELAY_S)
            how = ""
            try:
                await successor.begin(launcher)
            except PenstockError as error:
                how = f"did not start: {error.message}"
