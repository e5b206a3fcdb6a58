"""Spend for budgets: in memory, exact, never counted twice, with the other gateways' share."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.ledger.journal import begun_request, usage_row
from penstock.gateway.ledger.spend import LedgerSpendTracker, SpendReader, first_day_of_month
from penstock.gateway.ledger.usage_store import insert_rows
from penstock.gateway.prompts import Usage
from penstock.gateway.ratelimits.settings import LimitScope, Subject
from penstock.gateway.ratelimits.spend import Spend
from penstock.gateway.store.database import Database
from tests.gateway.ledger.samples import DAY_S, NOON, PRICES, WallClock, claim, open_ledger, outcome

KEY = Subject(LimitScope.KEY, "k1")


async def test_a_settled_request_counts_at_once_for_all_it_belongs_to(tmp_path: Path) -> None:
    async with open_ledger(tmp_path) as ledger:
        ledger.begin(claim("a"))
        ledger.settle(claim("a"), outcome(prompt=10, completion=5))
        for subject in (
            KEY,
            Subject(LimitScope.WORKSPACE, "w1"),
            Subject(LimitScope.MODEL, "m"),
            Subject(LimitScope.KEY_MODEL, "k1/m"),
            Subject(LimitScope.WORKSPACE_MODEL, "w1/m"),
        ):
            assert await ledger.spending.spent(subject) == Spend(20.0, 20.0)
        assert await ledger.spending.spent(Subject(LimitScope.KEY, "other")) == Spend()
        assert ledger.spending.cost_microdollars(claim("b"), Usage(1, 1, 0)) == 3.0


async def test_it_is_seeded_from_the_database_and_learns_of_other_gateways(tmp_path: Path) -> None:
    clock = WallClock()
    async with open_ledger(tmp_path, clock=clock) as first, open_ledger(tmp_path, clock=clock) as second:
        first.begin(claim("a"))
        first.settle(claim("a"), outcome())
        await first.flush()
        assert await second.spending.spent(KEY) == Spend()
        second._read_spend_at = 0.0
        await second.flush()
        assert await second.spending.spent(KEY) == Spend(20.0, 20.0)
    async with open_ledger(tmp_path, clock=clock) as third:
        assert await third.spending.spent(KEY) == Spend(20.0, 20.0)


async def test_days_and_months_end_in_utc(tmp_path: Path) -> None:
    clock = WallClock()
    async with open_ledger(tmp_path, clock=clock) as ledger:
        for name in ("a", "b"):
            ledger.begin(claim(name))
            ledger.settle(claim(name), outcome())
            await ledger.flush()
            clock.now += DAY_S
        assert await ledger.spending.spent(KEY) == Spend(0.0, 40.0)
        clock.now = NOON + 12 * DAY_S
        assert await ledger.spending.spent(KEY) == Spend()


def test_the_first_day_of_a_month() -> None:
    assert first_day_of_month(0) == 0
    assert first_day_of_month(30) == 0
    assert first_day_of_month(31) == 31


actions = st.lists(
    st.sampled_from(["settle", "elsewhere", "begin_flush", "flush", "fail", "day"]), max_size=40
)


@settings(max_examples=25, deadline=None)  # each makes a database
@given(actions)
async def test_layers_neither_lose_nor_repeat(history: list[str]) -> None:
    """Whatever the order of settling, flushing and failing: what the spending says is what was settled here, and what
    others wrote until the last look at the database."""
    clock = WallClock(NOON + 8 * DAY_S)  # the end of the month is near
    spending, reader, database = LedgerSpendTracker(PRICES, clock), SpendReader(), Database("sqlite://")
    settled: list[tuple[int, int]] = []  # (day, cost) here
    elsewhere: list[tuple[int, int]] = []
    known_elsewhere: list[tuple[int, int]] = []
    pending = []
    for serial, action in enumerate(history):
        row = usage_row(begun_request(claim(str(serial)), clock()), outcome(), 20 * 10**6)
        if action == "settle":
            spending.add(row)
            pending.append(row)
            settled.append((row.day, row.cost_picodollars))
        elif action == "elsewhere":
            database.run_now(lambda connection, row=row: insert_rows(connection, [row]))
            elsewhere.append((row.day, row.cost_picodollars))
        elif action == "day":
            clock.now += DAY_S / 4
        elif action in ("begin_flush", "fail"):
            spending.begin_flush()
        else:
            spending.begin_flush()
            database.run_now(lambda connection, rows=tuple(pending): insert_rows(connection, rows))
            pending.clear()
            spending.end_flush(database.run_now(lambda connection: reader.read(connection, spending.today())))
            known_elsewhere = elsewhere[:]
        today, first = spending.today(), first_day_of_month(spending.today())
        known = settled + known_elsewhere
        expected = Spend(
            sum(cost for day, cost in known if day == today) / 10**6,
            sum(cost for day, cost in known if day >= first) / 10**6,
        )
        assert await spending.spent(KEY) == expected
    database.close()
