"""Starts the experiments of a server, passes orders of operators and reports of gateways to the right one, and
continues experiments after a restart. A model has one experiment or one release at a time."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import product

import msgspec
from msgspec.structs import replace

from penstock.cluster.control_messages import ActiveExperiment, ArmSample, Report, Sample
from penstock.cluster.replica import ReplicaManager
from penstock.cluster.scaling import PoolScaler, check_one_revision
from penstock.cluster.staged_records import (
    ExperimentRecord,
    RecordStore,
    StagedRun,
    StagedService,
    arm_record,
    remove_beyond,
    start_missing,
)
from penstock.control.experiment import (
    Arm,
    ArmWindow,
    ExperimentConfig,
    ExperimentStage,
    ExperimentState,
    Verdict,
    Window,
    replica_counts,
)
from penstock.control.gates import EvidenceCollector
from penstock.core.cluster_view import ArmView, DifferenceView, ExperimentOrder, ExperimentView, GateView
from penstock.core.errors import Conflict, InvalidRequest, NotFound, PenstockError
from penstock.core.objective import TierSums
from penstock.core.request import Tier

logger = logging.getLogger(__name__)


class _Collected:
    """The results of one arm in the current window."""

    def __init__(self) -> None:
        self.sums: dict[Tier, TierSums] = {}
        self.num_tokens = 0


class ExperimentRun(StagedRun[ExperimentRecord]):
    """One active experiment: starts the replicas of its arms, collects windows from gateways, and restores the
    previous replicas. `control/experiment` decides when it ends, and the verdict."""

    kind = "experiment"

    def __init__(
        self,
        record: ExperimentRecord,
        pools: Sequence[PoolScaler],
        manager: ReplicaManager,
        store: RecordStore[ExperimentRecord],
        announce: Callable[[], Awaitable[None]],
        interval_s: float,
    ) -> None:
        super().__init__(record, pools, manager, store, announce, interval_s)
        self.rules = record.rules()
        self._collected = {arm: _Collected() for arm in Arm}
        self._evidence = EvidenceCollector(Arm.A, Arm.B, record.config.guards)

    @property
    def state(self) -> ExperimentState:
        return self.record.state

    def hold_pools(self, is_held: bool) -> None:
        for pool in self._pools:
            pool.is_fixed = is_held

    async def stop(self) -> None:
        """End the experiment by an operator's order. Does nothing to one that ends already."""
        if self.state.stage in (ExperimentStage.ENDING, ExperimentStage.OVER):
            return
        await self.close()
        await self._end(Verdict.STOPPED, "by an operator")
        self.begin()

    def add(self, sample: ArmSample) -> None:
        if sample.experiment_id != self.record.id or self.state.stage is not ExperimentStage.RUNNING:
            return
        collected = self._collected[sample.arm]
        collected.num_tokens += sample.num_tokens
        target = self.record.objective.targets.of(sample.tier)
        sums = collected.sums.setdefault(sample.tier, TierSums())
        sums.add(target, sample.ttft_s, sample.itl_s, is_dropped=sample.is_dropped)
        self._evidence.add(Sample("", "", sample.arm, 0, sample.ttft_s, sample.itl_s, sample.is_dropped))

    def view(self) -> ExperimentView:
        record, state = self.record, self.state
        found = self.rules.difference(state)
        began_s = state.running_since_s or state.since_s
        reports = self.rules.guards(self._evidence.evidence())
        return ExperimentView(
            id=record.id,
            model=record.model,
            stage=state.stage,
            share=record.config.share,
            a=self._arm_view(Arm.A),
            b=self._arm_view(Arm.B),
            difference=None
            if found is None
            else DifferenceView(
                mean=found.mean, low=found.low, high=found.high, num_windows=found.num_windows
            ),
            confidence=record.config.confidence,
            num_windows=len(self.rules.complete(state)),
            min_windows=record.config.min_windows,
            guards=tuple(GateView(report.gate, report.result, report.sentence) for report in reports),
            verdict=state.verdict,
            reason=state.reason,
            started_at=record.created_at,
            ends_at=began_s + record.config.max_duration_s,
            is_over=state.is_over,
        )

    def _arm_view(self, arm: Arm) -> ArmView:
        of_arm = self.record.arm(arm)
        windows = [window.a if arm is Arm.A else window.b for window in self.state.windows]
        return ArmView(
            policy=of_arm.name,
            revision=of_arm.revision,
            num_replicas=sum(len(pool.serving(of_arm.revision)) for pool in self._pools),
            num_requests=sum(window.num_requests for window in windows),
            objective=self.rules.objective_of(self.state, arm),
        )

    def present_step(self) -> Awaitable[None]:
        steps: dict[ExperimentStage, Callable[[], Awaitable[None]]] = {
            ExperimentStage.STARTING: self._start,
            ExperimentStage.RUNNING: self._watch,
            ExperimentStage.ENDING: self._restore,
        }
        return steps[self.state.stage]()

    async def _start(self) -> None:
        # Gateways must know of the arms before their replicas exist, so that no replica gets a wrong request.
        await self._announce()
        if not await self._arms_serve():
            return
        now = time.time()
        began_s = self.state.running_since_s or now
        await self._enter(
            replace(
                self.state, stage=ExperimentStage.RUNNING, since_s=now, running_since_s=began_s, reason=""
            )
        )

    async def _arms_serve(self) -> bool:
        """Start the replicas of both arms. If that fails, the experiment has failed."""
        try:
            for arm in (self.record.a, self.record.b):
                await start_missing(self._manager, self._pools, arm.specs, arm.counts)
        except PenstockError as error:
            await self._end(Verdict.FAILED, f"a replica cannot be started: {error.message}")
            return False
        return True

    async def _watch(self) -> None:
        """Let the arms serve, window by window, until the rules end it."""
        record, state = self.record, self.state
        await self._announce()
        # After a restart of the server only the replicas from before are there.
        if not await self._arms_serve():
            return
        await self._remove_others(record.base[0].revision, record.a.revision, record.b.revision)
        # Requests that began before this moment had other replicas, and do not count.
        self._collected = {arm: _Collected() for arm in Arm}
        began_s = time.monotonic()
        while self.state.stage is ExperimentStage.RUNNING:
            await asyncio.sleep(self._interval_s)
            # A host that joins a shared fleet adds replicas, and one arm would then have less load than the other.
            await self._remove_others(record.a.revision, record.b.revision)
            if self._is_lost(product(self._pools, (record.a.revision, record.b.revision))):
                await self._end(Verdict.FAILED, "an arm has no replica that is ready")
                return
            after, elapsed_s = self.state, time.monotonic() - began_s
            if elapsed_s >= record.config.window_s:
                after = self.rules.with_window(self._with_capacity(after), self._take_window(elapsed_s))
                began_s = time.monotonic()
            judged = self.rules.judged(after, self._evidence.evidence(), time.time())
            if judged is not state:
                await self._enter(judged)
                state = judged

    async def _remove_others(self, *revisions: str) -> None:
        """Remove the replicas of these revisions that belong to no arm."""
        for revision in set(revisions):
            counts = [
                sum(arm.counts[place] for arm in (self.record.a, self.record.b) if arm.revision == revision)
                for place in range(len(self._pools))
            ]
            await remove_beyond(self._pools, revision, counts)

    def _take_window(self, seconds: float) -> Window:
        parts = {}
        for arm, collected in self._collected.items():
            revision = self.record.arm(arm).revision
            num_replicas = sum(len(pool.serving(revision)) for pool in self._pools)
            parts[arm] = ArmWindow(collected.sums, collected.num_tokens, num_replicas)
        self._collected = {arm: _Collected() for arm in Arm}
        return Window(seconds, parts[Arm.A], parts[Arm.B])

    def _with_capacity(self, state: ExperimentState) -> ExperimentState:
        """Measure once the capacity of a replica of the first arm, in tokens per second of its steps."""
        if state.capacity_tokens_per_s is not None:
            return state
        revision = self.record.a.revision
        members = [member for pool in self._pools for member in pool.serving(revision)]
        stats = [self._manager.stats(member.id) for member in members]
        busy_s = sum(each.busy_s for each in stats)
        if busy_s <= 0.0:
            return state
        return replace(state, capacity_tokens_per_s=sum(each.tokens_computed for each in stats) / busy_s)

    async def _restore(self) -> None:
        record = self.record
        await start_missing(self._manager, self._pools, record.base, record.num_replicas)
        await self._announce()
        for revision in {record.a.revision, record.b.revision}:
            kept = record.num_replicas if revision == record.base[0].revision else [0] * len(self._pools)
            await remove_beyond(self._pools, revision, kept)
        await self._enter(replace(self.state, stage=ExperimentStage.OVER, since_s=time.time()))

    async def _end(self, verdict: Verdict, reason: str) -> None:
        await self._enter(self.rules.ended(self.state, verdict, reason, time.time()))

    async def _enter(self, state: ExperimentState) -> None:
        if state.stage is not self.state.stage:
            logger.info(
                "experiment %s of %s (%s, %s): %s %s",
                self.record.id,
                self.record.model,
                self.record.a.name,
                self.record.b.name,
                state.stage,
                f"({state.verdict}: {state.reason})" if state.verdict else "",
            )
        await self._save(self.record.at(state))


