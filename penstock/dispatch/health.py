"""Decides which replicas get no requests for a while: replicas that keep failing (circuit breaker), and replicas much
slower than their peers (outliers). Pure: knows figures and times only.

The circuit breaker of a replica:

    state      on                                        becomes
    closed     `max_failures` in a row                   open
    open       the pause is over, and a request is sent  half open
    half open  a probe fails                             open, with twice the pause
    half open  `probes` succeed                          closed, with the first pause again

While half open, at most `probes` requests are let through at a time.

`SlowReplicas` measures how long each replica takes for a step while it has work, by the times of its heartbeats.
Steps grow with the tokens that they compute, so replicas are compared by the time of a step of the usual size.

`OutlierDetector` calls a replica slow when its figure is over `slow_factor` times the median of all, several times in
a row. The median is the measure, because the usual figure depends on the model, the hardware and the traffic. A
replica that fails outright is left to the circuit breaker. At most a fraction of the replicas is excluded at a time:
when most are slow, being slow is normal.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from penstock.core.figures import Count, NotNegative, ShareOrZero
from penstock.core.messages import EngineStats
from penstock.router.load import LinearFit


class BreakerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_failures: Count = 5
    probes: Count = 2
    first_pause_s: NotNegative = 1.0
    max_pause_s: NotNegative = 60.0


class Circuit(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerState(msgspec.Struct, frozen=True, kw_only=True):
    circuit: Circuit = Circuit.CLOSED
    failures: int = 0  # in a row
    opens: int = 0  # in a row, without having closed in between
    retry_at_s: float = 0.0  # when open
    probing: int = 0  # let through while half open, outcome unknown
    succeeded: int = 0  # probes


class CircuitBreaker:
    def __init__(self, config: BreakerConfig) -> None:
        self.config = config

    def allows(self, state: BreakerState, now: float) -> bool:
        """Return whether a request may be sent. A caller that sends one must call `sent`."""
        if state.circuit is Circuit.CLOSED:
            return True
        if state.circuit is Circuit.OPEN:
            return now >= state.retry_at_s
        return state.probing + state.succeeded < self.config.probes

    def sent(self, state: BreakerState, now: float) -> BreakerState:
        if state.circuit is Circuit.OPEN and now >= state.retry_at_s:
            state = replace(state, circuit=Circuit.HALF_OPEN, probing=0, succeeded=0)
        if state.circuit is Circuit.HALF_OPEN:
            return replace(state, probing=state.probing + 1)
        return state

    def succeeded(self, state: BreakerState) -> BreakerState:
        if state.circuit is Circuit.CLOSED:
            return replace(state, failures=0) if state.failures else state
        if state.circuit is Circuit.OPEN:  # the request was sent before the circuit opened
            return state
        if state.succeeded + 1 >= self.config.probes:
            return BreakerState()
        return replace(state, succeeded=state.succeeded + 1, probing=max(0, state.probing - 1))

    def failed(self, state: BreakerState, now: float) -> BreakerState:
        if state.circuit is Circuit.OPEN:
            return state
        failures = state.failures + 1
        if state.circuit is Circuit.CLOSED and failures < self.config.max_failures:
            return replace(state, failures=failures)
        pause_s = min(self.config.max_pause_s, self.config.first_pause_s * 2.0 ** min(state.opens, 32))
        return BreakerState(
            circuit=Circuit.OPEN, failures=failures, opens=state.opens + 1, retry_at_s=now + pause_s
        )

    def abandoned(self, state: BreakerState) -> BreakerState:
        """Record a request whose end says nothing about the replica, for example because its client disconnected."""
        return replace(state, probing=max(0, state.probing - 1)) if state.probing else state


LOOK_INTERVAL_S = 2.0
_GUESSED_STEP_TOKENS = 64
_FADING = 0.9
_MIN_OBSERVED = 5  # busy intervals between heartbeats before a speed is used


class OutlierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    slow_factor: Annotated[float, Meta(ge=1)] = 2.0
    min_replicas: Count = 3  # fewer replicas have no usual speed
    times_in_a_row: Count = 3
    max_ejected_share: ShareOrZero = 0.3
    first_ejection_s: NotNegative = 30.0
    max_ejection_s: NotNegative = 600.0


class OutlierRecord(msgspec.Struct, frozen=True, kw_only=True):
    times_slow: int = 0  # in a row
    ejections: int = 0  # since the replica last ran at full speed for as long as it was ejected
    ejected_until_s: float | None = None
    returned_s: float | None = None


class OutlierState(msgspec.Struct, frozen=True):
    replicas: dict[str, OutlierRecord] = {}

    def ejected(self) -> frozenset[str]:
        return frozenset(name for name, record in self.replicas.items() if record.ejected_until_s is not None)


class OutlierDetector:
    def __init__(self, config: OutlierConfig) -> None:
        self.config = config

    def observe(self, figures: Mapping[str, float | None], state: OutlierState, now: float) -> OutlierState:
        """`figures`: a time for each replica, such as the median time between tokens; None when there are too
        few samples. A slow replica has fewer samples than others, which must not make it look fast."""
        config = self.config
        records = {name: self._returned(state.replicas.get(name, OutlierRecord()), now) for name in figures}
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

    def _ejected(self, record: OutlierRecord, now: float) -> OutlierRecord:
        until_s = now + self._duration_s(record.ejections)
        return OutlierRecord(ejections=record.ejections + 1, ejected_until_s=until_s)

    def _returned(self, record: OutlierRecord, now: float) -> OutlierRecord:
        if record.ejected_until_s is None or now < record.ejected_until_s:
            return record
        return OutlierRecord(ejections=record.ejections, returned_s=now)

    def _recovered(self, record: OutlierRecord, now: float) -> OutlierRecord:
        if record.returned_s is not None and now - record.returned_s >= self._duration_s(
            record.ejections - 1
        ):
            return OutlierRecord()
        return replace(record, times_slow=0) if record.times_slow else record


@dataclass(slots=True)
class _Pace:
    """Measures how fast one replica works."""

    heard_s: float = 0.0
    stats: EngineStats = field(default_factory=EngineStats)
    fit: LinearFit = field(default_factory=lambda: LinearFit(0.010, 50e-6, _GUESSED_STEP_TOKENS))
    usual_tokens: float = 0.0  # in a step

    @property
    def is_known(self) -> bool:
        return self.fit.num_observed >= _MIN_OBSERVED

    def heard(self, stats: EngineStats, now: float) -> None:
        before, self.stats = self.stats, stats
        elapsed_s, self.heard_s = now - self.heard_s, now
        num_steps = stats.num_steps - before.num_steps
        if before.num_running and stats.num_running and num_steps > 0:
            num_tokens = (stats.tokens_computed - before.tokens_computed) / num_steps
            self.usual_tokens += (1.0 - _FADING) * (num_tokens - self.usual_tokens)
            self.fit.observe(num_tokens, elapsed_s / num_steps)

    def step_s(self, num_tokens: float) -> float:
        return self.fit.base_s + num_tokens * self.fit.token_s


class SlowReplicas:
    def __init__(self, config: OutlierConfig | None = None) -> None:
        self._detector = OutlierDetector(config or OutlierConfig())
        self._paces: dict[str, _Pace] = {}  # by replica
        self._states: dict[str, OutlierState] = {}  # by group
        self._next_look_s = 0.0

    def heard(self, replica_id: str, stats: EngineStats, now: float) -> None:
        self._paces.setdefault(replica_id, _Pace()).heard(stats, now)

    def is_due(self, now: float) -> bool:
        return now >= self._next_look_s

    def look(self, groups: Mapping[str, Iterable[str]], now: float) -> frozenset[str]:
        """`groups`: ids of replicas that do the same work. Returns the replicas to be left out now."""
        self._next_look_s = now + LOOK_INTERVAL_S
        present = {replica_id for replica_ids in groups.values() for replica_id in replica_ids}
        self._paces = {name: pace for name, pace in self._paces.items() if name in present}
        ejected: set[str] = set()
        for group, replica_ids in groups.items():
            figures = self._figures(list(replica_ids))
            state = self._detector.observe(figures, self._states.get(group, OutlierState()), now)
            self._states[group] = state
            ejected |= state.ejected()
        return frozenset(ejected)

    def _figures(self, replica_ids: Sequence[str]) -> dict[str, float | None]:
        known = {
            replica_id: pace
            for replica_id in replica_ids
            if (pace := self._paces.get(replica_id)) is not None and pace.is_known
        }
        usual_tokens = median(pace.usual_tokens for pace in known.values()) if known else 0.0
        return {
            replica_id: known[replica_id].step_s(usual_tokens) if replica_id in known else None
            for replica_id in replica_ids
        }
