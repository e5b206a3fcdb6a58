"""The common part of releases and experiments: records that survive a restart of the server, the revisions of a
model, and a task for each model that carries out one stage after the other. A record is stored at every change of
state."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import hashlib
import logging
import time
import typing
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import msgspec
from msgspec.structs import replace

from penstock.cluster.control_messages import ActiveExperiment
from penstock.cluster.replica import ReplicaManager, ReplicaSpec
from penstock.cluster.scaling import PoolScaler, served_model
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
from penstock.core.errors import InvalidRequest, PenstockError, Superseded
from penstock.core.objective import ObjectiveSettings, PolicySet, RoutingWeights
from penstock.router import ReplicaState

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


logger = logging.getLogger(__name__)


LOST_S = 30.0  # without a ready replica of a revision


class StagedRun(ABC, Generic[RecordT]):
    """A task that carries out one stage after the other. A stage that fails is tried again."""

    kind: ClassVar[str]  # for the log: "release"

    def __init__(
        self,
        record: RecordT,
        pools: Sequence[PoolScaler],
        manager: ReplicaManager,
        store: RecordStore[RecordT],
        announce: Callable[[], Awaitable[None]],
        interval_s: float,
    ) -> None:
        self.record = record
        self._pools = pools
        self._manager = manager
        self._store = store
        self._announce = announce  # returns when every gateway knows the current state
        self._interval_s = interval_s
        self._driver: asyncio.Task[None] | None = None
        self._lost_since_s: float | None = None

    @property
    def is_over(self) -> bool:
        return bool(self.record.state.is_over)

    @abstractmethod
    def present_step(self) -> Awaitable[None]:
        """Return the work of the present stage."""

    @abstractmethod
    def hold_pools(self, is_held: bool) -> None:
        """Keep the autoscaler away from the replicas, or let it continue."""

    def resume(self) -> None:
        """Begin a run of an earlier process."""
        logger.info("continuing with %s %s, which is %s", self.kind, self.record.id, self.record.state.stage)
        self.begin()

    def begin(self) -> None:
        self.hold_pools(True)
        self._driver = asyncio.create_task(self._drive())

    async def close(self) -> None:
        if self._driver is not None:
            self._driver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._driver

    async def finished(self) -> None:
        """Wait until the run is over."""
        while not self.is_over and self._driver is not None:
            await asyncio.wait((self._driver,))

    async def _drive(self) -> None:
        while not self.is_over:
            try:
                await self.present_step()
            except PenstockError as error:
                logger.error("the %s %s tries again: %s", self.kind, self.record.id, error.message)
                await asyncio.sleep(self._interval_s)
            except Exception:
                logger.exception("the %s %s stumbled; it tries again", self.kind, self.record.id)
                await asyncio.sleep(self._interval_s)
        self.hold_pools(False)
        await self._announce()

    async def _save(self, record: RecordT) -> None:
        """Store and take over the record of a new state. A database that is away must not keep a bad candidate or
        policy in service. Raises Superseded if another control process decides now."""
        try:
            await self._store.save(record)
        except Superseded:
            raise
        except PenstockError as error:
            logger.error("the %s's state could not be written down: %s", self.kind, error.message)
        self.record = record

    def _is_lost(self, revisions: Iterable[tuple[PoolScaler, str]]) -> bool:
        """Return whether one of these revisions has had no ready replica in its pool for `LOST_S`."""
        now = time.monotonic()
        has_ready = all(
            any(member.replica.state is ReplicaState.READY for member in pool.serving(revision))
            for pool, revision in revisions
        )
        if has_ready:
            self._lost_since_s = None
        elif self._lost_since_s is None:
            self._lost_since_s = now
        return self._lost_since_s is not None and now - self._lost_since_s >= LOST_S


RunT = TypeVar("RunT", bound=StagedRun[Any])


class StagedService(ABC, Generic[RecordT, RunT]):
    """All releases, or all experiments, of a server. `pools` are the pools of every model."""

    make_run: ClassVar[Callable[..., Any]]  # the class of the runs

    def __init__(
        self,
        pools: Sequence[PoolScaler],
        manager: ReplicaManager,
        store: RecordStore[RecordT],
        announce: Callable[[], Awaitable[None]],
        interval_s: float,
    ) -> None:
        self._pools = pools
        self._manager = manager
        self._store = store
        self._announce = announce
        self._interval_s = interval_s
        self._base_revisions = {pool.spec.model: pool.spec.revision for pool in pools}
        self._runs: dict[str, RunT] = {}  # by model: the active one, or the last

    async def resume(self, records: Iterable[RecordT], base_revisions: Mapping[str, str]) -> None:
        """Take over the latest run of each model from an earlier process, and continue those that are not over.
        `base_revisions`: the revision of the server's settings, by model. A run under other settings is abandoned."""
        self._base_revisions |= base_revisions
        latest: dict[str, RecordT] = {}
        for record in records:
            if record.model not in base_revisions:
                continue
            if not record.state.is_over and record.base_revision != base_revisions[record.model]:
                logger.warning("%s is dropped: the server's own settings have changed since", record.id)
                record = record.abandoned("the server was started with other settings")
                await self._store.save(record)
            latest[record.model] = record
        runs = {model: self._run(record) for model, record in latest.items()}
        for run in runs.values():
            if not run.is_over:
                run.resume()
        self._runs |= runs

    def is_active(self, model: str) -> bool:
        run = self._runs.get(model)
        return run is not None and not run.is_over

    async def close(self) -> None:
        for run in self._runs.values():
            await run.close()

    async def _begin(self, record: RecordT) -> RunT:
        await self._store.save(record)
        run = self._runs[record.model] = self._run(record)
        run.begin()
        return run

    def _run(self, record: RecordT) -> RunT:
        run: RunT = self.make_run(
            record, self._of(record.model), self._manager, self._store, self._announce, self._interval_s
        )
        return run

    def _of(self, model: str) -> list[PoolScaler]:
        return [pool for pool in self._pools if pool.spec.model == model]

    def _model(self, name: str | None) -> str:
        return served_model(self._pools, name)


async def start_missing(
    manager: ReplicaManager, pools: Sequence[PoolScaler], specs: Sequence[ReplicaSpec], counts: Sequence[int]
) -> None:
    """Bring each pool to this number of replicas of its spec; draining replicas are taken back first."""
    launches = []
    for pool, spec, count in zip(pools, specs, counts, strict=True):
        for member in pool.members():
            if member.replica.revision == spec.revision and member.replica.state is ReplicaState.DRAINING:
                manager.resume(member.id)
        num_missing = count - len(pool.serving(spec.revision))
        launches += [asyncio.create_task(manager.launch(spec)) for _ in range(num_missing)]
    try:
        await asyncio.gather(*launches)
    finally:  # one that fails, or an operator's order, ends the others
        for launch in launches:
            launch.cancel()
        await asyncio.gather(*launches, return_exceptions=True)


async def remove_beyond(pools: Sequence[PoolScaler], revision: str, counts: Sequence[int]) -> None:
    """Drain and stop the replicas of a revision beyond these numbers."""
    for pool, count in zip(pools, counts, strict=True):
        members = pool.members() if not count else pool.serving(revision)
        of_revision = [member.id for member in members if member.replica.revision == revision]
        await pool.remove(of_revision[count:])
