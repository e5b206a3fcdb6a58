"""Tells which replicas of a shared fleet one gateway cannot reach, though their hosts report them as ready.

A supervisor watches the processes of its own machine. The network between a gateway and that machine, and the machine
itself, are watched here: a replica whose connection was cut, or that sends no heartbeat for too long, counts as
unhealthy for a moment. Its requests continue elsewhere, and then the gateway connects to the replica again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from penstock.cluster.replica import Member
from penstock.cluster.replica_process import Silence
from penstock.core.messages import HEARTBEAT_INTERVAL_S, EngineStats
from penstock.router import ReplicaState

logger = logging.getLogger(__name__)

RECONNECT_S = 1.0


class Reachability:
    """`on_change` is called when `seen_from_here` would give another result."""

    def __init__(self, timeout_s: float, on_change: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._silences: dict[str, Silence] = {}  # of connected replicas
        self._unreachable: dict[str, asyncio.TimerHandle] = {}
        self._checking: asyncio.TimerHandle | None = None

    def seen_from_here(self, members: Sequence[Member]) -> tuple[Member, ...]:
        """Return the members, and those that cannot be reached now as unhealthy."""
        if not self._unreachable:
            return tuple(members)
        return tuple(
            replace(member, replica=replace(member.replica, state=ReplicaState.UNHEALTHY))
            if member.id in self._unreachable
            else member
            for member in members
        )

    def connected(self, member: Member) -> None:
        """Expect heartbeats of a replica from now on."""
        if member.id not in self._silences:
            max_step_tokens = member.spec.engine.scheduler.max_num_batched_tokens
            self._silences[member.id] = Silence(self._timeout_s, max_step_tokens)
            self._check_later()

    def heard(self, replica_id: str, stats: EngineStats) -> None:
        if (silence := self._silences.get(replica_id)) is not None:
            silence.heard(stats)

    def lost(self, replica_id: str, how: str) -> None:
        """Leave a replica alone for a moment."""
        self._silences.pop(replica_id, None)
        if replica_id in self._unreachable:
            return
        logger.warning("replica %s %s; its requests go on elsewhere", replica_id, how)
        loop = asyncio.get_running_loop()
        self._unreachable[replica_id] = loop.call_later(RECONNECT_S, self._try_again, replica_id)
        self._on_change()

    def close(self) -> None:
        for timer in self._unreachable.values():
            timer.cancel()
        if self._checking is not None:
            self._checking.cancel()

    def forget_all_but(self, present: Sequence[Member]) -> None:
        """Forget replicas that have gone."""
        ids = {member.id for member in present}
        self._silences = {name: silence for name, silence in self._silences.items() if name in ids}

    def _try_again(self, replica_id: str) -> None:
        del self._unreachable[replica_id]
        self._on_change()

    def _check_later(self) -> None:
        if self._checking is None:
            self._checking = asyncio.get_running_loop().call_later(HEARTBEAT_INTERVAL_S, self._check)

    def _check(self) -> None:
        self._checking = None
        for replica_id, silence in tuple(self._silences.items()):
            if silence.is_too_long(HEARTBEAT_INTERVAL_S, is_working=False):
                self.lost(replica_id, f"was silent for {silence.patience_s:.1f} s")
        if self._silences:
            self._check_later()
