"""Replicas that are only written down: they become ready when the test says so, and do what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from penstock.cluster.replica import Member, ReplicaSpec
from penstock.core.errors import NotFound, PenstockError
from penstock.core.messages import EngineReady, EngineStats
from penstock.dispatch import Role
from penstock.router import Replica, ReplicaState


class FakeManager:
    """Has the methods of `supervisor.Supervisor` that pools and releases call."""

    def __init__(self, name: str = "replica", *, is_quick: bool = False) -> None:
        """`is_quick`: replicas become ready at once."""
        self.name = name
        self._is_quick = is_quick
        self._slots: dict[str, str] = {}
        self.on_change: list[Callable[[tuple[Member, ...]], None]] = []
        self._members: dict[str, Member] = {}
        self._stats: dict[str, EngineStats] = {}
        self._changed = asyncio.Event()
        self.failure: PenstockError | None = None  # of the next launches
        self.num_launched = 0
        self.roles_stay: str | None = None  # why no role can change

    def members(self) -> tuple[Member, ...]:
        return tuple(self._members.values())

    def states(self) -> list[str]:
        return [member.replica.state.value for member in self._members.values()]

    def stats(self, replica_id: str) -> EngineStats:
        return self._stats[replica_id]

    def ready(self, replica_id: str) -> EngineReady | None:
        return None

    def slots(self) -> dict[str, str]:
        return dict(self._slots)

    async def launch(self, spec: ReplicaSpec, slot_name: str = "") -> str:
        if self.failure is not None:
            raise self.failure
        self.num_launched += 1
        replica_id = f"{self.name}-{self.num_launched}"
        self._slots[replica_id] = slot_name
        replica = Replica(
            id=replica_id,
            models=frozenset((spec.model,)),
            revision=spec.revision,
            state=ReplicaState.STARTING,
        )
        self._members[replica_id] = Member(replica=replica, spec=spec, endpoint="")
        self._stats[replica_id] = EngineStats(num_kv_blocks=100)
        self._tell()
        if self._is_quick:
            self.finish_starting()
        try:
            await self._until(lambda: self._state(replica_id) is not ReplicaState.STARTING)
        except asyncio.CancelledError:
            await self.stop(replica_id)
            raise
        return replica_id

    async def drain(self, replica_id: str, timeout_s: float) -> bool:
        self._find(replica_id)
        if self._state(replica_id) is ReplicaState.READY:
            self._become(replica_id, ReplicaState.DRAINING)
        await self._until(
            lambda: (
                self._state(replica_id) is not ReplicaState.DRAINING
                or not self._stats[replica_id].num_running
            )
        )
        return self._state(replica_id) is ReplicaState.DRAINING

    def resume(self, replica_id: str) -> bool:
        self._become(replica_id, ReplicaState.READY)
        return True

    def convert(self, replica_id: str, role: Role) -> None:
        member = self._find(replica_id)
        self._members[replica_id] = replace(member, spec=replace(member.spec, role=role))
        self._tell()

    async def stop(self, replica_id: str) -> None:
        self._find(replica_id)
        del self._members[replica_id], self._slots[replica_id]
        self._tell()

    def finish_starting(self) -> None:
        for member in self.members():
            if member.replica.state is ReplicaState.STARTING:
                self._become(member.id, ReplicaState.READY)

    def why_role_stays(self, replica_id: str) -> str | None:
        return self.roles_stay

    def load(self, **stats: int) -> None:
        """What every replica reports from now on."""
        for replica_id in self._members:
            self._stats[replica_id] = EngineStats(num_kv_blocks=100, **stats)
        self._tell()

    def _find(self, replica_id: str) -> Member:
        if replica_id not in self._members:
            raise NotFound(f"There is no replica {replica_id!r}.")
        return self._members[replica_id]

    def _state(self, replica_id: str) -> ReplicaState | None:
        member = self._members.get(replica_id)
        return None if member is None else member.replica.state

    def _become(self, replica_id: str, state: ReplicaState) -> None:
        member = self._find(replica_id)
        self._members[replica_id] = replace(member, replica=replace(member.replica, state=state))
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for callback in tuple(self.on_change):
            callback(self.members())

    async def _until(self, condition) -> None:  # type: ignore[no-untyped-def]
        while not condition():
            await self._changed.wait()
