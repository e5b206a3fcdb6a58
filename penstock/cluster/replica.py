"""Replicas as data, and the protocols of launchers, running processes and connections.

Knows no process, socket or policy. `supervisor` keeps replicas alive, `fleet` sends them requests, and each launcher
is a module of its own. Callbacks of connections run on the caller's event loop and must not block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec

from penstock.core.engine_config import EngineConfig
from penstock.core.errors import PenstockError
from penstock.core.kv_transfer import KVSource
from penstock.core.messages import EngineReady, EngineStats, KVEvent
from penstock.core.plan import TokenEvent
from penstock.core.request import Request
from penstock.dispatch import Role
from penstock.router import Replica

OnEvent: TypeAlias = Callable[[TokenEvent], None]
OnError: TypeAlias = Callable[[PenstockError], None]


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The model and the settings of a replica. Two replicas with equal specs are interchangeable."""

    model: str  # the name that requests ask for
    engine: EngineConfig
    model_path: str
    revision: str = ""  # of weights, settings and code: replicas of one revision answer alike
    region: str = ""
    role: Role = "both"
    launcher: Literal["local", "ray"] = "local"


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One replica and its present state, as gateways know it."""

    replica: Replica
    spec: ReplicaSpec
    endpoint: str

    @property
    def id(self) -> str:
        return self.replica.id

    @property
    def role(self) -> Role:
        return self.spec.role


class RunningReplica(Protocol):
    """A worker process that was started, on this machine or another."""

    @property
    def endpoint(self) -> str:
        """Return the endpoint for gateways. The process may not listen there yet."""
        ...

    @property
    def pid(self) -> int | None:
        """Return the process id on this machine; None for a process elsewhere."""
        ...

    async def wait(self) -> int:
        """Wait until the process has ended. Returns its exit code, or the negative number of the signal that ended
        it."""
        ...

    async def stop(self) -> None:
        """Wait for an engine that was told to leave, kill it if it does not, and free its resources."""
        ...

    def kill(self) -> None:
        """End the process at once."""
        ...


class Launcher(Protocol):
    async def launch(self, spec: ReplicaSpec, replica_id: str) -> RunningReplica:
        """Start a process. Returns before its model is loaded."""
        ...


class ReplicaManager(Protocol):
    """Starts and stops the replicas of a fleet: `supervisor.Supervisor` on one machine, `hosts.Hosts` on many."""

    def members(self) -> tuple[Member, ...]:
        """Return all replicas that are not gone."""
        ...

    def stats(self, replica_id: str) -> EngineStats: ...

    def ready(self, replica_id: str) -> EngineReady | None: ...

    async def launch(self, spec: ReplicaSpec) -> str:
        """Start a replica and return its id when it is ready. Raises the error of a failed start."""
        ...

    async def drain(self, replica_id: str, timeout_s: float) -> bool:
        """Send the replica no new requests and wait until its requests are finished."""
        ...

    def resume(self, replica_id: str) -> bool:
        """Take a replica out of draining. Returns whether it serves again."""
        ...

    def convert(self, replica_id: str, role: Role) -> None:
        """Let a replica work in another role from now on. Its process and its running requests continue."""
        ...

    def why_role_stays(self, replica_id: str) -> str | None:
        """Return a sentence that says why a replica cannot change its role now; None: it can."""
        ...

    async def stop(self, replica_id: str) -> None: ...


class EngineClient(Protocol):
    @property
    def ready(self) -> EngineReady | None:
        """Return the engine's model; None while the engine starts and after it has gone."""
        ...

    @property
    def models(self) -> Mapping[str, EngineReady]:
        """Return every model that requests may ask for, by name."""
        ...

    @property
    def stats(self) -> EngineStats:
        """Return the sum of the latest reports of all engines, as the same object until a new report comes."""
        ...

    def stats_of(self, model: str) -> EngineStats:
        """Return the sum over the engines that serve one model."""
        ...

    def num_engines_of(self, model: str) -> int:
        """Return how many engines serve one model, those that start or are lost for a moment included."""
        ...

    def add(self, request: Request, *, timeout_s: float | None, on_event: OnEvent, on_error: OnError) -> None:
        """Send a request. `on_event` is called for every TokenEvent up to the one with a finish_reason; or
        `on_error` is called once, and nothing follows."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request: its callbacks are not called any more, and the engine frees its blocks within a step."""
        ...


class ReplicaClient(Protocol):
    """A connection to one replica: `transport.ZmqEngineClient`, or a fake."""

    @property
    def ready(self) -> EngineReady | None: ...

    @property
    def stats(self) -> EngineStats: ...

    def start(self) -> None: ...

    def add(
        self,
        request: Request,
        *,
        timeout_s: float | None,
        on_error: OnError,
        kv_source: KVSource | None = None,
    ) -> None:
        """Send a request. The connector's `on_events` gets the answer; or `on_error` is called once, and nothing
        follows. `kv_source`: another replica that has, or computes, the KV of the request's first tokens."""
        ...

    def abort(self, request_id: str) -> None: ...

    def close(self) -> None: ...

    def subscribe_kv_events(self) -> None: ...

    def restart_kv_events(self) -> None: ...


class Connector(Protocol):
    def __call__(
        self,
        member: Member,
        *,
        on_ready: Callable[[], None],
        on_stats: Callable[[EngineStats], None],
        on_events: Callable[[Sequence[TokenEvent]], None],
        on_kv_events: Callable[[tuple[KVEvent, ...]], None],
    ) -> ReplicaClient:
        """Return a client that is not started yet. `on_events` gets all events of a step at once."""
        ...
