"""The replicas of a simulation: who there is, in which state, and what each of them is doing. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.core.messages import EngineStats
from penstock.router import Replica, ReplicaState
from penstock.simulator.replica import SimulatedReplica
from penstock.simulator.workload import Arrival

MODEL = "model"


@dataclass(slots=True, eq=False)
class Journey:
    """One request from arrival to end, over as many attempts as it takes."""

    arrival: Arrival  # as the client sent it
    gateway: int
    attempts: int = 0
    num_emitted: int = 0
    first_token_s: float | None = None
    failed_on: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)
class Member:
    """A replica, and what only the driver knows about it."""

    id: str
    replica: SimulatedReplica
    is_alive: bool = True
    is_planning: bool = False  # a plan is already due at this instant
    journeys: dict[str, Journey] = field(default_factory=dict)  # by request id
    num_taken: int = 0  # requests, ever
    observed: tuple[int, float] = (0, 0.0)  # steps and busy seconds, when someone last looked

    def stats(self) -> EngineStats:
        step_tokens, step_s = self.replica.last_step
        return replace(
            self.replica.scheduler.stats(),
            num_steps=self.replica.num_steps,
            step_tokens=step_tokens,
            step_s=step_s,
        )

    def recent_step_s(self, min_steps: int) -> float | None:
        """The mean length of a step since this was last asked; None if there were too few to say."""
        steps, busy_s = self.replica.num_steps, self.replica.busy_s
        steps_before, busy_before_s = self.observed
        if steps - steps_before < min_steps:
            return None
        self.observed = steps, busy_s
        return (busy_s - busy_before_s) / (steps - steps_before)


class Fleet:
    def __init__(self, build: Callable[[], SimulatedReplica], max_step_tokens: int) -> None:
        self._build = build
        self._max_step_tokens = max_step_tokens
        self.members: dict[str, Member] = {}
        self.all_members: list[Member] = []  # also those that are gone, in order of starting
        self.replicas: tuple[Replica, ...] = ()  # as the router sees them; another tuple after every change

    def start(self, state: ReplicaState) -> Member:
        member = Member(f"replica-{len(self.all_members)}", self._build())
        self.members[member.id] = member
        self.all_members.append(member)
        cache = member.replica.cache
        self.replicas += (
            Replica(
                id=member.id,
                models=frozenset({MODEL}),
                state=state,
                block_size=cache.block_size,
                num_kv_blocks=cache.num_blocks,
                max_step_tokens=self._max_step_tokens,
            ),
        )
        return member

    def set_state(self, replica_id: str, state: ReplicaState) -> None:
        self.replicas = tuple(
            replace(replica, state=state) if replica.id == replica_id else replica
            for replica in self.replicas
        )

    def states(self) -> dict[str, ReplicaState]:
        return {replica.id: replica.state for replica in self.replicas}

    def remove(self, replica_id: str) -> Member:
        self.replicas = tuple(replica for replica in self.replicas if replica.id != replica_id)
        return self.members.pop(replica_id)
