"""Starts the releases of a server, passes orders of operators and reports of gateways to the right release, and
continues releases after a restart.

Each model has one release at a time. Every change of state is stored before it is acted upon, so that a restarted
server continues where it was and gathers the evidence of that stage again.

`ReleaseOwner` lets one of several servers that share a database carry out its releases: the server that holds a
lease. A server asks for the lease while a release needs an owner, and renews it while its own release runs. When the
owner dies, another server with the same settings continues with the release after the lease has ended. While the
database is away, the owner continues, because a bad candidate must not stay in service. If another server has taken
over the releases meanwhile, the store refuses the writes of the earlier owner, and the earlier owner gives up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from math import ceil

import msgspec

from penstock.cluster.control_messages import ActiveRelease, Report
from penstock.cluster.leadership import LEADER_LEASE_S, RENEW_SHARE, Leadership
from penstock.cluster.registry import RegistryError
from penstock.cluster.replica import ReplicaManager, ReplicaSpec
from penstock.cluster.scaling import PoolScaler, check_one_revision
from penstock.cluster.staged_records import (
    RecordStore,
    ReleaseRecord,
    StagedRun,
    StagedService,
    changed,
    start_missing,
)
from penstock.control.gates import EvidenceCollector
from penstock.control.release import ReleaseConfig, ReleaseEvent, Releases, ReleaseState, Stage
from penstock.core.cluster_view import GateView, ReleaseOrder, ReleaseView
from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    PenstockError,
    StoreUnavailable,
    Superseded,
)

LOOK_INTERVAL_S = LEADER_LEASE_S * RENEW_SHARE


class ReleaseOwner:
    """Used from one event loop. Call `begin` first, `keep_looking` in the background, and `close` at the end."""

    def __init__(
        self,
        leadership: Leadership,
        releases: ReleaseService,
        store: RecordStore[ReleaseRecord],
        base_revisions: Mapping[str, str],
    ) -> None:
        self._leadership = leadership
        self._releases = releases
        self._store = store
        self._base_revisions = base_revisions
        # Epoch of the lease; None while this server does not own the releases.
        self._epoch: int | None = None
        self._num_starting = 0

    async def begin(self) -> None:
        """Show the releases that are over, and continue with an unfinished one if no other server does."""
        over = [record for record in await self._store.load() if record.state.is_over]
        await self._releases.resume(over, dict(self._base_revisions))
        await self._look_quietly()

    async def keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await self._look_quietly()

    @contextlib.asynccontextmanager
    async def claimed(self) -> AsyncIterator[None]:
        """Own the releases while one is started. Raises Conflict while another server owns them."""
        try:
            await self._leadership.try_once()
            if self._leadership.epoch is None:
                # A new database makes its tables first, which may take longer than the lease.
                await self._leadership.try_once()
        except RegistryError as error:
            raise StoreUnavailable(f"The database does not answer: {error}.", retry_after_s=1.0) from error
        if (epoch := self._leadership.epoch) is None:
            raise Conflict(
                "Another server on this database carries out a release now, or has ended just before.",
                hint=f"Ask that server, or wait {LEADER_LEASE_S:.0f} seconds.",
            )
        await self._follow(epoch)
        self._num_starting += 1
        try:
            yield
        finally:
            self._num_starting -= 1

    async def look(self) -> None:
        """Take, renew or give up the lease, as the releases need it. Raises RegistryError or another error of the
        database."""
        if self._epoch is None and not await self._is_needed():
            return
        await self._leadership.try_once()
        epoch = self._leadership.epoch
        await self._follow(epoch)
        is_idle = not self._num_starting and not any(map(self._releases.is_active, self._base_revisions))
        if epoch is not None and is_idle:
            self._epoch = None
            await self._leadership.give_up(epoch)

    async def close(self) -> None:
        if (epoch := self._leadership.epoch) is not None:
            await self._leadership.give_up(epoch)

    async def _follow(self, epoch: int | None) -> None:
        """Take over the releases, continue with them, or give them up. Every owner has another epoch, one after the
        other: a gap means that another server was the owner since."""
        if self._epoch is not None and epoch not in (self._epoch, self._epoch + 1):
            logger.warning("another server has taken over the release that this server carried out")
            self._epoch = None
            await self._releases.give_up()
        is_new = self._epoch is None and epoch is not None
        self._epoch = epoch
        if is_new:
            await self._releases.resume(await self._store.load(), dict(self._base_revisions))

    async def _is_needed(self) -> bool:
        records = await self._store.load()
        return any(not record.state.is_over and record.model in self._base_revisions for record in records)

    async def _look_quietly(self) -> None:
        with contextlib.suppress(RegistryError, PenstockError):  # the database has logged why
            await self.look()


logger = logging.getLogger(__name__)


_GATED = (Stage.SHADOW, Stage.CANARY)


class ReleaseRun(StagedRun[ReleaseRecord]):
    """One active release: starts the candidate's replicas, collects evidence from gateways, and removes the revision
    that lost. `control/release` decides whether to continue; `ReleaseService` whether a release may begin."""

    kind = "release"

    def __init__(
        self,
        record: ReleaseRecord,
        pools: Sequence[PoolScaler],
        manager: ReplicaManager,
        store: RecordStore[ReleaseRecord],
        announce: Callable[[], Awaitable[None]],
        interval_s: float,
    ) -> None:
        super().__init__(record, pools, manager, store, announce, interval_s)
        self.rules = Releases(record.config)
        self.collector = EvidenceCollector(record.state.stable, record.state.candidate, record.config.gates)
        self.collector.begin(record.state.stage_number)

    @property
    def state(self) -> ReleaseState:
        return self.record.state

    def hold_pools(self, is_held: bool) -> None:
        for pool in self._pools:
            pool.is_releasing = is_held

    async def order(self, happening: ReleaseEvent) -> None:
        """Carry out an order of an operator. Raises Conflict where the order does not apply; else cancels the present
        step."""
        after = self.rules.happened(self.state, happening, time.time(), "by an operator")
        await self.close()
        await self._enter(after)
        self.begin()

    def view(self) -> ReleaseView:
        state, evidence = self.state, self.collector.evidence()
        split = self.rules.split(state)
        reports = self.rules.reports(state, evidence) if state.stage in _GATED else ()
        return ReleaseView(
            id=self.record.id,
            model=self.record.model,
            stable=state.stable,
            candidate=state.candidate,
            stage=state.stage,
            step=state.step,
            candidate_share=split.candidate_share,
            mirrored_share=split.mirrored_share,
            reason=state.reason,
            started_at=self.record.created_at,
            since=state.since_s,
            num_stable_requests=evidence.num_stable_requests,
            num_candidate_requests=evidence.num_candidate_requests,
            num_compared=evidence.num_compared,
            num_diverged=evidence.num_diverged,
            gates=tuple(GateView(report.gate, report.result, report.sentence) for report in reports),
            is_over=state.is_over,
        )

    def present_step(self) -> Awaitable[None]:
        steps: dict[Stage, Callable[[], Awaitable[None]]] = {
            Stage.WARMING: self._warm_up,
            Stage.SHADOW: self._watch,
            Stage.CANARY: self._watch,
            Stage.LAME_DUCK: self._retire_stable,
            Stage.ROLLING_BACK: self._retire_candidate,
        }
        return steps[self.state.stage]()

    async def _warm_up(self) -> None:
        # Gateways must know of the candidate before its replicas exist, so that no replica gets a wrong request.
        await self._announce()
        if not await self._candidate_serves(self.state):
            return
        if self._tokenizers(self.record.stable) <= self._tokenizers(self.record.candidate):
            await self._happen(ReleaseEvent.WARMED_UP)
        else:
            # Gateways tokenize a request before a revision is chosen.
            reason = "its tokenizer is another one; serve it under a name of its own"
            await self._happen(ReleaseEvent.CANDIDATE_LOST, reason)

    async def _watch(self) -> None:
        """Carry out one stage, or one step of it."""
        state, revisions = self.state, [spec.revision for spec in self.record.candidate]
        await self._announce()
        if not await self._candidate_serves(state):
            return
        while self.state is state:
            await asyncio.sleep(self._interval_s)
            if self._is_lost(zip(self._pools, revisions, strict=True)):
                await self._happen(ReleaseEvent.CANDIDATE_LOST, "no replica of it is ready")
                return
            after = self.rules.judged(state, self.collector.evidence(), time.time())
            if after is state:
                continue
            # The candidate's share grows only after its replicas are ready.
            if after.stage is not Stage.CANARY or await self._candidate_serves(after):
                await self._enter(after)
            return

    async def _retire_stable(self) -> None:
        counts = self._num_stable()
        try:
            await self._start_missing(self.record.candidate, counts)
        except PenstockError as error:
            logger.warning("the old replicas must make room for the new ones: %s", error.message)
        for pool, spec in zip(self._pools, self.record.candidate, strict=True):
            pool.spec = spec
        await self._announce()
        await self._remove(self.record.stable)
        await self._start_missing(self.record.candidate, counts)
        await self._happen(ReleaseEvent.DRAINED, self.state.reason)

    async def _retire_candidate(self) -> None:
        # The replicas may have left already.
        await self._start_missing(self.record.stable, [1] * len(self._pools))
        for pool, spec in zip(self._pools, self.record.stable, strict=True):
            pool.spec = spec
        await self._announce()
        await self._remove(self.record.candidate)
        await self._happen(ReleaseEvent.DRAINED, self.state.reason)

    async def _candidate_serves(self, state: ReleaseState) -> bool:
        """Start the replicas that the candidate needs in a stage. If that fails, the candidate has lost."""
        present = self._num_stable()
        share = self.rules.split(state).candidate_share
        wanted = [self.rules.num_replicas(state, number) for number in present]
        fewest = [max(1, ceil(share * number)) for number in present]
        for counts in (wanted, fewest):
            try:
                await self._start_missing(self.record.candidate, counts)
                return True
            except (StoreUnavailable, Superseded):
                raise  # says nothing about the candidate, which could not be started
            except PenstockError as error:
                if counts == fewest:
                    reason = f"it cannot be started: {error.message}"
                    await self._happen(ReleaseEvent.CANDIDATE_LOST, reason)
                    return False
                logger.warning(
                    "%s replicas of the candidate instead of %s, so each has more load than a stable one: %s",
                    sum(fewest),
                    sum(wanted),
                    error.message,
                )
        return False

    async def _start_missing(self, specs: Sequence[ReplicaSpec], counts: Sequence[int]) -> None:
        await start_missing(self._manager, self._pools, specs, counts)

    async def _remove(self, specs: Sequence[ReplicaSpec]) -> None:
        for pool, spec in zip(self._pools, specs, strict=True):
            leaving = [member.id for member in pool.members() if member.replica.revision == spec.revision]
            await pool.remove(leaving)

    def _tokenizers(self, specs: Sequence[ReplicaSpec]) -> set[bytes]:
        """Return the tokenizers of serving replicas. There may be none, if all replicas have left for lack of
        requests."""
        members = [
            member
            for pool, spec in zip(self._pools, specs, strict=True)
            for member in pool.serving(spec.revision)
        ]
        descriptions = [self._manager.ready(member.id) for member in members]
        return {ready.model.tokenizer_json for ready in descriptions if ready is not None}

    def _num_stable(self) -> list[int]:
        """Return how many stable replicas each pool has, or had when the release began if that is more."""
        return [
            max(at_first, len(pool.serving(spec.revision)))
            for pool, spec, at_first in zip(
                self._pools, self.record.stable, self.record.num_replicas, strict=True
            )
        ]

    async def _happen(self, happening: ReleaseEvent, reason: str = "") -> None:
        await self._enter(self.rules.happened(self.state, happening, time.time(), reason))

    async def _enter(self, state: ReleaseState) -> None:
        logger.info(
            "release %s of %s (%s → %s): %s, %s",
            self.record.id,
            self.record.model,
            state.stable,
            state.candidate,
            state.stage.replace("_", " "),
            state.reason.replace("_", " "),
        )
        await self._save(self.record.at(state))
        self.collector.begin(state.stage_number)


Resolve = Callable[[str], Awaitable[str]]  # from an operator's name of weights to their path


class ReleaseService(StagedService[ReleaseRecord, ReleaseRun]):
    make_run = ReleaseRun

    def __init__(
        self,
        pools: Sequence[PoolScaler],
        manager: ReplicaManager,
        store: RecordStore[ReleaseRecord],
        resolve_weights: Resolve,
        announce: Callable[[], Awaitable[None]],
        *,
        interval_s: float,
    ) -> None:
        super().__init__(pools, manager, store, announce, interval_s)
        self._resolve_weights = resolve_weights
        # Returns whether an experiment of a model is active.
        self.is_tested: Callable[[str], bool] = lambda model: False

    async def start(self, order: ReleaseOrder) -> ReleaseView:
        """Begin a release. Raises InvalidRequest, ModelNotFound, or Conflict while another runs."""
        model = self._model(order.model)
        run = self._runs.get(model)
        if run is not None and not run.is_over:
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
        logger.info("release %s of %s begins: %s → %s", record.id, model, stable, candidate[0].revision)
        return (await self._begin(record)).view()

    async def promote(self, model: str | None) -> ReleaseView:
        return await self._order(model, ReleaseEvent.OPERATOR_PROMOTES)

    async def roll_back(self, model: str | None) -> ReleaseView:
        return await self._order(model, ReleaseEvent.OPERATOR_ROLLS_BACK)

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

    async def _order(self, model: str | None, happening: ReleaseEvent) -> ReleaseView:
        run = self._runs.get(self._model(model))
        if run is None:
            raise NotFound("There is no release.", hint="Begin one with `penstock release start`.")
        await run.order(happening)
        return run.view()
