"""An experiment as operators order and see it. Plain data."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from penstock.core.cluster_view import GateView
from penstock.core.objective import Objective, ObjectiveSettings
from penstock.core.policy import PolicySet


class ExperimentOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two policy sets to compare. The gateway has looked up their names."""

    model: str | None = None  # the served name; None: the only model
    a: str  # the names of the sets
    b: str
    policy_a: PolicySet
    policy_b: PolicySet
    objective: ObjectiveSettings
    config: dict[str, Any] = {}  # what differs from the defaults of an experiment


class ArmView(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    revision: str
    num_replicas: int  # that serve now
    num_requests: int
    objective: Objective


class DifferenceView(msgspec.Struct, frozen=True, kw_only=True):
    """The difference of objectives, second set minus first set, with its confidence interval."""

    mean: float
    low: float
    high: float
    num_windows: int


class ExperimentView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    stage: str
    share: float
    a: ArmView
    b: ArmView
    difference: DifferenceView | None  # None: too few windows so far
    confidence: float
    num_windows: int
    min_windows: int
    guards: tuple[GateView, ...]
    verdict: str | None
    reason: str
    started_at: float  # Unix seconds
    ends_at: float  # at the latest
    is_over: bool


class ExperimentControl(Protocol):
    """Runs experiments on the fleet behind a gateway."""

    async def experiments(self) -> tuple[ExperimentView, ...]: ...

    async def start_experiment(self, order: ExperimentOrder) -> ExperimentView: ...

    async def stop_experiment(self, model: str | None) -> ExperimentView: ...
