"""Replicas as the router knows them. Knows no process, socket or load."""

from __future__ import annotations

import enum

import msgspec


class ReplicaState(enum.StrEnum):
    """The state of a replica. Only a ready replica gets new requests; a draining replica finishes its requests."""

    STARTING = "starting"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"
    GONE = "gone"


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as the registry describes it. `id` names one process: it changes with a restart."""

    id: str
    models: frozenset[str]  # every name that it answers to: aliases and adapters too
    state: ReplicaState = ReplicaState.READY
    revision: str = ""
    region: str = ""
    block_size: int = 16
    num_kv_blocks: int | None = None  # None: unknown, as for external engines
    max_step_tokens: int = 2048  # what one step computes at most
    sends_kv_events: bool = True  # if not, the router assumes that a replica keeps what was sent to it
