"""Records of the dispatcher about replicas: state, circuit breaker, load and cache. Sends no request.

the registry says         the dispatcher treats the replica as
starting, warming         requests may wait for the replica
ready, not connected      warming
ready, much too slow      unhealthy: no new requests, the running ones continue
ready                     ready
draining                  no new requests, the running ones continue
unhealthy                 lost: its requests continue elsewhere, and requests may wait for its successor
gone                      lost
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from penstock.core.messages import EngineStats, KVEvent
from penstock.dispatch.health import BreakerState, Circuit, CircuitBreaker, OutlierConfig, SlowReplicas
from penstock.router import Replica, ReplicaState, Router

# The work of a replica: everything, or only prefill or decode, if these are disaggregated.
Role: TypeAlias = Literal["both", "prefill", "decode"]
RESYNC_INTERVAL_S = 1.0  # before KV events are asked for again: the last answer may have been lost too
_COMING = (ReplicaState.STARTING, ReplicaState.WARMING)
_LOST = (ReplicaState.UNHEALTHY, ReplicaState.GONE)


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, described by its driver."""

    replica: Replica  # with the state that the registry reports
    model: str  # the name that requests ask for
    role: Role = "both"
    is_connected: bool = True  # the driver can send requests to the replica
    kv_endpoint: str = ""  # where other replicas read KV from this one; empty where they cannot
    kv_bytes_per_token: int = 0
    kv_kind: str = ""  # replicas with the same kind can read each other's KV, also if their revisions differ


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All replicas, and the models that were ever served."""

    replicas: tuple[ReplicaStatus, ...] = ()
    models: dict[str, int] = {}  # name to KV block size; the first model serves requests that name none
    starts_on_demand: bool = False  # replicas are started when requests wait for them


@dataclass(slots=True, eq=False)
class ReplicaRecord:
    """The dispatcher's record of one replica."""

    status: ReplicaStatus
    breaker: BreakerState = field(default_factory=BreakerState)
    is_slow: bool = False
    num_sent: int = 0  # requests, retries included
    num_failed: int = 0
    heard_s: float = 0.0  # the last sign of life
    num_resyncs: int = 0  # how often KV events were asked for again
    next_resync_s: float = 0.0  # when they may be asked for again
    reads_kv_events: bool = False

    @property
    def id(self) -> str:
        return self.status.replica.id

    @property
    def revision(self) -> str:
        return self.status.replica.revision

    @property
    def state(self) -> ReplicaState:
        state = self.status.replica.state
        if state is ReplicaState.READY:
            if not self.status.is_connected:
                return ReplicaState.WARMING
            if self.is_slow:
                return ReplicaState.UNHEALTHY
        return state


