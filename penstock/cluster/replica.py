"""Replicas as data, and the protocols of launchers and running processes.

Knows no process, socket or policy. `supervisor` keeps replicas alive, `fleet` sends them requests, and each launcher
is a module of its own.
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
        """The endpoint for gateways. The process may not listen there yet."""
        ...

    @property
    def pid(self) -> int | None:
        """The process id on this machine; None elsewhere."""
        ...

    async def wait(self) -> int:
        """Returns when the process has ended: its exit code, or the negative number of the signal that ended it."""
        ...

    async def stop(self) -> None:
        """Wait for an engine that was told to leave, kill it if it does not, and free its resources."""
        ...

    def kill(self) -> None:
        """End the process at once."""
        ...


class Launcher(Protocol):
    async def launch(self, spec: ReplicaSpec, replica_id: str) -> RunningReplica:
        """Returns as soon as a process exists, before its model is loaded."""
        ...
