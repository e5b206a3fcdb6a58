"""Searches policy sets in the simulator for the smallest objective on one load. Pure: knows no clock and no terminal.

The search starts from the settings in use, changes one setting at a time, and keeps a better value, until no change
helps or the evaluations are used up. All sets see the same requests, so that differences come from the sets. The best
set is then compared on requests that the search has not seen: the later part of a recorded load, or other seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import msgspec

from penstock.core.objective import Objective, PolicySet, RoutingWeights
from penstock.core.request import Tier
from penstock.planner.traffic import RecordedArrivals
from penstock.simulator import Report, SimulationConfig

MIN_GAIN = 0.005  # of the objective, to keep a change: smaller ones are chance
TRAINING_SHARE = 0.6  # of a recorded load
NUM_CHECKS = 3  # other seeds
_MIN_ARRIVALS = 10

# The values to try, in order, by setting. Neighbours of the best value so far are tried first.
SPACE: dict[str, tuple[Any, ...]] = {
    "max_num_batched_tokens": (128, 256, 512, 1024, 2048, 4096, 8192),
    "itl_target_ms": (0.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0),
    "max_num_seqs": (4, 8, 16, 32, 64, 128, 256),
    "length_bins": ("off", "tenant", "prompt"),
    "aging_s": (1.0, 5.0, 30.0, 120.0),
    "tier_shares": (None, "4,2,1", "8,3,1", "16,4,1"),
    "preempt_batch": (True, False),
    "max_draft_tokens": (0, 2, 4, 8, 12),
    "recompute_weight": (1.0, 1.15, 1.5, 2.0),
    "policy": ("prefix-aware", "least-loaded", "power-of-two", "session-affinity", "round-robin"),
}
_ROUTING = ("policy", "recompute_weight")
_DEFAULT_ROUTING = {"recompute_weight": 1.15}

Simulate = Callable[[SimulationConfig], Report]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One policy set and its objective. `change` is what differs from the set that it was made of."""

    number: int
    policy: PolicySet
    objective: Objective
    change: str
    is_best: bool


@dataclass(frozen=True, slots=True)
class Check:
    """The objectives of the settings in use and of the best set, on requests that the search has not seen."""

    before: float
    after: float


def with_policy(config: SimulationConfig, policy: PolicySet) -> SimulationConfig:
    """Return a simulation whose replicas and routers follow a policy set."""
    scheduler = policy.applied_to(config.replica.scheduler)
    dispatch = config.dispatch
    if policy.routing is not None:
        dispatch = msgspec.structs.replace(dispatch, routing=policy.routing)
    objective = config.objective
    if policy.weights is not None:
        objective = msgspec.structs.replace(objective, weights=policy.weights)
    return replace(
        config,
        replica=replace(config.replica, scheduler=scheduler),
        dispatch=dispatch,
        objective=objective,
    )


def split(config: SimulationConfig) -> tuple[SimulationConfig, tuple[SimulationConfig, ...]]:
    """Return the load to search with, and the loads to check with."""
    if not isinstance(config.arrivals, RecordedArrivals):
        checks = tuple(replace(config, seed=config.seed + 1 + number) for number in range(NUM_CHECKS))
        return config, checks
    lines = config.arrivals.lines
    cut = int(len(lines) * TRAINING_SHARE)
    if cut < _MIN_ARRIVALS:
        return config, ()
    first, later = (
        replace(config, arrivals=part, workload=part.described_by(config.workload))
        for part in (RecordedArrivals(lines[:cut]), RecordedArrivals(lines[cut:]))
    )
    return first, (later,)


def search(
    config: SimulationConfig, simulate: Simulate, *, max_evaluations: int, settings: tuple[str, ...] = ()
) -> Iterator[Evaluation]:
    """Yield every evaluated set, the settings in use first. `settings` are the names to change; if empty, all
    settings that can matter for this load."""
    report = simulate(config)
    weights = config.objective
    # All sets are measured against one capacity: otherwise a set that wastes time would look better used.
    capacity = weights.capacity_tokens_per_s or report.tokens_per_busy_s
    best, best_objective = PolicySet(), report.objective_by(weights, capacity)
    yield Evaluation(1, best, best_objective, "the settings in use", is_best=True)
    seen = {best}
    count = 1
    names = settings or tuple(_that_matter(config))
    improves = True
    while improves:
        improves = False
        for name in names:
            for value in _to_try(name, _value(config, best, name)):
                candidate = _changed(config, best, name, value)
                if candidate in seen:
                    continue
                if count >= max_evaluations:
                    return
                seen.add(candidate)
                count += 1
                objective = simulate(with_policy(config, candidate)).objective_by(weights, capacity)
                is_best = objective.total < best_objective.total * (1.0 - MIN_GAIN)
                if is_best:
                    best, best_objective, improves = candidate, objective, True
                yield Evaluation(count, candidate, objective, f"{name} = {value}", is_best)


def check(loads: tuple[SimulationConfig, ...], policy: PolicySet, simulate: Simulate) -> tuple[Check, ...]:
    """Compare a set with the settings in use, on other loads."""
    checks = []
    for load in loads:
        before = simulate(load)
        capacity = load.objective.capacity_tokens_per_s or before.tokens_per_busy_s
        after = simulate(with_policy(load, policy))
        checks.append(
            Check(
                before.objective_by(load.objective, capacity).total,
                after.objective_by(load.objective, capacity).total,
            )
        )
    return tuple(checks)


def mean_gain(checks: tuple[Check, ...]) -> float:
    """Return by which share the objective is smaller, on average; negative if it is larger."""
    return 1.0 - fmean(each.after for each in checks) / fmean(each.before for each in checks)


def _that_matter(config: SimulationConfig) -> Iterator[str]:
    """Yield the settings that can make a difference for this load."""
    tiers = {tenant.tier for tenant in config.workload.tenants}
    irrelevant = set()
    if len(tiers) == 1:
        irrelevant.add("tier_shares")
    if len(tiers) == 1 or Tier.BATCH not in tiers:
        irrelevant.add("preempt_batch")
    if config.replica.draft_acceptance is None:
        irrelevant.add("max_draft_tokens")
    if config.num_replicas == 1 and config.autoscaler is None:
        irrelevant.update(_ROUTING)
    return (name for name in SPACE if name not in irrelevant)


def _to_try(name: str, present: Any) -> list[Any]:
    """Return the other values of a setting, the nearest first."""
    values = SPACE[name]
    if present not in values:
        return list(values)
    place = values.index(present)
    return sorted(
        (value for value in values if value != present), key=lambda each: abs(values.index(each) - place)
    )


def _value(config: SimulationConfig, policy: PolicySet, name: str) -> Any:
    """Return the value of a setting under a policy set."""
    if name not in _ROUTING:
        return getattr(policy.applied_to(config.replica.scheduler), name)
    for routing in (policy.routing, config.dispatch.routing):
        if routing is not None and getattr(routing, name) is not None:
            return getattr(routing, name)
    return config.dispatch.routing_policy if name == "policy" else _DEFAULT_ROUTING[name]


def _changed(config: SimulationConfig, policy: PolicySet, name: str, value: Any) -> PolicySet:
    """Return a set with another value. The value of the settings in use is left out of the set."""
    in_use = _value(config, PolicySet(), name)
    given: Mapping[str, Any] = {name: None if value == in_use else value}
    if name not in _ROUTING:
        return msgspec.structs.replace(policy, **given)
    routing = msgspec.structs.replace(policy.routing or RoutingWeights(), **given)
    return msgspec.structs.replace(policy, routing=None if routing == RoutingWeights() else routing)
