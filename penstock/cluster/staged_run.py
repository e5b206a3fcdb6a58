"""What releases and experiments have in common: a record that is stored at every change of state, a task that carries
out one stage after the other until the run is over, also after a restart, and one such run for each model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from penstock.cluster.replica import ReplicaManager, ReplicaSpec
from penstock.cluster.scaling import PoolScaler, served_model
from penstock.cluster.staged_records import RecordStore, RecordT
from penstock.core.errors import PenstockError, Superseded
from penstock.router import ReplicaState

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
        """Say whether one of these revisions has had no ready replica in its pool for `LOST_S`."""
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