class ReplicaTable:
    def __init__(self, router: Router, outliers: OutlierConfig) -> None:
        self.status = FleetStatus()
        self.records: dict[str, ReplicaRecord] = {}  # by replica id
        self.serving: tuple[Replica, ...] = ()  # a new tuple exactly when something has changed
        self.prefilling: tuple[
            Replica, ...
        ] = ()  # the same, of replicas that only compute prompts for others
        self.router = router
        self.prefill_router = Router()
        self.num_ejections = 0
        self._slow = SlowReplicas(outliers)
        self._shared_models: frozenset[str] = frozenset()
        self._failing: dict[str, ReplicaRecord] = {}  # replicas whose circuit may not be closed

    def offers_choice(self, model: str) -> bool:
        """Return whether several replicas serve a model, so that their caches matter."""
        return model in self._shared_models

    def expects(self, model: str) -> bool:
        """Return whether requests may wait for a replica of the model."""
        status = self.status
        if status.starts_on_demand and model in status.models:
            return True
        for replica in status.replicas:
            if replica.model == model and replica.role != "prefill":
                record = self.records.get(replica.replica.id)
                if replica.replica.state is ReplicaState.UNHEALTHY or (
                    record is not None and record.state in _COMING
                ):
                    return True
        return False

    def ready_for(self, model: str) -> list[str]:
        """Return the replicas that take requests for a model."""
        return [
            replica.id
            for replica in self.serving
            if model in replica.models and replica.state is ReplicaState.READY
        ]

    def serves(self, model: str, *, excluding: frozenset[str]) -> bool:
        """Return whether a replica of the model is ready that is not excluded."""
        return any(
            model in replica.models and replica.state is ReplicaState.READY and replica.id not in excluding
            for replica in (*self.serving, *self.prefilling)
        )

    def left_alone(self, breaker: CircuitBreaker, now: float) -> frozenset[str]:
        """Return the replicas that keep failing and must not be tried again yet."""
        failing = self._failing
        if not failing:
            return frozenset()
        for record in [each for each in failing.values() if each.breaker.circuit is Circuit.CLOSED]:
            del failing[record.id]
        return frozenset(
            [name for name, record in failing.items() if not breaker.allows(record.breaker, now)]
        )

    def note_life(self, replica_id: str, now: float) -> None:
        record = self.records.get(replica_id)
        if record is not None:
            record.heard_s = now

    def note_failure(self, record: ReplicaRecord) -> None:
        """Look at the circuit breaker of a replica before each request, until the circuit is closed."""
        self._failing[record.id] = record

    def update(self, status: FleetStatus) -> dict[str, ReplicaRecord]:
        """Take over a new status of the fleet. Returns the lost replicas, by id."""
        self.status = status
        present = {
            replica.replica.id: replica for replica in status.replicas if replica.replica.state not in _LOST
        }
        lost = {name: record for name, record in self.records.items() if name not in present}
        self.records = {
            replica_id: self._updated(replica_id, replica) for replica_id, replica in present.items()
        }
        self._failing = {name: record for name, record in self._failing.items() if name in self.records}
        self.refresh()
        return lost

    def _updated(self, replica_id: str, status: ReplicaStatus) -> ReplicaRecord:
        record = self.records.get(replica_id)
        if record is None:
            return ReplicaRecord(status)
        record.status = status
        return record

    def refresh(self) -> None:
        """Tell the routers about a change."""
        replicas = [
            (record.status.role, msgspec.structs.replace(record.status.replica, state=record.state))
            for record in self.records.values()
        ]
        self.serving = tuple(replica for role, replica in replicas if role != "prefill")
        self.prefilling = tuple(replica for role, replica in replicas if role == "prefill")
        self.router.update(self.serving)
        self.prefill_router.update(self.prefilling)
        if self.router.policy.reads_prefixes:
            counts = Counter(record.status.model for record in self.records.values())
            self._shared_models = frozenset(model for model, count in counts.items() if count > 1)

    def take_new_readers(self) -> list[str]:
        """Return the replicas whose KV events are wanted from now on: KV events matter once there is a choice."""
        new = [
            record
            for record in self.records.values()
            if not record.reads_kv_events
            and record.status.is_connected
            and self.offers_choice(record.status.model)
        ]
        for record in new:
            record.reads_kv_events = True
        return [record.id for record in new]

    def heartbeat(self, replica_id: str, stats: EngineStats, now: float) -> list[ReplicaRecord]:
        """Take over a heartbeat. Returns the replicas that are slow from now on, or no longer slow."""
        for router in (self.router, self.prefill_router):  # one of which knows the replica
            router.heartbeat(replica_id, stats)
        if len(self.records) <= 1:
            return []
        self._slow.heard(replica_id, stats, now)
        if not self._slow.is_due(now):
            return []
        groups: dict[str, list[str]] = {}
        for record in self.records.values():
            if record.status.replica.state is ReplicaState.READY and record.status.is_connected:
                groups.setdefault(f"{record.status.model}\0{record.status.role}", []).append(record.id)
        ejected = self._slow.look(groups, now)
        changed = [record for record in self.records.values() if record.is_slow != (record.id in ejected)]
        for record in changed:
            record.is_slow = not record.is_slow
            self.num_ejections += record.is_slow
        if changed:
            self.refresh()
        return changed

    def kv_events(self, replica_id: str, events: tuple[KVEvent, ...], now: float) -> bool:
        """Take over KV events. Returns whether the replica must send its KV events from the start."""
        if self.router.receive(replica_id, events) and self.prefill_router.receive(replica_id, events):
            return False
        record = self.records.get(replica_id)
        if record is None or now < record.next_resync_s:
            return False
        record.next_resync_s = now + RESYNC_INTERVAL_S
        record.num_resyncs += 1
        return True
