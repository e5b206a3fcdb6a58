"""The stored record of an experiment, which survives a restart of the server, and its view for operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from penstock.cluster.control_messages import ActiveExperiment
from penstock.cluster.release_record import changed
from penstock.cluster.replica import ReplicaSpec
from penstock.control.experiment import Arm, ExperimentConfig, Experiments, ExperimentStage, ExperimentState
from penstock.core.objective import ObjectiveSettings
from penstock.core.policy import PolicySet, RoutingWeights


class ArmRecord(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # of the policy set
    policy: PolicySet
    specs: tuple[ReplicaSpec, ...]  # one for each pool of the model
    counts: tuple[int, ...]  # replicas in each pool

    @property
    def revision(self) -> str:
        return self.specs[0].revision


class ExperimentRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    base_revision: str  # of the server's own settings: when they change, this experiment no longer counts
    base: tuple[ReplicaSpec, ...]  # one for each pool of the model
    num_replicas: tuple[int, ...]  # of the base in each pool, when it began
    a: ArmRecord
    b: ArmRecord
    objective: ObjectiveSettings  # with the weights that judge
    config: ExperimentConfig
    state: ExperimentState
    created_at: float

    def at(self, state: ExperimentState) -> ExperimentRecord:
        return replace(self, state=state)

    def arm(self, arm: Arm) -> ArmRecord:
        return self.a if arm is Arm.A else self.b

    def rules(self) -> Experiments:
        return Experiments(self.config, self.objective, self.b.policy.weights)

    def active(self) -> ActiveExperiment:
        """Return the experiment in the form for gateways."""
        arms = (self.a, self.b)
        return ActiveExperiment(
            id=self.id,
            model=self.model,
            is_running=self.state.stage is ExperimentStage.RUNNING,
            share=self.config.share,
            base=self.base[0].revision,
            a=self.a.revision,
            b=self.b.revision,
            routing={arm.revision: arm.policy.routing or RoutingWeights() for arm in arms},
        )


class ExperimentStore(Protocol):
    async def load(self) -> tuple[ExperimentRecord, ...]:
        """Return all records, oldest first."""
        ...

    async def save(self, record: ExperimentRecord) -> None:
        """Add a record, or replace the record with the same id."""
        ...


class MemoryExperiments:
    """Keeps records as long as the process lives."""

    def __init__(self) -> None:
        self._records: dict[str, ExperimentRecord] = {}

    async def load(self) -> tuple[ExperimentRecord, ...]:
        return tuple(self._records.values())

    async def save(self, record: ExperimentRecord) -> None:
        self._records[record.id] = record


def arm_record(
    name: str, policy: PolicySet, base: Sequence[ReplicaSpec], counts: Sequence[int], arm: Arm
) -> ArmRecord:
    """Return an arm. A set that changes no setting of replicas keeps the replicas from before, for the first arm."""
    settings = policy.engine_settings()
    specs = tuple(base)
    if settings or arm is Arm.B:
        # Replicas of the two arms must be told apart even if their settings are equal.
        specs = tuple(changed(spec, weights=None, settings=settings, revision=None) for spec in base)
        specs = tuple(replace(spec, revision=f"{spec.revision}-{arm.value}") for spec in specs)
    return ArmRecord(name=name, policy=policy, specs=specs, counts=tuple(counts))
