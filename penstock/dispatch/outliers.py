"""Which replicas are much slower than their peers, and for how long to leave them out. Pure: knows figures only.

A replica is slow when its figure is over `slow_factor` times the median of all, several times in a row: its peers are
the measure, since what is slow depends on the model, the hardware and the traffic. One that fails outright is the
circuit breaker's business. Only so many are left out at a time: when most are slow, being slow is normal.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import msgspec
from msgspec.structs import replace


class OutlierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    slow_factor: float = 2.0
    min_replicas: int = 3  # fewer cannot say what is usual
    times_in_a_row: int = 3
    max_ejected_share: float = 0.3
    first_ejection_s: float = 30.0
    max_ejection_s: float = 600.0


class ReplicaRecord(msgspec.Struct, frozen=True, kw_only=True):
    times_slow: int = 0  # in a row
    ejections: int = 0  # since it was last at full speed for as long as it had been out
    ejected_until_s: float | None = None
    returned_s: float | None = None


class OutlierState(msgspec.Struct, frozen=True):
    replicas: dict[str, ReplicaRecord] = {}

    def ejected(self) -> frozenset[str]:
        return frozenset(name for name, record in self.replicas.items() if record.ejected_until_s is not None)


class OutlierDetector:
    def __init__(self, config: OutlierConfig) -> None:
        self.config = config

    def observe(self, figures: Mapping[str, float | None], state: OutlierState, now: float) -> OutlierState:
        """`figures`: of each replica that there is, a time such as the median between tokens; None when there are too
        few samples to say. A slow replica has fewer samples than others: that must not make it look well."""
        config = self.config
        records = {name: self._returned(state.replicas.get(name, ReplicaRecord()), now) for name in figures}
        judged = {
            name: value
            for name, value in figures.items()
            if value is not None and records[name].ejected_until_s is None
        }
        if len(judged) < config.min_replicas:
            return OutlierState(records)
        limit = config.slow_factor * median(judged.values())
        num_ejected = sum(record.ejected_until_s is not None for record in records.values())
        room = int(config.max_ejected_share * len(records)) - num_ejected
        for name in sorted(judged, key=lambda name: -judged[name]):  # the slowest first
            record = records[name]
            if judged[name] <= limit:
                records[name] = self._recovered(record, now)
                continue
            record = replace(record, times_slow=min(config.times_in_a_row, record.times_slow + 1))
            if record.times_slow >= config.times_in_a_row and room > 0:
                record = self._ejected(record, now)
                room -= 1
            records[name] = record
        return OutlierState(records)

    def _duration_s(self, ejections: int) -> float:
        return min(self.config.max_ejection_s, self.config.first_ejection_s * 2.0 ** min(ejections, 32))

    def _ejected(self, record: ReplicaRecord, now: float) -> ReplicaRecord:
        until_s = now + self._duration_s(record.ejections)
        return ReplicaRecord(ejections=record.ejections + 1, ejected_until_s=until_s)

    def _returned(self, record: ReplicaRecord, now: float) -> ReplicaRecord:
        if record.ejected_until_s is None or now < record.ejected_until_s:
            return record
        return ReplicaRecord(ejections=record.ejections, returned_s=now)

    def _recovered(self, record: ReplicaRecord, now: float) -> ReplicaRecord:
        if record.returned_s is not None and now - record.returned_s >= self._duration_s(
            record.ejections - 1
        ):
            return ReplicaRecord()
        return replace(record, times_slow=0) if record.times_slow else record
