"""The usage ledger: every admitted request becomes one row, whatever happens to it or to this process.

`begin` and `settle` append a line to the journal (a few microseconds, no lock, no sync) and return. A background task
inserts the rows in batches, from memory or, after a failure, from the journal. Existing rows stay as they are, so
that a batch may be repeated. On start, and every so often, journals of processes that died are recovered.

When the journal cannot be written (a full disk, or a database that has been away until the journal is full), the
policy decides: `serve` keeps the row in memory and continues, `refuse` lets no new request begin. Both count it and
say so in the log. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

from sqlalchemy import Connection
from sqlalchemy.exc import DataError, IntegrityError

from penstock.core.errors import PenstockError, StoreUnavailable
from penstock.gateway.accounts import Claim, Ledger, Outcome
from penstock.gateway.ledger.journal import (
    BegunRequest,
    Journal,
    JournalEntry,
    OrphanedJournal,
    Position,
    UsageRow,
    begun_request,
    claim_orphans,
    decode_line,
    encode_line,
    interrupted_row,
    usage_row,
)
from penstock.gateway.ledger.prices import PICODOLLARS_PER_DOLLAR, PriceTable
from penstock.gateway.ledger.spend import LedgerSpendTracker, SpendReader
from penstock.gateway.ledger.usage_store import UsageQuery, UsageTotal, insert_rows, usage_totals
from penstock.gateway.metrics.table import Figures
from penstock.gateway.store.database import Database, QueryTurns

logger = logging.getLogger(__name__)


WINDOW_MINUTES = 60


@dataclass(slots=True)
class _Minute:
    number: int
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokensPerHour:
    input: float  # without what the KV cache already had
    output: float

    def dollars_per_million(self, dollars_per_hour: Decimal) -> float | None:
        """Return the cost of a million input and output tokens together; None while nothing runs, since an idle hour
        has no price per token."""
        total = self.input + self.output
        return float(dollars_per_hour) * 1e6 / total if total else None


class TokenMeter:
    """One model's tokens by minute, of the last hour. The reverse of `prices.AcceleratorCost`, which turns a
    measured speed into a price list: what tokens cost at the present speed and load. `clock` never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_at = clock()
        self._minutes: deque[_Minute] = deque(maxlen=WINDOW_MINUTES)

    def add(self, input_tokens: int, output_tokens: int) -> None:
        number = int(self._clock() // 60)
        if not self._minutes or self._minutes[-1].number != number:
            self._minutes.append(_Minute(number))
        minute = self._minutes[-1]
        minute.input_tokens += input_tokens
        minute.output_tokens += output_tokens

    def rate(self) -> TokensPerHour:
        """Tokens per hour. In the first hour the rate is estimated from the time so far, at least one minute."""
        now = self._clock()
        first = int(now // 60) - WINDOW_MINUTES + 1
        recent = [minute for minute in self._minutes if minute.number >= first]
        covered_s = min(WINDOW_MINUTES * 60.0, max(60.0, now - self._started_at))
        hours = covered_s / 3600
        return TokensPerHour(
            sum(minute.input_tokens for minute in recent) / hours,
            sum(minute.output_tokens for minute in recent) / hours,
        )


class LedgerMetrics:
    """Written by the ledger on the event loop, read by a scrape. `spending` knows the prices of the moment."""

    def __init__(self, journal: Journal, spending: LedgerSpendTracker, clock: Callable[[], float]) -> None:
        self._journal = journal
        self._spending = spending
        self._clock = clock
        self._meters: dict[str, TokenMeter] = {}
        self.rows: Counter[tuple[str, str]] = Counter()  # by model and status
        self.cost_picodollars: Counter[str] = Counter()  # by model
        self.journal_failures = 0
        self.flush_failures = 0
        self.recovered_rows = 0
        self.refused_rows = 0
        self.lost_rows = 0
        self.num_settled = 0
        self._num_written = 0  # of those
        self._written_until = clock()

    def count(self, row: UsageRow) -> None:
        self.num_settled += 1
        self.rows[row.model, row.status] += 1
        self.cost_picodollars[row.model] += row.cost_picodollars
        meter = self._meters.get(row.model)
        if meter is None:
            meter = self._meters[row.model] = TokenMeter(self._clock)
        meter.add(row.prompt_tokens - row.cached_tokens, row.completion_tokens)

    def note_written(self, num_settled: int, until: float) -> None:
        """The database has the first `num_settled` rows of this process: all that were settled before `until`."""
        self._num_written = num_settled
        self._written_until = until

    def figures(self) -> Figures:
        costs = self.cost_picodollars.items()
        num_unwritten = self.num_settled - self._num_written
        return {
            "usage_rows": self.rows,
            "usage_cost_dollars": {model: cost / PICODOLLARS_PER_DOLLAR for model, cost in costs},
            **self._speeds(),
            "usage_journal_failures": self.journal_failures,
            "usage_flush_failures": self.flush_failures,
            "usage_recovered_rows": self.recovered_rows,
            "usage_refused_rows": self.refused_rows,
            "usage_lost_rows": self.lost_rows,
            "usage_journal_bytes": self._journal.num_bytes,
            "usage_unwritten_rows": num_unwritten,
            "usage_lag_seconds": max(0.0, self._clock() - self._written_until) if num_unwritten else 0.0,
        }

    def _speeds(self) -> Figures:
        speeds: dict[tuple[str, ...], float] = {}
        prices: dict[str, float] = {}
        hours: dict[str, float] = {}
        for model, meter in self._meters.items():
            rate = meter.rate()
            speeds[model, "input"] = rate.input
            speeds[model, "output"] = rate.output
            dollars_per_hour = self._spending.prices.dollars_per_hour(model)
            if dollars_per_hour is None:
                continue
            hours[model] = float(dollars_per_hour)
            if dollars := rate.dollars_per_million(dollars_per_hour):
                prices[model] = dollars
        return {
            "tokens_per_hour": speeds,
            "accelerator_dollars_per_million_tokens": prices,
            "accelerator_dollars_per_hour": hours,
        }


WhenUnrecorded: TypeAlias = Literal["serve", "refuse"]

JOURNAL_FOLDER = "usage-journal"
FLUSH_INTERVAL_S = 1.0
RECOVERY_INTERVAL_S = 60.0
SPEND_INTERVAL_S = 10.0  # how late one gateway may learn what another's requests cost
MAX_ROWS_IN_MEMORY = 100_000
_BATCH_ROWS = 2_000


class UsageLedger(Ledger):
    """`begin` and `settle` belong to the event loop; `start` first, `close` last."""

    def __init__(
        self,
        journal: Journal,
        database: Database,
        spending: LedgerSpendTracker,
        *,
        when_unrecorded: WhenUnrecorded = "serve",
        sync_interval_s: float | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.metrics = LedgerMetrics(journal, spending, wall_clock)
        self.spending = spending
        self._journal = journal
        self._database = database
        self._refuses = when_unrecorded == "refuse"
        self._sync_interval_s = sync_interval_s
        self._wall_clock = wall_clock
        self._open: dict[str, tuple[BegunRequest, bytes]] = {}  # with its line, by request id
        self._unwritten: list[UsageRow] = []  # settled, but the journal would not take them
        # In the journal, and not in the database. None after a failure, or too many rows: the journal is read back.
        self._fresh: list[UsageRow] | None = []
        self._flushed_to = Position(1, 0)
        self._flushing = asyncio.Lock()
        self._queries = QueryTurns("this workspace's usage")
        self._spend_reader = SpendReader()
        self._read_spend_at = 0.0  # on the event loop's clock
        self._is_failing = False
        self._database_is_away = False
        self._tasks: list[asyncio.Task[None]] = []

    def set_prices(self, prices: PriceTable) -> None:
        """Use new prices for requests that settle from now on."""
        self.spending.prices = prices

    def begin(self, claim: Claim) -> None:
        started_at = self._wall_clock()
        begun = begun_request(claim, started_at)
        line = encode_line(begun)
        if not self._append(line) and self._refuses:
            raise StoreUnavailable(
                "The server cannot record usage at the moment, and serves nothing that it cannot record.",
                retry_after_s=5.0,
            )
        self._open[claim.request_id] = begun, line

    def settle(self, claim: Claim, outcome: Outcome) -> None:
        begun, _ = self._open.pop(claim.request_id, (None, b""))
        if begun is None:
            begun = begun_request(claim, self._wall_clock() - outcome.duration_s)
        cost = (
            0
            if outcome.is_cached
            else self.spending.prices.rates(claim.model, claim.tier).cost_of(outcome.usage)
        )
        row = usage_row(begun, outcome, cost)
        if not self._append(encode_line(row)):
            self._keep_in_memory(row)
        elif self._fresh is not None:
            self._fresh.append(row)
            if len(self._fresh) > MAX_ROWS_IN_MEMORY:
                self._fresh = None
        self.spending.add(row)
        self.metrics.count(row)

    async def start(self) -> None:
        """Recover what dead processes left and learn what was spent, then keep the database up to date."""
        try:
            await self.recover()
            await self.flush()
        except (StoreUnavailable, OSError) as error:
            if self._refuses:
                raise
            self._note_database_away(error)
        self._tasks = [
            asyncio.create_task(_repeat(self._flush_quietly, FLUSH_INTERVAL_S)),
            asyncio.create_task(_repeat(self._recover_quietly, RECOVERY_INTERVAL_S)),
        ]
        if self._sync_interval_s is not None:
            self._tasks.append(asyncio.create_task(_repeat(self._sync, self._sync_interval_s)))

    async def close(self) -> None:
        """Write everything. Rows that the database does not take stay in the journal, for the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._flush_quietly()
        is_written = self._flushed_to == self._journal.end and not self._open and not self._unwritten
        self._journal.close(delete=is_written)
        if self._unwritten:
            logger.error("%d usage rows were lost: neither disk nor database took them", len(self._unwritten))

    async def totals(self, query: UsageQuery) -> list[UsageTotal]:
        """Add up usage. The totals include every request that this process has settled, as long as the database takes
        rows. Raises RateLimited when too many queries of the workspace wait."""
        async with self._queries.turn(query.workspace_id):
            await self._flush_quietly()
            return await self._database.run(
                lambda connection: usage_totals(connection, query), reads_only=True
            )

    async def flush(self) -> None:
        """Put everything settled until now into the database, and now and then read back what everyone spent. Raises
        StoreUnavailable; then the rest is tried again next time."""
        async with self._flushing:
            end, unwritten = self._journal.end, self._unwritten[:]
            num_settled, began_at = self.metrics.num_settled, self._wall_clock()
            self.spending.begin_flush()
            await self._insert_settled(end)
            await self._insert(unwritten)
            del self._unwritten[: len(unwritten)]
            self.metrics.note_written(num_settled, began_at)
            if gone := self._journal.forget(self._flushed_to):
                await asyncio.to_thread(_delete, gone)
            now = asyncio.get_running_loop().time()
            if now >= self._read_spend_at:
                today = self.spending.today()
                spend = await self._database.run(
                    lambda connection: self._spend_reader.read(connection, today), reads_only=True
                )
                self.spending.end_flush(spend)
                self._read_spend_at = now + SPEND_INTERVAL_S

    async def _insert_settled(self, end: Position) -> None:
        """Insert the rows that are in the journal up to `end`, and not yet in the database."""
        fresh, self._fresh = self._fresh, []
        try:
            if fresh is not None:
                for start in range(0, len(fresh), _BATCH_ROWS):
                    await self._insert(fresh[start : start + _BATCH_ROWS])
                self._flushed_to = end
            while self._flushed_to != end:
                rows, reached = await asyncio.to_thread(_read_rows, self._journal, self._flushed_to, end)
                await self._insert(rows)
                self._flushed_to = reached
        except BaseException:
            self._fresh = None
            raise

    async def recover(self) -> int:
        """Bring the journals of dead processes into the database; returns how many rows that gave."""
        root = self._journal.folder.parent
        num_rows = 0
        orphans = await asyncio.to_thread(claim_orphans, root)
        try:
            while orphans:
                num_rows += await self._recover_one(orphans[-1])
                await asyncio.to_thread(orphans.pop().release, delete=True)
        finally:
            for orphan in orphans:  # tried again later
                orphan.release(delete=False)
        return num_rows

    async def _recover_one(self, orphan: OrphanedJournal) -> int:
        num_rows = num_interrupted = 0
        rows = recovered_rows(orphan.entries())
        while batch := await asyncio.to_thread(lambda: list(islice(rows, _BATCH_ROWS))):
            num_rows += await self._insert(batch)
            num_interrupted += sum(row.status == "interrupted" for row in batch)
        self.metrics.recovered_rows += num_rows
        if num_rows or orphan.num_damaged_lines:
            logger.warning(
                "recovered %d usage rows that a stopped gateway left behind (%d requests were interrupted, %d lines "
                "were damaged)",
                num_rows,
                num_interrupted,
                orphan.num_damaged_lines,
            )
        return num_rows

    async def _insert(self, rows: Sequence[UsageRow]) -> int:
        if not rows:
            return 0
        num_inserted, refused = await self._database.run(lambda connection: _insert_all(connection, rows))
        for request_id in refused:
            self.metrics.refused_rows += 1
            logger.error("the database refused the usage row of request %s, which is dropped", request_id)
        return num_inserted

    def _append(self, line: bytes) -> bool:
        try:
            if self._journal.is_due_to_rotate:
                self._rotate()
            self._journal.append(line)
        except OSError as error:
            self.metrics.journal_failures += 1
            if not self._is_failing:
                policy = "requests are refused" if self._refuses else "rows are kept in memory"
                logger.error("the usage journal cannot be written, so %s: %s", policy, error)
            self._is_failing = True
            return False
        if self._is_failing:
            self._is_failing = False
            logger.warning("the usage journal can be written again")
        return True

    def _rotate(self) -> None:
        # A segment that grows too long must not fail a request.
        with contextlib.suppress(OSError):
            self._journal.rotate(line for _, line in self._open.values())

    def _keep_in_memory(self, row: UsageRow) -> None:
        if len(self._unwritten) < MAX_ROWS_IN_MEMORY:
            self._unwritten.append(row)
            return
        self.metrics.lost_rows += 1
        logger.error("the usage row of request %s is lost: no disk, no database, no memory", row.request_id)

    async def _flush_quietly(self) -> None:
        try:
            await self.flush()
        except (PenstockError, OSError) as error:
            self._note_database_away(error)
        else:
            if self._database_is_away:
                self._database_is_away = False
                logger.warning("usage reaches the database again")

    async def _recover_quietly(self) -> None:
        # The flush reports a database that is away.
        with contextlib.suppress(PenstockError, OSError):
            await self.recover()

    async def _sync(self) -> None:
        try:
            await asyncio.to_thread(self._journal.sync)
        except OSError as error:
            self.metrics.journal_failures += 1
            logger.error("the usage journal cannot be synced to the disk: %s", error)

    def _note_database_away(self, error: Exception) -> None:
        self.metrics.flush_failures += 1
        if not self._database_is_away:
            self._database_is_away = True
            logger.error("usage stays in the journal for now: %s", error)


def recovered_rows(entries: Iterator[JournalEntry]) -> Iterator[UsageRow]:
    """Yield the rows of a dead process's journal: a row for each settled request, and a row for each request that
    only began."""
    begun: dict[str, BegunRequest] = {}
    for entry in entries:
        if isinstance(entry, BegunRequest):
            begun[entry.request_id] = entry
        else:
            begun.pop(entry.request_id, None)
            yield entry
    yield from map(interrupted_row, begun.values())


def _read_rows(journal: Journal, start: Position, end: Position) -> tuple[list[UsageRow], Position]:
    """Some of the rows that were settled between two positions, and the position of the next read."""
    lines, reached = journal.read(start, end)
    return [row for line in lines if isinstance(row := decode_line(line), UsageRow)], reached


def _insert_all(connection: Connection, rows: Sequence[UsageRow]) -> tuple[int, list[str]]:
    """Insert rows. Returns how many rows were new, and the ids of requests whose row the database will never take."""
    try:
        with connection.begin_nested():
            return insert_rows(connection, rows), []
    except (DataError, IntegrityError, OverflowError):  # SQLite's, for a number beyond 64 bits
        if len(rows) == 1:
            return 0, [rows[0].request_id]
    # One bad row must not hold up the others: halve until it stands alone.
    middle = len(rows) // 2
    first, first_refused = _insert_all(connection, rows[:middle])
    second, second_refused = _insert_all(connection, rows[middle:])
    return first + second, first_refused + second_refused


def _delete(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


async def _repeat(work: Callable[[], Awaitable[None]], interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        try:
            await work()
        except Exception:
            logger.exception("the usage ledger's background work failed; it is tried again")
