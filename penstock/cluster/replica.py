"""What a replica is made of, what a gateway must know to use one, and what starting one means.

Data and protocols only: knows no process, socket or policy. `supervisor` keeps replicas alive, `fleet` sends them
requests, and a launcher is a module of its own.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from penstock.core.engine_config import EngineConfig
from penstock.dispatch import Role
from penstock.router import Replica


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. Two replicas with equal specs are interchangeable."""

    model: str  # the name that requests ask for
    engine: EngineConfig
    model_path: str
    revision: str = ""  # which weights, settings and code: replicas of one revision answer alike
    region: str = ""
    role: Role = "both"
    launcher: Literal["local", "ray"] = "local"


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One replica in one moment of its life, as gateways hear of it."""

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
    """A worker process that was started, wherever it runs."""

    @property
    def endpoint(self) -> str:
        """Where gateways reach it. Nothing may listen there yet."""
        ...

    @property
    def pid(self) -> int | None:
        """On this machine; None elsewhere."""
        ...

    async def wait(self) -> int:
        """Returns when the process has ended: its exit code, or the negative number of the signal that ended it."""
        ...

    async def stop(self) -> None:
        """The engine was told to leave: returns when it has, kills it when it does not, and frees what is left."""
        ...

    def kill(self) -> None:
        """End it now, whatever it does."""
        ...


class Launcher(Protocol):
    async def launch(self, spec: ReplicaSpec, replica_id: str) -> RunningReplica:
        """Returns as soon as a process exists; loading the model takes its time."""
        ...
