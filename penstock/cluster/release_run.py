"""Runs one active release: starts the candidate's replicas, collects evidence from gateways, and removes the revision
that lost. `control/release` decides whether to continue; `releases` decides whether a release may begin."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from math import ceil

from penstock.cluster.release_record import ReleaseRecord, ReleaseStore
from penstock.cluster.replica import ReplicaManager, ReplicaSpec
from penstock.cluster.replica_counts import start_missing
from penstock.cluster.scaling import PoolScaler
from penstock.cluster.staged_run import StagedRun
from penstock.control.evidence import EvidenceCollector
from penstock.control.release import Happening, Releases, ReleaseState, Stage
from penstock.core.cluster_view import GateView, ReleaseView
from penstock.core.errors import PenstockError, StoreUnavailable, Superseded
from penstock.router import ReplicaState

logger = logging.getLogger(__name__)

CANDIDATE_LOST_S = 30.0  # without a ready replica of the candidate
_GATED = (Stage.SHADOW, Stage.CANARY)


class ReleaseRun(StagedRun):
    """One active release."""

    kind = "release"

    def __init__(
        self,
        record: ReleaseRecord,
        pools: Sequence[PoolScaler],
        manager: ReplicaManager,
        store: ReleaseStore,
        announce: Callable[[], Awaitable[None]],
        interval_s: float,
    ) -> None:
        super().__init__(record.id, announce, interval_s)
        self.record = record
        self.rules = Releases(record.config)
        self.collector = EvidenceCollector(record.state.stable, record.state.candidate, record.config.gates)
        self.collector.begin(record.state.stage_number)
        self._pools = pools
        self._manager = manager
        self._store = store
        self._lost_since_s: float | None = None

    @property
    def state(self) -> ReleaseState:
        return self.record.state

    @property
    def is_over(self) -> bool:
        return self.state.is_over

    def hold_pools(self, is_held: bool) -> None:
        for pool in self._pools:
            pool.is_releasing = is_held

    async def order(self, happening: Happening) -> None:
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
            await self._happen(Happening.WARMED_UP)
        else:
            # Gateways tokenize a request before a revision is chosen.
            reason = "its tokenizer is another one; serve it under a name of its own"
            await self._happen(Happening.CANDIDATE_LOST, reason)

    async def _watch(self) -> None:
        """Carry out one stage, or one step of it."""
        state = self.state
        await self._announce()
        if not await self._candidate_serves(state):
            return
        while self.state is state:
            await asyncio.sleep(self._interval_s)
            if self._is_candidate_lost():
                await self._happen(Happening.CANDIDATE_LOST, "no replica of it is ready")
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
        await self._happen(Happening.DRAINED, self.state.reason)

    async def _retire_candidate(self) -> None:
        await self._start_missing(
            self.record.stable, [1] * len(self._pools)
        )  # the replicas may have left already
        for pool, spec in zip(self._pools, self.record.stable, strict=True):
            pool.spec = spec
        await self._announce()
        await self._remove(self.record.candidate)
        await self._happen(Happening.DRAINED, self.state.reason)

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
                raise  # says nothing about the candidate: nobody could be told to start it
            except PenstockError as error:
                if counts == fewest:
                    reason = f"it cannot be started: {error.message}"
                    await self._happen(Happening.CANDIDATE_LOST, reason)
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

    def _is_candidate_lost(self) -> bool:
        now = time.monotonic()
        has_ready = all(
            any(member.replica.state is ReplicaState.READY for member in pool.serving(spec.revision))
            for pool, spec in zip(self._pools, self.record.candidate, strict=True)
        )
        if has_ready:
            self._lost_since_s = None
        elif self._lost_since_s is None:
            self._lost_since_s = now
        return self._lost_since_s is not None and now - self._lost_since_s >= CANDIDATE_LOST_S

    async def _happen(self, happening: Happening, reason: str = "") -> None:
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
        record = self.record.at(state)
        try:
            await self._store.save(record)
        except Superseded:
            raise  # another control process decides now
        except PenstockError as error:
            # A database that is away must not keep a bad candidate in service.
            logger.error("the release's state could not be written down: %s", error.message)
        self.record = record
        self.collector.begin(state.stage_number)
