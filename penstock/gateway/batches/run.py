"""One batch on its way from its first line to its output files.

A run can be stopped at any moment and begun again by another process: recorded lines are not run again, all others
are. Lines run in any order; a result is recorded before anything counts it.

A line that meets a rate limit or an engine that is busy goes back to the feeder, and the whole batch pauses. So a
batch never has more tasks than slots, however many lines it has and however long it must wait.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import msgspec

from penstock.core.errors import (
    EngineUnavailable,
    InvalidRequest,
    LimitsUnavailable,
    Overloaded,
    PenstockError,
    RateLimited,
    RequestTooLarge,
    StoreUnavailable,
)
from penstock.gateway.batches.batch import (
    Batch,
    BatchDialect,
    BatchLine,
    BatchStatus,
    Counts,
    Ending,
    LineAnswer,
    LineError,
    LineResult,
    Outcome,
    OutputWriter,
    lines_of,
    validate,
)
from penstock.gateway.batches.store import BatchStore, ResultWriter
from penstock.gateway.blobs.blobs import Blobs
from penstock.gateway.files import BATCH_RESULTS, StoredFile
from penstock.gateway.metrics.table import Figures
from penstock.gateway.turns import FairSlots

_COUNTED: tuple[Outcome, ...] = ("succeeded", "errored")


class BatchMetrics:
    """Counters of this process: the lines that it recorded, and the batches that it runs."""

    def __init__(self, num_running: Callable[[], int]) -> None:
        self._num_running = num_running
        self.lines: dict[Outcome, int] = dict.fromkeys(_COUNTED, 0)
        self.retries = 0

    def figures(self) -> Figures:
        return {
            "batch_lines": self.lines,
            "batch_line_retries": self.retries,
            "batches_running": self._num_running(),
        }


logger = logging.getLogger(__name__)

_LINES_AT_ONCE = 128  # that are read from a file, unless they are large
_BYTES_AT_ONCE = 1 << 20
_KEEP_RESULTS_S = 29 * 86_400.0  # of batches whose API has no files; as long as Anthropic keeps them
_MIN_WAIT_S, _MAX_WAIT_S = 0.5, 30.0


class ResultBytes:
    """The bytes of the results of running batches, by workspace. A batch runs for a day: its results alone could fill
    the disk before they become files that count in the workspace's quota."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes: Counter[str] = Counter()

    def add(self, workspace_id: str, num_bytes: int) -> None:
        """Add bytes, or take those of a batch that runs no more."""
        self._num_bytes[workspace_id] += num_bytes
        if self._num_bytes[workspace_id] <= 0:
            del self._num_bytes[workspace_id]

    def check(self, workspace_id: str) -> None:
        """Raises RequestTooLarge when the workspace's running batches may have no more results."""
        if self._num_bytes[workspace_id] >= self._max_bytes:
            raise RequestTooLarge(
                f"The results of the workspace's running batches take the {self._max_bytes} bytes that its files may "
                "take.",
                hint="Put fewer lines into a batch, or ask for less in each line.",
            )


class RunContext(msgspec.Struct, frozen=True, kw_only=True):
    """The objects that all runs of one runner share."""

    store: BatchStore
    results: ResultWriter
    blobs: Blobs
    slots: FairSlots  # one per line in flight
    passes: FairSlots  # through whole files, each of which keeps a thread busy
    result_bytes: ResultBytes
    metrics: BatchMetrics
    holder: str
    wall_clock: Callable[[], float]