class ExperimentService(StagedService[ExperimentRecord, ExperimentRun]):
    make_run = ExperimentRun

    def __init__(
        self,
        pools: Sequence[PoolScaler],
        manager: ReplicaManager,
        store: RecordStore[ExperimentRecord],
        announce: Callable[[], Awaitable[None]],
        is_released: Callable[[str], bool],
        *,
        interval_s: float,
    ) -> None:
        """`is_released` says whether a release of a model is active."""
        super().__init__(pools, manager, store, announce, interval_s)
        self._is_released = is_released

    async def start(self, order: ExperimentOrder) -> ExperimentView:
        """Begin an experiment. Raises InvalidRequest, ModelNotFound, or Conflict while another change runs."""
        model = self._model(order.model)
        if self.is_active(model) or self._is_released(model):
            raise Conflict(
                f"An experiment or a release of {model!r} is still running.",
                hint="See `penstock experiment status` and `penstock release status`.",
            )
        record = self._record(model, order)
        logger.info("experiment %s of %s begins: %s, %s", record.id, model, order.a, order.b)
        return (await self._begin(record)).view()

    async def stop(self, model: str | None) -> ExperimentView:
        run = self._runs.get(self._model(model))
        if run is None:
            raise NotFound("There is no experiment.", hint="Begin one with `penstock experiment start A B`.")
        await run.stop()
        return run.view()

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

    def _record(self, model: str, order: ExperimentOrder) -> ExperimentRecord:
        if order.a == order.b:
            raise InvalidRequest(f"Both sets are {order.a!r}.", param="b", hint="Compare two different sets.")
        try:
            config = msgspec.convert(order.config, ExperimentConfig)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"The experiment is wrong: {error}.", param="config") from None
        pools = self._of(model)
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
