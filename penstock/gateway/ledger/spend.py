"""The money that each key, workspace and model has spent today and this month (UTC), in memory, for budgets.

Three layers add up: what the database knew when it was last asked (other gateways' requests included), what this
process is writing to it, and what it has settled since. Moving from layer to layer neither loses a request nor counts
it twice. Knows no journal and no limits.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sqlalchemy import Connection

from penstock.gateway.accounts import Claim
from penstock.gateway.ledger.journal import SECONDS_PER_DAY, UsageRow
from penstock.gateway.ledger.prices import PICODOLLARS_PER_MICRODOLLAR, PriceTable
from penstock.gateway.ledger.usage_store import SpendRecord, spent_between
from penstock.gateway.prompts import Usage
from penstock.gateway.ratelimits.settings import Subject, subjects_of
from penstock.gateway.ratelimits.spend import Spend, SpendTracker

_READS_PER_FULL_READ = 60


@dataclass(frozen=True, slots=True)
class StoredSpend:
    """Picodollars as the database had them on `day`."""

    day: int = -1
    today: Mapping[Subject, int] = field(default_factory=dict)
    month: Mapping[Subject, int] = field(default_factory=dict)


class _Layer:
    """Picodollars by day and subject. Rarely holds more than two days."""

    def __init__(self) -> None:
        self._days: dict[int, dict[Subject, int]] = {}

    def add(self, day: int, subjects: Iterable[Subject], picodollars: int) -> None:
        totals = self._days.setdefault(day, {})
        for subject in subjects:
            totals[subject] = totals.get(subject, 0) + picodollars

    def add_all(self, other: _Layer) -> None:
        for day, totals in other._days.items():
            for subject, picodollars in totals.items():
                self.add(day, (subject,), picodollars)

    def spent(self, subject: Subject, first_day: int, last_day: int) -> int:
        return sum(
            totals.get(subject, 0) for day, totals in self._days.items() if first_day <= day <= last_day
        )


class LedgerSpendTracker(SpendTracker):
    """Used from the event loop only."""

    def __init__(self, prices: PriceTable, wall_clock: Callable[[], float] = time.time) -> None:
        self.prices = prices
        self._wall_clock = wall_clock
        self._stored = StoredSpend()
        self._flushing = _Layer()
        self._fresh = _Layer()
        # Settled since the last question, by (day, workspace, key, model): sorted only when asked.
        self._unsorted: dict[tuple[int, str, str, str], int] = {}

    async def spent(self, subject: Subject) -> Spend:
        self._sort()
        today = self.today()
        first = first_day_of_month(today)
        stored = self._stored
        today_total = stored.today.get(subject, 0) if stored.day == today else 0
        month_total = stored.month.get(subject, 0) if stored.day >= first else 0
        for layer in (self._flushing, self._fresh):
            today_total += layer.spent(subject, today, today)
            month_total += layer.spent(subject, first, today)
        return Spend(today_total / PICODOLLARS_PER_MICRODOLLAR, month_total / PICODOLLARS_PER_MICRODOLLAR)

    def cost_microdollars(self, claim: Claim, usage: Usage) -> float:
        return self.prices.rates(claim.model, claim.tier).cost_of(usage) / PICODOLLARS_PER_MICRODOLLAR

    def add(self, row: UsageRow) -> None:
        if row.cost_picodollars:
            place = row.day, row.workspace_id, row.key_id, row.model
            self._unsorted[place] = self._unsorted.get(place, 0) + row.cost_picodollars

    def begin_flush(self) -> None:
        """Note that everything settled so far is about to be written, with what an earlier flush failed to write."""
        self._sort()
        self._flushing.add_all(self._fresh)
        self._fresh = _Layer()

    def end_flush(self, stored: StoredSpend) -> None:
        """Note that everything of `begin_flush` is in the database. `stored` was read after that."""
        self._stored = stored
        self._flushing = _Layer()

    def today(self) -> int:
        return int(self._wall_clock() // SECONDS_PER_DAY)

    def _sort(self) -> None:
        if self._unsorted:
            for (day, workspace, key, model), picodollars in self._unsorted.items():
                self._fresh.add(day, _subjects_of(workspace, key, model), picodollars)
            self._unsorted = {}


class SpendReader:
    """Adds up the database's records, off the event loop. Days before yesterday hardly change any more, so they are
    read rarely."""

    def __init__(self) -> None:
        self._num_reads = 0
        self._finished: dict[Subject, int] = {}
        self._finished_until: int | None = None  # the first day that is not in `_finished`

    def read(self, connection: Connection, today: int) -> StoredSpend:
        first = first_day_of_month(today)
        until = max(first, today - 1)
        if self._finished_until != until or self._num_reads % _READS_PER_FULL_READ == 0:
            self._finished = _add_up(spent_between(connection, first, until))
            self._finished_until = until
        self._num_reads += 1
        recent = spent_between(connection, until, today + 1)
        month = _add_up(recent, self._finished)
        return StoredSpend(today, _add_up(record for record in recent if record[0] == today), month)


def _add_up(records: Iterable[SpendRecord], start: Mapping[Subject, int] | None = None) -> dict[Subject, int]:
    totals = defaultdict(int, start or {})
    for _, workspace, key, model, picodollars in records:
        for subject in _subjects_of(workspace, key, model):
            totals[subject] += picodollars
    return dict(totals)


_subjects_of = functools.lru_cache(maxsize=65_536)(subjects_of)


def first_day_of_month(day: int) -> int:
    """Return the first day of the month of `day`, both in days since the epoch."""
    moment = datetime.fromtimestamp(day * SECONDS_PER_DAY, UTC)
    return day - (moment.day - 1)
