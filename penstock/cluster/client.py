"""The protocols of a connection: to an engine, as gateways use it, and to one replica, as the fleet uses it.

Callbacks run on the caller's event loop and must not block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from penstock.cluster.replica import Member
from penstock.core.errors import PenstockError
from penstock.core.kv_transfer import KVSource
from penstock.core.messages import EngineReady, EngineStats, KVEvent
from penstock.core.plan import TokenEvent
from penstock.core.request import Request


class EngineClient(Protocol):
    @property
    def ready(self) -> EngineReady | None:
        """What the engine serves; None while the engine starts and after it has gone."""
        ...

    @property
    def models(self) -> Mapping[str, EngineReady]:
        """Every model that could be asked for, by name."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The sum of the latest reports of all engines. The same object until a new report comes."""
        ...

    def stats_of(self, model: str) -> EngineStats:
        """The sum over the engines that serve one model."""
        ...

    def add(
        self,
        request: Request,
        *,
        timeout_s: float | None,
        on_event: Callable[[TokenEvent], None],
        on_error: Callable[[PenstockError], None],
    ) -> None:
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
        on_error: Callable[[PenstockError], None],
        kv_source: KVSource | None = None,
    ) -> None:
        """The connector's `on_events` hears of the answer, or `on_error` is called once, and nothing follows.
        `kv_source`: another replica that has, or computes, the KV of the request's first tokens."""
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
        """Returns a client that is not started yet. `on_events` hears all events of a step at once."""
        ...
