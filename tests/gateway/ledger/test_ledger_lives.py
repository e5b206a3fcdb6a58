"""A ledger through any life: requests begin and end, it flushes, the database goes and comes, the process is killed.

In the end every request has exactly one row, and it says what happened.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import StoreUnavailable
from penstock.gateway.ledger.journal import Journal
from penstock.gateway.ledger.ledger import UsageLedger
from penstock.gateway.ledger.spend import LedgerSpendTracker
from penstock.gateway.ratelimits.settings import LimitScope, Subject
from penstock.gateway.store.database import Database
from penstock.gateway.store.tables import usage
from tests.gateway.ledger.samples import PRICES, WallClock, claim, outcome

actions = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "settle", "settle", "flush", "away", "back", "kill", "recover"]),
        st.integers(0, 7),
    ),
    max_size=40,
)


class FlakyDatabase(Database):
    is_away = False

    async def run(self, *arguments: Any, **options: Any) -> Any:
        if self.is_away:
            raise StoreUnavailable("gone")
        return await super().run(*arguments, **options)


@pytest.fixture(scope="module")
def database() -> Iterator[FlakyDatabase]:
    database = FlakyDatabase("sqlite://")
    yield database
    database.close()


class Life:
    """One gateway after another, with the same folder and database."""

    def __init__(self, folder: Path, database: FlakyDatabase) -> None:
        self.folder = folder
        self.database = database
        self.workspace = uuid.uuid4().hex  # tells this life's rows from others'
        self.running: list[str] = []
        self.ended: list[str] = []
        self.interrupted: list[str] = []

    async def start(self) -> None:
        self.journal = Journal(self.folder, segment_bytes=700)
        clock = WallClock()
        self.ledger = UsageLedger(
            self.journal, self.database, LedgerSpendTracker(PRICES, clock), wall_clock=clock
        )
        await self.ledger.start()

    async def kill(self) -> None:
        for task in self.ledger._tasks:
            task.cancel()
        await asyncio.gather(*self.ledger._tasks, return_exceptions=True)
        os.close(self.journal._file)
        os.close(self.journal._lock)
        self.interrupted += self.running
        self.running.clear()

    def begin(self) -> None:
        name = uuid.uuid4().hex
        self.ledger.begin(claim(name, workspace=self.workspace))
        self.running.append(name)

    def settle(self, number: int) -> None:
        if self.running:
            name = self.running.pop(number % len(self.running))
            self.ledger.settle(claim(name, workspace=self.workspace), outcome())
            self.ended.append(name)

    def statuses(self) -> dict[str, str]:
        select = sa.select(usage.c.request_id, usage.c.status).where(usage.c.workspace_id == self.workspace)
        rows = self.database.run_now(lambda connection: connection.execute(select).all())
        return {row.request_id: row.status for row in rows}


@settings(max_examples=60, deadline=None)
@given(actions)
async def test_every_request_has_one_row_that_says_what_happened(
    tmp_path_factory: pytest.TempPathFactory, database: FlakyDatabase, history: list[tuple[str, int]]
) -> None:
    life = Life(tmp_path_factory.mktemp("life"), database)
    await life.start()
    for action, number in history:
        if action == "begin":
            life.begin()
        elif action == "settle":
            life.settle(number)
        elif action == "flush":
            await life.ledger._flush_quietly()
        elif action == "recover":
            await life.ledger._recover_quietly()
        elif action == "kill":
            await life.kill()
            await life.start()
        else:
            database.is_away = action == "away"
    database.is_away = False
    await life.kill()
    await life.start()
    expected = dict.fromkeys(life.ended, "completed") | dict.fromkeys(life.interrupted, "interrupted")
    assert life.statuses() == expected
    spent = await life.ledger.spending.spent(Subject(LimitScope.WORKSPACE, life.workspace))
    assert spent.today_microdollars == 20.0 * len(life.ended)
    await life.ledger.close()
    assert [path.name for path in life.folder.iterdir()] == ["claim.lock"]
