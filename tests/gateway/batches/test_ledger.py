"""A line that a crash interrupted is run again under its id; the ledger then knows how it ended, once."""

from __future__ import annotations

from typing import Literal

import pytest
import sqlalchemy as sa

from penstock.core.identity import Principal
from penstock.core.request import Tier
from penstock.gateway.accounts import Claim, Outcome
from penstock.gateway.ledger.journal import UsageRow, begun_request, interrupted_row, usage_row
from penstock.gateway.ledger.usage_store import insert_rows
from penstock.gateway.prompts import Usage
from penstock.gateway.store.database import Database
from penstock.gateway.store.tables import usage, usage_spend

CLAIM = Claim(
    request_id="batch_1-1",
    principal=Principal(),
    model="m",
    endpoint="chat",
    tier=Tier.BATCH,
    input_tokens=3,
    max_output_tokens=5,
)
INTERRUPTED = interrupted_row(begun_request(CLAIM, 1000.0))
COMPLETED = usage_row(begun_request(CLAIM, 2000.0), Outcome(usage=Usage(3, 5, 0), status="completed"), 70)


@pytest.mark.parametrize(
    "groups",
    [
        [[INTERRUPTED], [COMPLETED]],
        [[COMPLETED], [INTERRUPTED]],
        [[INTERRUPTED, COMPLETED]],
        [[COMPLETED, INTERRUPTED]],
        [[INTERRUPTED], [COMPLETED], [COMPLETED], [INTERRUPTED]],
        [[COMPLETED, COMPLETED]],
    ],
)
def test_the_row_that_knows_more_stays(groups: list[list[UsageRow]]) -> None:
    database = Database("sqlite://")
    for rows in groups:
        database.run_now(lambda connection, rows=rows: insert_rows(connection, rows))  # type: ignore[misc]
    (row,) = database.run_now(lambda connection: connection.execute(sa.select(usage)).all())
    assert (row.status, row.prompt_tokens, row.cost_picodollars) == ("completed", 3, 70)
    spent = database.run_now(
        lambda connection: connection.execute(sa.select(usage_spend.c.cost_picodollars)).scalars().all()
    )
    assert spent == [70]


@pytest.mark.parametrize("status", ["cancelled", "failed"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_line_that_was_cut_off_and_run_again_is_paid_for(
    status: Literal["cancelled", "failed"], at_once: bool
) -> None:
    """A shutdown cuts a line off after two tokens; the next process runs it again under its id."""
    database = Database("sqlite://")
    cut_off = usage_row(begun_request(CLAIM, 1000.0), Outcome(usage=Usage(3, 2, 0), status=status), 40)
    groups = [[cut_off, COMPLETED]] if at_once else [[cut_off], [cut_off, COMPLETED]]
    # A journal that is read again, from any place, changes nothing.
    for rows in [*groups, [COMPLETED], [cut_off], [cut_off, COMPLETED]]:
        database.run_now(lambda connection, rows=rows: insert_rows(connection, rows))  # type: ignore[misc]
    (row,) = database.run_now(lambda connection: connection.execute(sa.select(usage)).all())
    assert (row.status, row.prompt_tokens, row.completion_tokens) == ("completed", 6, 7)
    spent = database.run_now(
        lambda connection: connection.execute(
            sa.select(sa.func.sum(usage_spend.c.cost_picodollars))
        ).scalar_one()
    )
    assert (row.cost_picodollars, spent) == (110, 110)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_line_that_was_cut_off_twice_is_paid_for(at_once: bool) -> None:
    database = Database("sqlite://")
    cut_offs = [
        usage_row(begun_request(CLAIM, started_at), Outcome(usage=Usage(3, 2, 0), status=status), 40)
        for status, started_at in (("cancelled", 1000.0), ("failed", 1500.0))
    ]
    rows = [*cut_offs, COMPLETED]
    groups = [rows] if at_once else [[row] for row in rows]
    # A journal that is read again, from any place, changes nothing.
    for group in [*groups, rows[1:], rows, rows[:1], rows[:2]]:
        database.run_now(lambda connection, group=group: insert_rows(connection, group))  # type: ignore[misc]
    (row,) = database.run_now(lambda connection: connection.execute(sa.select(usage)).all())
    assert (row.status, row.prompt_tokens, row.completion_tokens) == ("completed", 9, 9)
    assert row.cost_picodollars == 150


def test_an_interruption_is_written_once() -> None:
    database = Database("sqlite://")
    assert database.run_now(lambda connection: insert_rows(connection, [INTERRUPTED])) == 1
    assert database.run_now(lambda connection: insert_rows(connection, [INTERRUPTED])) == 0
