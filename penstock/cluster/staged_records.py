"""The stored records of releases and experiments, which survive a restart of the server, and the revisions of a
model."""

from __future__ import annotations

import difflib
import hashlib
import typing
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec
from msgspec.structs import replace

from penstock.cluster.control_messages import ActiveExperiment
from penstock.cluster.replica import ReplicaSpec
from penstock.control.experiment import (
    Arm,
    ExperimentConfig,
    Experiments,
    ExperimentStage,
    ExperimentState,
    Verdict,
)
from penstock.control.release import ReleaseConfig, ReleaseState, Stage
from penstock.core.engine_config import CacheConfig, EngineConfig
from penstock.core.errors import InvalidRequest
from penstock.core.objective import ObjectiveSettings, PolicySet, RoutingWeights

StateT = TypeVar("StateT")


class StagedRecord(msgspec.Struct, Generic[StateT], frozen=True, kw_only=True):
    """The stored record of a release or an experiment. Times in `state` are Unix seconds."""

    id: str
    model: str
    # The revision of the server's own settings: when they change, this release or experiment no longer counts.
    base_revision: str
    num_replicas: tuple[int, ...]  # of the revision in service, in each pool, when it began
    state: StateT
    created_at: float

    def at(self, state: StateT) -> Self:
        return replace(self, state=state)

    @abstractmethod
    def abandoned(self, reason: str) -> Self: ...


RecordT = TypeVar("RecordT", bound=StagedRecord[Any])


class RecordStore(Protocol[RecordT]):
    async def load(self) -> tuple[RecordT, ...]:
        """Return all records, oldest first."""
        ...

    async def save(self, record: RecordT) -> None:
        """Add a record, or replace the record with the same id."""
        ...


class MemoryRecords(Generic[RecordT]):
    """Keeps records as long as the process lives."""

    def __init__(self) -> None:
        self._records: dict[str, RecordT] = {}

    async def load(self) -> tuple[RecordT, ...]:
        return tuple(self._records.values())

    async def save(self, record: RecordT) -> None:
        self._records[record.id] = record


class ReleaseRecord(StagedRecord[ReleaseState], frozen=True, kw_only=True):
    stable: tuple[ReplicaSpec, ...]  # one for each pool of the model
    candidate: tuple[ReplicaSpec, ...]  # in the same order
    config: ReleaseConfig

    def abandoned(self, reason: str) -> ReleaseRecord:
        return self.at(replace(self.state, stage=Stage.ROLLED_BACK, reason=reason))


def serving_spec(spec: ReplicaSpec, records: Iterable[ReleaseRecord]) -> ReplicaSpec:
    """Return the spec to start for `spec`, which comes from the server's settings: the candidate of the last release
    that was promoted, or was about to be, under these settings."""
    serving = spec
    for record in records:
        has_won = record.state.stage in (Stage.PROMOTED, Stage.LAME_DUCK)
        if has_won and record.model == spec.model and record.base_revision == spec.revision:
            for candidate in record.candidate:
                if candidate.role == spec.role:
                    serving = replace(candidate, region=spec.region, launcher=spec.launcher)
    return serving


# A release changes how a model is served, not its name; its weights are a parameter of their own.
_FIXED = frozenset({"model", "served_model_name"})


def revision_of(engine: EngineConfig, model_path: str) -> str:
    """Return a name that is the same for the same weights and settings."""
    content = msgspec.json.encode((engine, model_path), order="deterministic")
    return hashlib.sha256(content).hexdigest()[:10]


def kv_kind_of(spec: ReplicaSpec) -> str:
    """Return a name that is the same for replicas whose KV means the same: ranks, memory and limits may differ."""
    engine = spec.engine
    cache = CacheConfig(block_size=engine.cache.block_size, kv_cache_dtype=engine.cache.kv_cache_dtype)
    return revision_of(EngineConfig(model=engine.model, cache=cache), spec.model_path)


def changed(
    spec: ReplicaSpec, *, weights: tuple[str, str] | None, settings: Mapping[str, Any], revision: str | None
) -> ReplicaSpec:
    """Return `spec` with other weights (their name and their path), other settings, or both."""
    engine = with_settings(spec.engine, settings)
    model_path = spec.model_path
    if weights is not None:
        name, model_path = weights
        # Clients continue using the name that they know.
        model = replace(engine.model, model=name, served_model_name=spec.model)
        engine = replace(engine, model=model)
    revision = revision or revision_of(engine, model_path)
    return replace(spec, engine=engine, model_path=model_path, revision=revision)


def with_settings(engine: EngineConfig, changes: Mapping[str, Any]) -> EngineConfig:
    """Return an engine config with other settings, by the names of flags. Raises InvalidRequest for an unknown
    setting or an invalid value."""
    places = _places(engine)
    for name, value in changes.items():
        if name not in places:
            near = difflib.get_close_matches(name, places, n=1)
            raise InvalidRequest(
                f"There is no engine setting {name!r}.",
                param="settings",
                hint=f"Did you mean {near[0]!r}?" if near else None,
            )
        section = places[name]
        if section is None:
            engine = _with(engine, name, value)
        else:
            engine = replace(engine, **{section: _with(getattr(engine, section), name, value)})
    return engine


def _places(engine: EngineConfig) -> dict[str, str | None]:
    """Return the section of every setting; None for settings of the engine itself."""
    places: dict[str, str | None] = {}
    for field in engine.__struct_fields__:
        value = getattr(engine, field)
        if isinstance(value, msgspec.Struct):
            places |= dict.fromkeys(value.__struct_fields__, field)
        else:
            places[field] = None
    return {name: section for name, section in places.items() if name not in _FIXED}


_Struct = typing.TypeVar("_Struct", bound=msgspec.Struct)


def _with(struct: _Struct, name: str, value: Any) -> _Struct:
    declared = typing.get_type_hints(type(struct), include_extras=True)[name]
    try:
        # Values of a command line are strings, and values of JSON have types: both are accepted.
        checked = msgspec.convert(value, declared, strict=not isinstance(value, str))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"The setting {name} cannot be {value!r}: {error}.", param="settings") from None
    return replace(struct, **{name: checked})


class ArmRecord(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # of the policy set
    policy: PolicySet
    specs: tuple[ReplicaSpec, ...]  # one for each pool of the model
    counts: tuple[int, ...]  # replicas in each pool

    @property
    def revision(self) -> str:
        return self.specs[0].revision


class ExperimentRecord(StagedRecord[ExperimentState], frozen=True, kw_only=True):
    base: tuple[ReplicaSpec, ...]  # one for each pool of the model
    a: ArmRecord
    b: ArmRecord
    objective: ObjectiveSettings  # with the weights that judge
    config: ExperimentConfig

    def abandoned(self, reason: str) -> ExperimentRecord:
        ended = replace(self.state, stage=ExperimentStage.OVER, verdict=Verdict.FAILED, reason=reason)
        return self.at(ended)

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
