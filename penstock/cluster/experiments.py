"""Starts the experiments of a server, passes orders of operators and reports of gateways to the right one, and
continues experiments after a restart. A model has one experiment or one release at a time."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from penstock.cluster.control_messages import ActiveExperiment, Report
from penstock.cluster.experiment_record import (
    ExperimentRecord,
    ExperimentStore,
    MemoryExperiments,
    arm_record,
)
from penstock.cluster.experiment_run import ExperimentRun
from penstock.cluster.replica import ReplicaManager
from penstock.cluster.scaling import PoolScaler, check_one_revision, served_model
from penstock.cluster.staged_run import resumed_runs
from penstock.control.experiment import (
    Arm,
    ExperimentConfig,
    ExperimentStage,
    ExperimentState,
    Verdict,
    replica_counts,
)
from penstock.core.errors import Conflict, InvalidRequest, NotFound
from penstock.core.experiment_view import ExperimentOrder, ExperimentView

logger = logging.getLogger(__name__)


class ExperimentService:
    def __init__(
        self,
        pools: Sequence[PoolScaler],
        manager: ReplicaManager,
        store: ExperimentStore | None,
        announce: Callable[[], Awaitable[None]],
        is_released: Callable[[str], bool],
        *,
        interval_s: float,
    ) -> None:
        """`is_released` says whether a release of a model is active."""
        self._pools = pools
        self._manager = manager
        self._store: ExperimentStore = store or MemoryExperiments()
        self._announce = announce
        self._is_released = is_released
        self._interval_s = interval_s
        self._base_revisions = {pool.spec.model: pool.spec.revision for pool in pools}
        self._runs: dict[str, ExperimentRun] = {}  # by model: the active one, or the last

    async def resume(self, base_revisions: Mapping[str, str]) -> None:
        """Continue the experiments of an earlier process. `base_revisions`: the revision of the server's settings, by
        model."""
        self._base_revisions |= base_revisions
        self._runs |= await resumed_runs(await self._store.load(), base_revisions, self._abandoned, self._run)

    async def start(self, order: ExperimentOrder) -> ExperimentView:
        """Begin an experiment. Raises InvalidRequest, ModelNotFound, or Conflict while another change runs."""
        model = self._model(order.model)
        if self.is_active(model) or self._is_released(model):
            raise Conflict(
                f"An experiment or a release of {model!r} is still running.",
                hint="See `penstock experiment status` and `penstock release status`.",
            )
        record = self._record(model, order)
        await self._store.save(record)
        run = self._runs[model] = self._run(record)
        logger.info("experiment %s of %s begins: %s, %s", record.id, model, order.a, order.b)
        run.begin()
        return run.view()

    async def stop(self, model: str | None) -> ExperimentView:
        run = self._runs.get(self._model(model))
        if run is None:
            raise NotFound("There is no experiment.", hint="Begin one with `penstock experiment start A B`.")
        await run.stop()
        return run.view()

    def is_active(self, model: str) -> bool:
        run = self._runs.get(model)
        return run is not None and not run.state.is_over

    def observe(self, report: Report) -> None:
        for sample in report.arms:
            for run in self._runs.values():
                run.add(sample)

    def active(self) -> tuple[ActiveExperiment, ...]:
        """Return the active experiments, for gateways."""
        return tuple(run.record.active() for run in self._runs.values() if not run.state.is_over)

    def views(self) -> tuple[ExperimentView, ...]:
        return tuple(run.view() for run in self._runs.values())

    async def finished(self, model: str) -> None:
        """Wait until the experiment of a model is over."""
        await self._runs[model].finished()

    async def close(self) -> None:
        for run in self._runs.values():
            await run.close()

    def _record(self, model: str, order: ExperimentOrder) -> ExperimentRecord:
        if order.a == order.b:
            raise InvalidRequest(f"Both sets are {order.a!r}.", param="b", hint="Compare two different sets.")
        try:
            config = msgspec.convert(order.config, ExperimentConfig)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"The experiment is wrong: {error}.", param="config") from None
        pools = [pool for pool in self._pools if pool.spec.model == model]
        check_one_revision(pools)
        base = tuple(pool.spec for pool in pools)
        present = [max(1, len(pool.serving(pool.spec.revision))) for pool in pools]
        counts = [_counts(config.share, number) for number in present]
        objective = order.objective
        if order.policy_a.weights is not None:
            objective = replace(objective, weights=order.policy_a.weights)
        now = time.time()
        return ExperimentRecord(
            id=f"exp_{uuid.uuid4().hex[:16]}",
            model=model,
            base_revision=self._base_revisions[model],
            base=base,
            num_replicas=tuple(present),
            a=arm_record(order.a, order.policy_a, base, [of_a for of_a, _ in counts], Arm.A),
            b=arm_record(order.b, order.policy_b, base, [of_b for _, of_b in counts], Arm.B),
            objective=objective,
            config=config,
            state=ExperimentState(since_s=now),
            created_at=now,
        )

    async def _abandoned(self, record: ExperimentRecord) -> ExperimentRecord:
        logger.warning("experiment %s is dropped: the server's own settings have changed since", record.id)
        reason = "the server was started with other settings"
        state = replace(record.state, stage=ExperimentStage.OVER, verdict=Verdict.FAILED, reason=reason)
        record = record.at(state)
        await self._store.save(record)
        return record

    def _run(self, record: ExperimentRecord) -> ExperimentRun:
        pools = [pool for pool in self._pools if pool.spec.model == record.model]
        return ExperimentRun(record, pools, self._manager, self._store, self._announce, self._interval_s)

    def _model(self, name: str | None) -> str:
        return served_model(self._pools, name)


def _counts(share: float, num_present: int) -> tuple[int, int]:
    counts = replica_counts(share, num_present)
    if counts is None:
        possible = _possible_shares(num_present)
        raise InvalidRequest(
            f"A share of {share:g} is not possible with {num_present} replicas: both sets must have the same load "
            "per replica.",
            param="share",
            hint=f"Possible are {', '.join(f'{each:.3g}' for each in possible)}.",
        )
    return counts


def _possible_shares(num_present: int) -> list[float]:
    totals: Iterable[int] = range(max(2, num_present), max(2, 2 * num_present) + 1)
    shares = {round(count / total, 3) for total in totals for count in range(1, total)}
    return sorted(shares)[:16]
