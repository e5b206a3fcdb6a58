"""Which replicas are left out for being slow, looked at every few seconds. `control.outliers` decides.

The measure is how long a replica takes for a step while it has work, by the clock of whoever hears its heartbeats:
whatever holds an engine up shows in it, be it the device, the machine or the engine itself. Steps grow with what they
compute, so replicas are compared by what the same step, of a usual size, would take on each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from penstock.core.messages import EngineStats
from penstock.dispatch.outliers import OutlierConfig, OutlierDetector, OutlierState
from penstock.router.rates import LinearFit

LOOK_INTERVAL_S = 2.0
_GUESSED_STEP_TOKENS = 64
_FADING = 0.9
_MIN_OBSERVED = 5  # stretches of work between heartbeats, before a speed means anything


@dataclass(slots=True)
class _Pace:
    """How fast one replica works."""

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
        """`groups`: ids of replicas that do the same work. Returns those that are to be left out now."""
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
