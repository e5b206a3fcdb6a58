"""Faults of a simulation: what goes wrong, when, and where. Replicas are numbered by the order of starting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Kill:
    """A replica's process dies. The supervisor notices after a while, and starts another one."""

    at_s: float
    replica: int
    noticed_after_s: float = 0.5
    restarts_after_s: float | None = 10.0  # None: never


@dataclass(frozen=True, slots=True)
class SlowDown:
    """A replica takes longer for everything: a hot accelerator, a noisy neighbour."""

    at_s: float
    replica: int
    factor: float
    until_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoseKVEvents:
    """Batches of KV events are lost, each with this chance, for a while."""

    at_s: float
    until_s: float
    share: float


Fault: TypeAlias = Kill | SlowDown | LoseKVEvents
