"""The replicas of a simulation and the state of each, as a supervisor would report them. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.core.messages import EngineStats
from penstock.dispatch import FleetStatus, ReplicaStatus
from penstock.router import Replica, ReplicaState
from penstock.simulator.replica import SimulatedReplica

MODEL = "model"


@dataclass(slots=True, eq=False)
class Member:
    """A replica, its state, and what only the driver knows about it."""

    id: str
    replica: SimulatedReplica
    state: ReplicaState
    is_alive: bool = True
    is_planning: bool = False  # a plan is already due at this instant
    num_taken: int = 0  # requests, ever

    def stats(self) -> EngineStats:
        step_tokens, step_s = self.replica.last_step
        return replace(
            self.replica.scheduler.stats(),
            num_steps=self.replica.num_steps,
            tokens_computed=self.replica.num_tokens_computed,
            step_tokens=step_tokens,
            step_s=step_s,
        )


class SimulatedFleet:
    def __init__(
        self, build: Callable[[], SimulatedReplica], *, block_size: int, max_step_tokens: int
    ) -> None:
        self._build = build
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self.members: dict[str, Member] = {}
        self.all_members: list[Member] = []  # also those that are gone, in order of starting

    def start(self, state: ReplicaState) -> Member:
        member = Member(f"replica-{len(self.all_members)}", self._build(), state)
        self.members[member.id] = member
        self.all_members.append(member)
        return member

    def status(self, *, starts_on_demand: bool) -> FleetStatus:
        return FleetStatus(
            replicas=tuple(self._status_of(member) for member in self.members.values()),
            models={MODEL: self._block_size},
            starts_on_demand=starts_on_demand,
        )

    def _status_of(self, member: Member) -> ReplicaStatus:
        return ReplicaStatus(
            replica=Replica(
                id=member.id,
                models=frozenset({MODEL}),
                state=member.state,
                block_size=self._block_size,
                num_kv_blocks=member.replica.cache.num_blocks,
                max_step_tokens=self._max_step_tokens,
            ),
            model=MODEL,
        )
