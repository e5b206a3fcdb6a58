"""The stored record of a release, which survives a restart of the server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec
from msgspec.structs import replace

from penstock.cluster.replica import ReplicaSpec
from penstock.control.release import ReleaseConfig, ReleaseState, Stage


class ReleaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Times in `state` are Unix seconds."""

    id: str
    model: str
    base_revision: (
        str  # the revision of the server's own settings: when they change, this release no longer counts
    )
    stable: tuple[ReplicaSpec, ...]  # one for each pool of the model
    candidate: tuple[ReplicaSpec, ...]  # in the same order
    num_replicas: tuple[int, ...]  # of the stable revision in each pool, when it began
    state: ReleaseState
    config: ReleaseConfig
    created_at: float

    def at(self, state: ReleaseState) -> ReleaseRecord:
        return replace(self, state=state)


class ReleaseStore(Protocol):
    async def load(self) -> tuple[ReleaseRecord, ...]:
        """All records, oldest first."""
        ...

    async def save(self, record: ReleaseRecord) -> None:
        """Add a record, or replace the record with the same id."""
        ...


class MemoryReleases:
    """Records in memory, for a server without a database and for tests."""

    def __init__(self) -> None:
        self._records: dict[str, ReleaseRecord] = {}

    async def load(self) -> tuple[ReleaseRecord, ...]:
        return tuple(self._records.values())

    async def save(self, record: ReleaseRecord) -> None:
        self._records[record.id] = record


def serving_spec(spec: ReplicaSpec, records: Iterable[ReleaseRecord]) -> ReplicaSpec:
    """What to start for `spec`, which comes from the server's settings: the candidate of the last release that was
    promoted, or was about to be, since those settings hold."""
    serving = spec
    for record in records:
        has_won = record.state.stage in (Stage.PROMOTED, Stage.LAME_DUCK)
        if has_won and record.model == spec.model and record.base_revision == spec.revision:
            for candidate in record.candidate:
                if candidate.role == spec.role:
                    serving = replace(candidate, region=spec.region, launcher=spec.launcher)
    return serving
