"""One replica as one gateway sees it: the connection, the circuit breaker, and what was counted. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from penstock.cluster.client import EngineClient
from penstock.cluster.replica import Member
from penstock.control.breaker import BreakerState
from penstock.core.errors import PenstockError
from penstock.core.kv_events import KVEvent
from penstock.core.kv_transfer import KVSource
from penstock.core.messages import EngineStats
from penstock.core.plan import TokenEvent
from penstock.core.request import Request
from penstock.router import ReplicaState


class ReplicaClient(EngineClient, Protocol):
    """A connection to one replica: `transport.ZmqEngineClient`, or what stands in for it."""

    def start(self) -> None: ...

    def add(
        self,
        request: Request,
        *,
        timeout_s: float | None,
        on_event: Callable[[TokenEvent], None],
        on_error: Callable[[PenstockError], None],
        kv_source: KVSource | None = None,
    ) -> None:
        """`kv_source`: another replica that has, or computes, the KV of the request's first tokens."""
        ...

    def fail(self, error: PenstockError) -> None:
        """The replica is gone: every request that it had ends with `error`."""
        ...

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
        on_kv_events: Callable[[tuple[KVEvent, ...]], None],
    ) -> ReplicaClient:
        """A client that is not started yet."""
        ...


@dataclass(slots=True, eq=False)
class Link:
    member: Member
    client: ReplicaClient
    breaker: BreakerState = field(default_factory=BreakerState)
    is_ejected: bool = False  # slower than its peers
    num_sent: int = 0  # requests, retries included
    num_failed: int = 0
    num_resyncs: int = 0  # how often KV events were asked for afresh
    next_resync_s: float = 0.0  # when they may be asked for again
    reads_kv_events: bool = False

    @property
    def id(self) -> str:
        return self.member.id

    @property
    def state(self) -> ReplicaState:
        """A replica serves this gateway once both have met, and as long as it keeps up with its peers."""
        state = self.member.replica.state
        if state is ReplicaState.READY:
            if self.client.ready is None:
                return ReplicaState.WARMING
            if self.is_ejected:
                return ReplicaState.UNHEALTHY
        return state
