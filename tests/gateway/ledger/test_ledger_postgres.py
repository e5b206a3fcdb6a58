"""The same ledger on a real PostgreSQL server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.gateway.ledger.journal import Journal, begun_request, encode_line, usage_row
from penstock.gateway.ledger.ledger import JOURNAL_FOLDER, UsageLedger, _insert_all
from penstock.gateway.ledger.spend import LedgerSpendTracker
from penstock.gateway.ledger.usage_store import UsageQuery
from penstock.gateway.prompts import Usage
from penstock.gateway.ratelimits.settings import LimitScope, Subject
from penstock.gateway.ratelimits.spend import Spend
from penstock.gateway.reuse.idempotency import (
    Answered,
    Claimed,
    KeyClaim,
    RunsElsewhere,
    claim_key,
    keep_answer,
)
from penstock.gateway.store.database import Database
from tests.gateway.ledger.samples import NOON, PRICES, WallClock, claim, outcome
from tests.gateway.store.postgres_server import running_postgres

pytest.importorskip("psycopg", reason="needs the extra postgres")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def database() -> Iterator[Database]:
    with running_postgres() as server:
        database = Database(server.url)
        yield database
        database.close()


async def test_rows_totals_pages_and_spend(tmp_path: Path, database: Database) -> None:
    dead = Journal(tmp_path / JOURNAL_FOLDER)
    dead.append(encode_line(begun_request(claim("dead", key="k0"), NOON)))
    dead.close(delete=False)
    clock = WallClock()
    spending = LedgerSpendTracker(PRICES, clock)
    ledger = UsageLedger(Journal(tmp_path / JOURNAL_FOLDER), database, spending, wall_clock=clock)
    await ledger.start()
    for number in range(5):
        name = claim(f"r{number}", key=f"k{number % 2}", user="somebody")
        ledger.begin(name)
        ledger.settle(name, outcome())
    (total,) = await ledger.totals(UsageQuery(group_by=()))
    assert (total.requests, total.by_status["interrupted"]) == (6, 1)
    assert total.cost_picodollars == 5 * 20 * 10**6
    first = await ledger.totals(UsageQuery(group_by=("day", "key", "user"), start=NOON - 1, limit=2))
    after = tuple(first[-1].group.values())
    rest = await ledger.totals(UsageQuery(group_by=("day", "key", "user"), start=NOON - 1, after=after))
    assert [total.requests for total in first + rest] == [1, 3, 2]
    assert await spending.spent(Subject(LimitScope.KEY, "k0")) == Spend(60.0, 60.0)
    await ledger.close()


def test_a_bad_row_is_dropped_and_the_others_stay(database: Database) -> None:
    rows = [usage_row(begun_request(claim(f"b{number}"), NOON), outcome(), 1) for number in range(4)]
    rows[2] = usage_row(begun_request(claim("bad"), NOON), outcome(usage=Usage(2**70, 0, 0)), 1)
    assert database.run_now(lambda connection: _insert_all(connection, rows)) == (3, ["bad"])


def test_idempotency_keys(database: Database) -> None:
    mine = KeyClaim(workspace_id="w", idempotency_key="k", fingerprint=b"f", owner="a")

    def ask(now: float) -> object:
        return database.run_now(lambda connection: claim_key(connection, mine, now, now + 30, now + 100))

    assert ask(0) == Claimed()
    assert ask(1) == RunsElsewhere(b"f")
    database.run_now(lambda connection: keep_answer(connection, mine, b"answer", 100))
    assert ask(50) == Answered(b"f", b"answer")
    assert ask(100) == Claimed()
