"""Carries out the stages of a release or an experiment, one after the other, until it is over; also after a restart.
Starts and removes the replicas that they need."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Protocol, TypeVar

from penstock.cluster.replica import ReplicaManager, ReplicaSpec
from penstock.cluster.scaling import PoolScaler
from penstock.core.errors import PenstockError
from penstock.router import ReplicaState

logger = logging.getLogger(__name__)


class StagedRun(ABC):
    """A task that carries out one stage after the other. A stage that fails is tried again."""

    kind: ClassVar[str]  # for the log: "release"

    def __init__(self, run_id: str, announce: Callable[[], Awaitable[None]], interval_s: float) -> None:
        self._run_id = run_id
        self._announce = announce  # returns when every gateway knows the current state
        self._interval_s = interval_s
        self._driver: asyncio.Task[None] | None = None

    @property
    @abstractmethod
    def is_over(self) -> bool: ...

    @abstractmethod
    def present_step(self) -> Awaitable[None]:
        """Return the work of the present stage."""

    @abstractmethod
    def hold_pools(self, is_held: bool) -> None:
        """Keep the autoscaler away from the replicas, or let it continue."""

    def resume(self, stage: str) -> None:
        """Begin a run of an earlier process."""
        logger.info("continuing with %s %s, which is %s", self.kind, self._run_id, stage)
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
                logger.error("the %s %s tries again: %s", self.kind, self._run_id, error.message)
                await asyncio.sleep(self._interval_s)
            except Exception:
                logger.exception("the %s %s stumbled; it tries again", self.kind, self._run_id)
                await asyncio.sleep(self._interval_s)
        self.hold_pools(False)
        await self._announce()


class _State(Protocol):
    @property
    def is_over(self) -> bool: ...

    @property
    def stage(self) -> str: ...


class _Record(Protocol):
    """The stored record of a release or an experiment."""

    @property
    def model(self) -> str: ...

    @property
    def base_revision(self) -> str: ...

    @property
    def state(self) -> _State: ...


RecordT = TypeVar("RecordT", bound=_Record)
RunT = TypeVar("RunT", bound=StagedRun)


async def resumed_runs(
    records: Iterable[RecordT],
    base_revisions: Mapping[str, str],
    abandoned: Callable[[RecordT], Awaitable[RecordT]],
    make_run: Callable[[RecordT], RunT],
) -> dict[str, RunT]:
    """Return the latest run of each model, after a restart, and continue those that are not over. `base_revisions`:
    the revision of the server's settings, by model. A run under other settings is abandoned."""
    latest: dict[str, RecordT] = {}
    for record in records:
        if record.model not in base_revisions:
            continue
        if not record.state.is_over and record.base_revision != base_revisions[record.model]:
            record = await abandoned(record)
        latest[record.model] = record
    runs = {model: make_run(record) for model, record in latest.items()}
    for model, run in runs.items():
        if not run.is_over:
            run.resume(latest[model].state.stage)
    return runs


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
