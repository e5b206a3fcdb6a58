"""Runs every batch of a database, in whichever process holds the lease.

The runner looks for new, cancelled and expired batches every few seconds, and at once when this process made a batch.
Batches of an archived workspace are cancelled.
The runner touches nothing while there is no database.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.figures import Count, Positive
from penstock.gateway.batches.batch import Batch, BatchDialect, BatchStatus, Ending
from penstock.gateway.batches.run import BatchMetrics, BatchRun, ResultBytes, RunContext
from penstock.gateway.batches.store import BatchStore, LeaseLost, ResultWriter, new_holder
from penstock.gateway.blobs.blobs import Blobs
from penstock.gateway.files import BATCH_INPUT, FilesConfig, FileStore, StoredFile
from penstock.gateway.store.database import Database
from penstock.gateway.turns import FairSlots

logger = logging.getLogger(__name__)

_WAIT_AFTER_BUG_S = 60.0
_INPUT_LEFT_FOR_S = 86_400.0  # after a batch must be over; what is left then belongs to no batch
MAX_RUNS_OF_WORKSPACE = 16  # at a time, and again as many that end early
MAX_PASSES = 2  # through the lines of whole batches at a time


class BatchesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_concurrent_lines: Count = 32
    poll_s: Positive = 2.0
    lease_s: Positive = 20.0  # another machine takes over this long after one is lost
    sweep_s: Positive = 60.0  # how often expired files are removed


class BatchRunner:
    """`start` it on the gateway's event loop; `stop` it before the gateway drains."""

    def __init__(
        self,
        store: BatchStore,
        files: FileStore,
        config: BatchesConfig | None = None,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._files = files
        self._dialects: dict[str, BatchDialect] = {}
        self._config = config or BatchesConfig()
        self._wall_clock = wall_clock
        self.metrics = BatchMetrics(lambda: len(self._runs))
        self._holder = new_holder()
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._woken = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._begin_at: dict[str, float] = {}  # of batches that met a bug
        self._has_lease = False
        self._is_stopping = False
        self._next_sweep_at = 0.0
        self._context = self._new_context()

    @property
    def num_running(self) -> int:
        return len(self._runs)

    def teach(self, kind: str, dialect: BatchDialect) -> None:
        """Give the runner the dialect of a kind of batches. Batches of unknown kinds stay as they are."""
        self._dialects[kind] = dialect

    def start(self) -> None:
        self._loop = asyncio.create_task(self._run_loop())

    def wake(self) -> None:
        """Look at the database now, because a batch was made or changed."""
        self._woken.set()

    def cancelled(self, batch_id: str) -> None:
        """Start no more lines of a batch that was marked as cancelled, from this moment on if it runs here."""
        if batch_id in self._runs:
            self._runs[batch_id][0].stop("canceled")
        self.wake()

    async def stop(self, timeout_s: float = 0.0) -> None:
        """Let lines in flight end within `timeout_s`, and leave the other lines to the next process."""
        self._is_stopping = True
        self._pause_runs()
        if self._loop is not None:
            self.wake()  # and not cancelled: it might just be taking the lease
            await asyncio.wait((self._loop,))
        self._pause_runs()  # those that its last look began
        tasks = [task for _, task in self._runs.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        await self._abandon_runs()
        if self._has_lease:
            self._has_lease = False
            await self._store.release_lease(self._holder)

    def _pause_runs(self) -> None:
        for run, _ in self._runs.values():
            run.pause()

    async def _run_loop(self) -> None:
        reason = ""  # for which batches wait, which is logged once
        while not self._is_stopping:
            try:
                if self._store.exists:
                    await self._look()
                reason = ""
            except LeaseLost:
                await self._abandon_runs()
            except PenstockError as error:
                if error.message != reason:
                    logger.warning("batches wait: %s", error.message)
                reason = error.message
            except Exception:
                logger.exception("batches wait after an error that was not foreseen")
            try:
                async with asyncio.timeout(self._config.poll_s):
                    await self._woken.wait()
            except TimeoutError:
                continue
            self._woken.clear()

    async def _look(self) -> None:
        self._has_lease = await self._store.take_lease(self._holder, self._config.lease_s)
        if not self._has_lease:
            await self._abandon_runs()
            return
        active = await self._store.active()
        abandoned = await self._store.abandoned() if active else frozenset()
        num_running = Counter((run.batch.workspace_id, run.is_ending) for run, _ in self._runs.values())
        for batch in active:
            begin_at = self._begin_at.get(batch.id, 0.0)
            if batch.kind not in self._dialects or not self._is_due(begin_at, _WAIT_AFTER_BUG_S):
                continue
            ending: Ending | None = None
            if batch.status is BatchStatus.CANCELLING or batch.id in abandoned:
                ending = "canceled"
            elif self._wall_clock() >= batch.expires_at:
                ending = "expired"
            if batch.id not in self._runs:
                kind = batch.workspace_id, ending is not None
                if num_running[kind] >= MAX_RUNS_OF_WORKSPACE:
                    continue
                num_running[kind] += 1
                self._begin(batch)
            if ending is not None:
                self._runs[batch.id][0].stop(ending)
        if self._is_due(self._next_sweep_at, self._config.sweep_s):
            self._next_sweep_at = self._wall_clock() + self._config.sweep_s
            await self._files.remove_expired()

    def _is_due(self, at: float, wait_s: float) -> bool:
        """Return whether a time has come that was at most `wait_s` ahead: a clock that was set back postpones nothing
        by more."""
        return not 0.0 < at - self._wall_clock() <= wait_s

    def _begin(self, batch: Batch) -> None:
        run = BatchRun(batch, self._dialects[batch.kind], self._context)
        task = asyncio.create_task(run.run())
        self._runs[batch.id] = (run, task)
        task.add_done_callback(lambda task: self._on_run_done(batch.id, task))

    def _on_run_done(self, batch_id: str, task: asyncio.Task[None]) -> None:
        self._runs.pop(batch_id, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is None or isinstance(error, LeaseLost):
            self.wake()  # another batch of the workspace may wait
        elif isinstance(error, PenstockError):
            logger.warning("batch %s waits: %s", batch_id, error.message)
        elif error is not None:
            # A later look begins it again, from what is recorded.
            self._begin_at[batch_id] = self._wall_clock() + _WAIT_AFTER_BUG_S
            logger.error("batch %s stopped on an error that was not foreseen", batch_id, exc_info=error)

    async def _abandon_runs(self) -> None:
        tasks = [task for _, task in self._runs.values()]
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        # The slots of abandoned lines are released late, so the next runs get new ones.
        self._context = self._new_context()

    def _new_context(self) -> RunContext:
        return RunContext(
            store=self._store,
            results=ResultWriter(self._store, self._holder),
            blobs=self._files.blobs,
            slots=FairSlots(self._config.max_concurrent_lines),
            passes=FairSlots(MAX_PASSES),
            result_bytes=ResultBytes(self._files.config.max_workspace_bytes),
            metrics=self.metrics,
            holder=self._holder,
            wall_clock=self._wall_clock,
        )


class StoredWork:
    """The files and batches of a server. Nothing is written before one of them is used. Gateways that share a
    database must share the place for bytes, too."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        *,
        files: FilesConfig | None = None,
        batches: BatchesConfig | None = None,
    ) -> None:
        self.files = FileStore(database, blobs, files)
        self.batches = BatchStore(database)
        self.runner = BatchRunner(self.batches, self.files, batches)

    async def add(self, batch: Batch, num_input_bytes: int = 0) -> None:
        """Run a batch whose lines are stored. The lines of a batch that cannot be recorded are removed.
        `num_input_bytes` are those that no file of the workspace has counted. Raises RequestTooLarge when the files
        of the workspace leave no room: the outputs of batches would take more and more."""
        lines = StoredFile(
            id=batch.input_id,
            workspace_id=batch.workspace_id,
            filename="",
            purpose=BATCH_INPUT,
            num_bytes=num_input_bytes,
            created_at=batch.created_at,
            expires_at=batch.expires_at + _INPUT_LEFT_FOR_S,
        )
        try:
            await self.files.hold(lines)
            await self.batches.create(batch)
        except Exception:
            await self.files.remove(batch.input_id)
            raise
        self.runner.wake()
