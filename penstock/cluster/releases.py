"""Starts the releases of a server, passes orders of operators and reports of gateways to the right release, and
continues releases after a restart.

Each model has one release at a time. Every change of state is stored before it is acted upon, so that a restarted
server continues where it was and gathers the evidence of that stage again.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from penstock.cluster.control_messages import ActiveRelease, Report
from penstock.cluster.release_record import ReleaseRecord, ReleaseStore, changed
from penstock.cluster.release_run import ReleaseRun
from penstock.cluster.replica import ReplicaManager
from penstock.cluster.scaling import PoolScaler, check_one_revision, served_model
from penstock.cluster.staged_run import resumed_runs
from penstock.control.release import Happening, ReleaseConfig, Releases, Stage
from penstock.core.cluster_view import ReleaseOrder, ReleaseView
from penstock.core.errors import Conflict, InvalidRequest, NotFound

logger = logging.getLogger(__name__)

Resolve = Callable[[str], Awaitable[str]]  # from an operator's name of weights to their path


class ReleaseService:
    """Manages all releases of a server. `pools` are the pools of every model."""

    def __init__(
        self,
        pools: Sequence[PoolScaler],
        manager: ReplicaManager,
        store: ReleaseStore,
        resolve_weights: Resolve,
        announce: Callable[[], Awaitable[None]],
        *,
        interval_s: float,
    ) -> None:
        self._pools = pools
        self._manager = manager
        self._store = store
        self._resolve_weights = resolve_weights
        self._announce = announce
        self._interval_s = interval_s
        self._base_revisions = {pool.spec.model: pool.spec.revision for pool in pools}
        self._runs: dict[str, ReleaseRun] = {}  # by model: the active one, or the last
        self.is_tested: Callable[[str], bool] = lambda model: (
            False
        )  # whether an experiment of a model is active

    async def resume(self, records: Iterable[ReleaseRecord], base_revisions: dict[str, str]) -> None:
        """Continue the releases of an earlier process. `base_revisions`: the revision of the server's settings, by
        model."""
        self._base_revisions |= base_revisions
        self._runs |= await resumed_runs(records, base_revisions, self._abandoned, self._run)

    async def start(self, order: ReleaseOrder) -> ReleaseView:
        """Begin a release. Raises InvalidRequest, ModelNotFound, or Conflict while another runs."""
        model = self._model(order.model)
        run = self._runs.get(model)
        if run is not None and not run.state.is_over:
            raise Conflict(
                f"The release {run.record.id} of {model!r} is still {run.state.stage.replace('_', ' ')}.",
                hint="Promote it or roll it back first.",
            )
        if self.is_tested(model):
            raise Conflict(
                f"An experiment of {model!r} is still running.",
                hint="Stop it with `penstock experiment stop`.",
            )
        try:
            config = msgspec.convert(order.policy, ReleaseConfig)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"The release policy is wrong: {error}.", param="policy") from None
        weights = None
        if order.weights is not None:
            weights = order.weights, await self._resolve_weights(order.weights)
        pools = self._of(model)
        check_one_revision(pools)
        candidate = tuple(
            changed(pool.spec, weights=weights, settings=order.settings, revision=order.revision)
            for pool in pools
        )
        stable = pools[0].spec.revision
        now = time.time()
        record = ReleaseRecord(
            id=f"rel_{uuid.uuid4().hex[:16]}",
            model=model,
            base_revision=self._base_revisions[model],
            stable=tuple(pool.spec for pool in pools),
            candidate=candidate,
            num_replicas=tuple(len(pool.serving(stable)) for pool in pools),
            state=Releases(config).start(stable, candidate[0].revision, now),
            config=config,
            created_at=now,
        )
        await self._store.save(record)
        run = self._runs[model] = self._run(record)
        logger.info("release %s of %s begins: %s → %s", record.id, model, stable, candidate[0].revision)
        run.begin()
        return run.view()

    async def promote(self, model: str | None) -> ReleaseView:
        return await self._order(model, Happening.OPERATOR_PROMOTES)

    async def roll_back(self, model: str | None) -> ReleaseView:
        return await self._order(model, Happening.OPERATOR_ROLLS_BACK)

    def is_active(self, model: str) -> bool:
        run = self._runs.get(model)
        return run is not None and not run.state.is_over

    def observe(self, report: Report) -> None:
        for sample in report.samples:
            run = self._runs.get(sample.model)
            if run is not None:
                run.collector.add(sample)
        for model, of_model in report.models.items():
            run = self._runs.get(model)
            if run is not None:
                run.collector.add_comparisons(
                    of_model.stage_number, of_model.num_compared, of_model.num_diverged
                )

    def active(self) -> tuple[ActiveRelease, ...]:
        """Return the active releases, for gateways."""
        return tuple(
            ActiveRelease(model=model, state=run.state, config=run.record.config)
            for model, run in self._runs.items()
            if not run.state.is_over
        )

    def views(self) -> tuple[ReleaseView, ...]:
        return tuple(run.view() for run in self._runs.values())

    async def give_up(self) -> None:
        """Stop the unfinished releases, and leave them to their current owner. Replicas stay as they are."""
        for model, run in tuple(self._runs.items()):
            if not run.state.is_over:
                await run.close()
                run.hold_pools(False)
                del self._runs[model]
        await self._announce()

    async def close(self) -> None:
        for run in self._runs.values():
            await run.close()

    async def _order(self, model: str | None, happening: Happening) -> ReleaseView:
        run = self._runs.get(self._model(model))
        if run is None:
            raise NotFound("There is no release.", hint="Begin one with `penstock release start`.")
        await run.order(happening)
        return run.view()

    async def _abandoned(self, record: ReleaseRecord) -> ReleaseRecord:
        logger.warning("release %s is dropped: the server's own settings have changed since", record.id)
        state = msgspec.structs.replace(
            record.state, stage=Stage.ROLLED_BACK, reason="the server was started with other settings"
        )
        record = record.at(state)
        await self._store.save(record)
        return record

    def _run(self, record: ReleaseRecord) -> ReleaseRun:
        pools = self._of(record.model)
        return ReleaseRun(record, pools, self._manager, self._store, self._announce, self._interval_s)

    def _of(self, model: str) -> list[PoolScaler]:
        return [pool for pool in self._pools if pool.spec.model == model]

    def _model(self, name: str | None) -> str:
        return served_model(self._pools, name)