class BatchRun:
    """The run of one batch. Call `run` once; `stop` or `pause` at any moment."""

    def __init__(self, batch: Batch, dialect: BatchDialect, context: RunContext) -> None:
        self.batch = batch
        self._dialect = dialect
        self._context = context
        self._ending: Ending | None = None
        self._is_paused = False
        self._feeding: asyncio.Task[None] | None = None
        self._in_flight: set[asyncio.Task[None]] = set()
        # Lines to try again, with the number of the attempt.
        self._again: deque[tuple[BatchLine, int]] = deque()
        self._backoff = Backoff()
        self._stopping = asyncio.Event()
        self._failure: BaseException | None = None
        self._num_result_bytes = 0  # that this run has added to those of its workspace

    async def run(self) -> None:
        try:
            # The runner's copy may be older than the end of this batch's last run.
            self.batch = await self._context.store.current(self._context.holder, self.batch.id)
            if self.batch.status is BatchStatus.VALIDATING:
                await self._validate()
            if self.batch.is_active and self.batch.status is not BatchStatus.FINALIZING:
                await self._run_lines()
            if self.batch.is_active and not self._is_paused:
                await self._finish()
        except FileNotFoundError:
            if await asyncio.to_thread(self._context.blobs.exists, self.batch.input_id):
                raise
            await self._give_up(
                LineError("input_gone", "The lines of the batch are gone from the server's files.")
            )
        except InvalidRequest as error:  # which no later run would read in another way
            await self._give_up(LineError("invalid_line", error.message, None, error.param))
        finally:
            self._stop_feeding()
            for task in self._in_flight:
                task.cancel()
            self._add_result_bytes(-self._num_result_bytes)

    def _add_result_bytes(self, num_bytes: int) -> None:
        self._num_result_bytes += num_bytes
        self._context.result_bytes.add(self.batch.workspace_id, num_bytes)

    @property
    def is_ending(self) -> bool:
        return self._ending is not None

    def stop(self, ending: Ending) -> None:
        """Start no more lines. Those in flight may finish, unless their time is up."""
        self._ending = self._ending or ending
        self._stop_feeding()
        if ending == "expired":
            for task in self._in_flight:
                task.cancel()

    def pause(self) -> None:
        """Start no more lines, and leave the batch as it is once those in flight are recorded."""
        self._is_paused = True
        self._stop_feeding()

    def _stop_feeding(self) -> None:
        self._stopping.set()
        if self._feeding is not None:
            self._feeding.cancel()

    async def _validate(self) -> None:
        context = self._context
        async with context.passes.slot(self.batch.workspace_id):
            num_lines, errors = await asyncio.to_thread(validate, self.batch, context.blobs, self._dialect)
        if errors:
            await self._fail(errors)
            return
        self.batch = await context.store.enter(
            context.holder, self.batch.id, BatchStatus.IN_PROGRESS, counts=Counts(lines=num_lines)
        )

    async def _fail(self, errors: Sequence[LineError]) -> None:
        details = msgspec.structs.replace(self.batch.details, errors=list(errors))
        self.batch = await self._context.store.enter(
            self._context.holder, self.batch.id, BatchStatus.FAILED, details=details
        )
        if not self.batch.is_active:
            await asyncio.to_thread(self._context.blobs.remove, self.batch.input_id)

    async def _give_up(self, error: LineError) -> None:
        """End a batch whose lines are gone or cannot be read, so that there is nothing to run or to write."""
        context = self._context
        await self._fail([error])
        if self.batch.is_active:  # a cancellation stays a cancellation
            await context.store.finish(
                context.holder, self.batch, BatchStatus.CANCELLED, self.batch.counts, {}
            )

    async def _run_lines(self) -> None:
        if self.batch.ending is None and not self._stopping.is_set():
            self._feeding = asyncio.create_task(self._feed())
            await asyncio.wait((self._feeding,))
            if not self._feeding.cancelled() and (error := self._feeding.exception()) is not None:
                raise error
        while self._in_flight:
            await asyncio.wait(tuple(self._in_flight))
        if self._failure is not None:
            raise self._failure

    async def _feed(self) -> None:
        recorded = await self._context.store.recorded_lines(self.batch.id)
        if recorded:
            self._add_result_bytes(await self._context.store.recorded_bytes(self.batch.id))
        pending = self._pending_lines(recorded)
        slots, workspace_id = self._context.slots, self.batch.workspace_id
        while (upcoming := await self._next_line(pending)) is not None:
            await self._acquire_slot()
            task = asyncio.create_task(self._run_line(*upcoming))
            self._in_flight.add(task)
            # In this order: a free slot means that the line's outcome is known.
            task.add_done_callback(self._on_line_done)
            task.add_done_callback(lambda _: slots.release(workspace_id))

    async def _next_line(self, pending: AsyncIterator[BatchLine]) -> tuple[BatchLine, int] | None:
        """Return the next line to run and how often it was tried, or None when every line is recorded."""
        while True:
            if self._again:
                return self._again.popleft()
            line = await anext(pending, None)
            if line is not None:
                return line, 0
            if self._again:  # refused while the file was read
                continue
            if not self._in_flight:
                return None
            await asyncio.wait(tuple(self._in_flight), return_when=asyncio.FIRST_COMPLETED)

    async def _acquire_slot(self) -> None:
        """Returns with a slot at a moment when the batch need not pause. A pausing batch holds no slot."""
        slots, workspace_id = self._context.slots, self.batch.workspace_id
        while True:
            await self._backoff.over()
            await slots.acquire(workspace_id)
            if not self._backoff.is_on():
                return
            slots.release(workspace_id)

    async def _pending_lines(self, recorded: set[int]) -> AsyncIterator[BatchLine]:
        lines = lines_of(self.batch, self._context.blobs, self._dialect)
        pending = (line for line in lines if line.number not in recorded)
        while chunk := await asyncio.to_thread(_next_lines, pending):
            for line in chunk:
                yield line

    def _on_line_done(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._stop_feeding()

    async def _run_line(self, line: BatchLine, attempt: int) -> None:
        try:
            await self._answer_and_record(line, attempt)
        except _TryAgain as later:
            self._context.metrics.retries += 1
            self._again.append((line, attempt + 1))
            self._backoff.begin(later.wait_s)
        else:
            self._backoff.reset()

    async def _answer_and_record(self, line: BatchLine, attempt: int) -> None:
        # The id is the same after a crash, so that the ledger counts a line once. An attempt that failed in this
        # process is a request of its own.
        request_id = f"{self.batch.id}-{line.number}" + (f"-{attempt}" if attempt else "")
        try:
            self._context.result_bytes.check(self.batch.workspace_id)
            answer = await self._dialect.answer(self.batch, line, request_id)
        except PenstockError as error:
            if _may_pass(error):
                raise _TryAgain(error.retry_after_s or 0.0) from error
            answer = self._dialect.refusal(error, request_id)
        except Exception:
            logger.exception("line %d of batch %s failed", line.number, self.batch.id)
            unforeseen = PenstockError("The server met an error that it did not foresee.")
            answer = self._dialect.refusal(unforeseen, request_id)
        result = _result(line, answer, request_id)
        await self._context.results.record(self.batch.id, result)
        self._add_result_bytes(len(result.body))
        self._context.metrics.lines[result.outcome] += 1

    async def _finish(self) -> None:
        context = self._context
        await context.results.settle()  # a line that was cut off may have been on its way into it
        if self.batch.ending is None and self._ending is not None:
            self.batch = await context.store.mark_ending(context.holder, self.batch.id, self._ending)
        self.batch = await context.store.enter(context.holder, self.batch.id, BatchStatus.FINALIZING)
        if not self.batch.is_active:
            return
        counts = Counts()
        writer = OutputWriter(self.batch, context.blobs, self._dialect)
        if self.batch.counts.lines:  # or else it was stopped before it was found to be valid
            async with context.passes.slot(self.batch.workspace_id):
                counts = await asyncio.to_thread(writer.write, context.store.read_results)
        await context.store.finish(
            context.holder,
            self.batch,
            _final_status(self.batch),
            counts,
            self._listed_files(writer),
            self._hidden_files(writer),
        )
        await asyncio.to_thread(context.blobs.remove, self.batch.input_id)
        logger.info("batch %s is over: %s", self.batch.id, counts)

    def _listed_files(self, writer: OutputWriter) -> dict[str, StoredFile]:
        if not self._dialect.lists_output_files:
            return {}
        now = self._context.wall_clock()
        keep_s = self.batch.details.output_expires_after_s
        return {
            f"{part}_file_id": StoredFile(
                id=writer.file_id(part),
                workspace_id=self.batch.workspace_id,
                filename=f"{self.batch.id}_{part}.jsonl",
                purpose="batch_output",
                num_bytes=num_bytes,
                created_at=now,
                expires_at=None if keep_s is None else now + keep_s,
            )
            for part, num_bytes in writer.num_bytes.items()
        }

    def _hidden_files(self, writer: OutputWriter) -> list[StoredFile]:
        """Return the results that clients read as a part of the batch."""
        if self._dialect.lists_output_files:
            return []
        now = self._context.wall_clock()
        return [
            StoredFile(
                id=writer.file_id(part),
                workspace_id=self.batch.workspace_id,
                filename="",
                purpose=BATCH_RESULTS,
                num_bytes=num_bytes,
                created_at=now,
                expires_at=now + _KEEP_RESULTS_S,
            )
            for part, num_bytes in writer.num_bytes.items()
        ]


def _next_lines(lines: Iterator[BatchLine]) -> list[BatchLine]:
    """Return the next lines, which are few if they are large."""
    chunk: list[BatchLine] = []
    num_bytes = 0
    for line in itertools.islice(lines, _LINES_AT_ONCE):
        chunk.append(line)
        num_bytes += len(line.body)
        if num_bytes >= _BYTES_AT_ONCE:
            break
    return chunk


class Backoff:
    """The pause of one batch, shared by all its lines. Pauses that follow each other without a success between them
    double."""

    def __init__(self) -> None:
        self._wait_s = 0.0
        self._ends_at = 0.0  # on the event loop's clock

    def is_on(self) -> bool:
        return asyncio.get_running_loop().time() < self._ends_at

    async def over(self) -> None:
        loop = asyncio.get_running_loop()
        while (left_s := self._ends_at - loop.time()) > 0:
            await asyncio.sleep(left_s)

    def begin(self, at_least_s: float) -> None:
        """Begin a pause. Refusals during a pause belong to the same pause, which counts once."""
        if not self.is_on():
            self._wait_s = min(max(2 * self._wait_s, _MIN_WAIT_S), _MAX_WAIT_S)
        now = asyncio.get_running_loop().time()
        self._ends_at = max(self._ends_at, now + max(at_least_s, self._wait_s))

    def reset(self) -> None:
        self._wait_s = 0.0


class _TryAgain(Exception):
    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self.wait_s = wait_s


def _may_pass(error: PenstockError) -> bool:
    """Return whether an error may pass with time, rather than come from the line itself."""
    if isinstance(error, RateLimited):
        return error.waiting_helps
    return isinstance(error, Overloaded | EngineUnavailable | StoreUnavailable | LimitsUnavailable)


def _result(line: BatchLine, answer: LineAnswer, request_id: str) -> LineResult:
    outcome: Outcome = "succeeded" if answer.status_code < 400 else "errored"
    return LineResult(line.number, line.custom_id, outcome, request_id, answer.status_code, answer.body)


def _final_status(batch: Batch) -> BatchStatus:
    match batch.ending:
        case "canceled":
            return BatchStatus.CANCELLED
        case "expired":
            return BatchStatus.EXPIRED
    return BatchStatus.COMPLETED
