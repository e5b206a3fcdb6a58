"""The router's data: replicas and requests go in, decisions come out. Knows hashes of prompts, never tokens or
text."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

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
    models: frozenset[str]  # every name that requests may use: aliases and adapters too
    state: ReplicaState = ReplicaState.READY
    revision: str = ""
    region: str = ""
    block_size: int = 16
    num_kv_blocks: int | None = None  # None: unknown, as for external engines
    max_step_tokens: int = 2048  # the most tokens of one step
    sends_kv_events: bool = True  # if not, the router assumes that a replica keeps what was sent to it


class RandomSource(Protocol):
    """The source of randomness, passed in so that a seed repeats every decision."""

    def random(self) -> float:
        """Return a number from 0 up to, not including, 1."""
        ...


class RoutingRequest(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    num_prompt_tokens: int
    block_hashes: Sequence[bytes] = ()  # leading full blocks in chain order; `prompt` makes them
    expected_output_tokens: int = 128
    revision: str | None = None  # None: any
    region: str | None = None  # preferred; others serve when it is overloaded
    # The wait at which it leaves the region; infinite: never; None: by config.
    spill_over_s: float | None = None
    affinity_key: str | None = None  # a session id or prompt_cache_key: requests that likely share a prefix
    excluded: frozenset[str] = frozenset()  # replicas that already failed this request


class Reason(enum.StrEnum):
    """The reason why a replica was picked."""

    ONLY = "only"  # no other replica could serve the request
    TURN = "turn"  # it was this replica's turn
    LOAD = "load"  # no cached prefix matters: the replica with the shortest predicted wait
    PREFIX = "prefix"  # the replica holds the longest known prefix
    COPY = "copy"  # another replica holds more of the prefix, but waiting there would take longer
    AFFINITY = "affinity"  # the session, or prompt_cache_key, leads here


class Decision(msgspec.Struct, frozen=True):
    replica_id: str
    reason: Reason
    matched_tokens: int  # of the prompt, that this replica is thought to hold
    best_matched_tokens: int  # the most that any candidate is thought to hold
    predicted_ttft_s: float
    is_spilled_over: bool  # served outside of the preferred region
