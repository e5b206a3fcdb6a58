"""The external servers of a pool, and the requests that run at each of them. Chooses nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.cluster.external.circuits import ServerCircuits
from penstock.cluster.external.relay import Relay
from penstock.cluster.external.server import ExternalServer, ServerLoad
from penstock.cluster.external.wire import ExternalCall
from penstock.dispatch.health import Circuit
from penstock.router import ReplicaState

MAX_SILENT = 50  # requests at a silent server that continue elsewhere at a time: retries are bounded


class Run(msgspec.Struct, eq=False):
    """A request at a server. `task` sends it, and reads the answer."""

    call: ExternalCall
    relay: Relay
    task: asyncio.Task[Any] | None
    num_chunks_before: int = -1  # when the server missed the first of its last probes
    _is_given_up: bool = False

    @property
    def is_silent(self) -> bool:
        """Return whether nothing has come since the server missed the first of its last probes, and another server
        could answer or continue."""
        if self._is_given_up or self.num_chunks_before != self.relay.num_chunks:
            return False
        return not self.relay.has_begun or self.relay.can_continue

    def give_up(self) -> None:
        """Cancel the request at this server only. Its task asks `was_given_up`."""
        if self.task is not None:
            self._is_given_up = True
            self.task.cancel()

    def was_given_up(self) -> bool:
        """Return whether `give_up` alone cancelled the task, which goes on then."""
        return self._is_given_up and self.task is not None and not self.task.uncancel()


@dataclass(slots=True)
class Member:
    server: ExternalServer
    circuits: ServerCircuits
    state: ReplicaState = ReplicaState.STARTING
    missed_probes: int = 0
    runs: set[Run] = field(default_factory=set)  # sent from this gateway
    outcomes: Counter[str] = field(default_factory=Counter)
    has_left: bool = False  # no longer one of the servers; its running requests continue

    @property
    def num_running(self) -> int:
        return len(self.runs)

    def silent_runs(self, max_missed: int) -> list[Run]:
        """Return requests at a server that has answered neither them nor so many probes: its process stands still,
        and the kernel keeps the connections. To be called for every probe that gets no answer."""
        if self.missed_probes == 1:
            for run in self.runs:
                run.num_chunks_before = run.relay.num_chunks
        if self.missed_probes < max_missed:
            return []
        return [run for run in self.runs if run.is_silent][:MAX_SILENT]

    def view(self) -> ServerView:
        return ServerView(
            self.server.name,
            self.state,
            self.circuits.circuit,
            tuple(self.server.models),
            self.server.region,
            self.num_running,
            self.server.load,
            dict(self.outcomes),
        )


@dataclass(frozen=True, slots=True)
class ServerView:
    """The view of a server for operators."""

    name: str
    state: ReplicaState
    circuit: Circuit
    models: tuple[str, ...]
    region: str
    num_running: int  # sent from this gateway
    load: ServerLoad | None  # of all clients, by the server's report
    outcomes: Mapping[str, int]  # attempts, by how they ended
