"""Exports the scheduling objective of the last minute, by model and tier, as this gateway's requests saw it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from penstock.cluster.fleet import Fleet
from penstock.cluster.traffic import is_dropped
from penstock.core.objective import ObjectiveSettings, TierSums, added, objective_of, utilisation_of
from penstock.core.request import Request, Tier
from penstock.dispatch import Attempt
from penstock.gateway.metrics.table import Figures

SLICE_S = 10.0
NUM_SLICES = 6
_TERMS = ("ttft", "itl", "drops", "idle", "total")
_SUMS: dict[str, Callable[[TierSums], float]] = {
    "ttft": lambda sums: sums.ttft,
    "itl": lambda sums: sums.itl,
    "drops": lambda sums: sums.num_dropped,
}


@dataclass(slots=True)
class _Slice:
    """The requests that ended in some seconds, and what the engines had done by their begin."""

    begun_s: float
    work: dict[str, tuple[int, float]]  # by model: tokens computed, and seconds of steps
    sums: dict[str, dict[Tier, TierSums]] = field(default_factory=dict)


class ObjectiveMetrics:
    """Implements `fleet.FleetObserver`. Runs on the event loop, as scrapes do."""

    def __init__(self, fleet: Fleet, now: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._now = now
        self._settings = ObjectiveSettings()
        self._totals: dict[str, dict[Tier, TierSums]] = {}
        self._slices: deque[_Slice] = deque([_Slice(now(), {})])

    def apply(self, settings: ObjectiveSettings) -> None:
        """Use other weights and targets, for requests that end from now on."""
        self._settings = settings

    def arrived(self, request: Request, uncached_tokens: int) -> None:
        """Nothing to do: a request counts when it ends."""

    def first_token(self, request: Request, replica_id: str, revision: str, ttft_s: float) -> None:
        """Nothing to do: the end of the attempt reports this time too."""

    def ended(self, attempt: Attempt) -> None:
        dropped = is_dropped(attempt)
        if dropped is None:
            return
        model = attempt.request.model or next(iter(self._fleet.models), "")
        tier = attempt.request.tier
        target = self._settings.targets.of(tier)
        for sums in (self._present().sums, self._totals):
            of_tier = sums.setdefault(model, {}).setdefault(tier, TierSums())
            of_tier.add(target, attempt.ttft_s, attempt.itl_s, is_dropped=dropped)

    def figures(self) -> Figures:
        self._present()
        values: dict[tuple[str, ...], float] = {}
        models = {model for each in self._slices for model in each.sums} | set(self._fleet.models)
        for model in sorted(models):
            sums = added(each.sums.get(model, {}) for each in self._slices)
            objective = objective_of(sums, self._settings, self._utilisation(model))
            for tier, terms in (("all", objective.overall), *sorted(objective.by_tier.items())):
                values.update({(model, tier, term): getattr(terms, term) for term in _TERMS})
        return {
            "objective": values,
            "objective_requests": dict(self._counted(lambda sums: sums.num_requests)),
            "objective_cost": {
                (*labels, term): value
                for term, figure in _SUMS.items()
                for labels, value in self._counted(figure)
            },
        }

    def _counted(self, figure: Callable[[TierSums], float]) -> Iterator[tuple[tuple[str, ...], float]]:
        for model, by_tier in self._totals.items():
            for tier, sums in by_tier.items():
                yield (model, tier.value), figure(sums)

    def _utilisation(self, model: str) -> float:
        """Return the used share of what the model's replicas can compute, since the oldest slice began."""
        oldest = self._slices[0]
        elapsed_s = self._now() - oldest.begun_s
        tokens, busy_s = self._work(model)
        tokens_before, busy_before_s = oldest.work.get(model, (tokens, busy_s))
        tokens, busy_s = tokens - tokens_before, busy_s - busy_before_s
        num_replicas = sum(member.spec.model == model for member in self._fleet.members)
        if elapsed_s <= 0.0 or busy_s <= 0.0 or not num_replicas:
            return 0.0
        capacity = self._settings.capacity_tokens_per_s or tokens / busy_s
        return utilisation_of(tokens / elapsed_s / num_replicas, capacity)

    def _work(self, model: str) -> tuple[int, float]:
        stats = self._fleet.stats_of(model)
        return stats.tokens_computed, stats.busy_s

    def _present(self) -> _Slice:
        """Return the slice of this time. Slices that are older than the window are dropped."""
        now = self._now()
        if now - self._slices[-1].begun_s >= SLICE_S:
            self._slices.append(_Slice(now, {model: self._work(model) for model in self._fleet.models}))
        while len(self._slices) > 1 and now - self._slices[0].begun_s > SLICE_S * NUM_SLICES:
            self._slices.popleft()
        return self._slices[-1]
