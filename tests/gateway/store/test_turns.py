"""Queries that read much leave the threads of the database to other requests."""

from __future__ import annotations

import asyncio

import pytest

from penstock.core.errors import RateLimited
from penstock.gateway.store.database import MAX_QUERIES, MAX_QUERIES_OF_WORKSPACE, QueryTurns


class Asker:
    def __init__(self, turns: QueryTurns, workspace_id: str | None) -> None:
        self.runs = asyncio.Event()
        self.may_end = asyncio.Event()
        self._turns = turns
        self._workspace_id = workspace_id
        self.task = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        async with self._turns.turn(self._workspace_id):
            self.runs.set()
            await self.may_end.wait()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def num_running(askers: list[Asker]) -> int:
    return sum(asker.runs.is_set() and not asker.task.done() for asker in askers)


async def test_a_workspace_has_one_query_at_a_time_and_leaves_a_turn_to_others() -> None:
    turns = QueryTurns("usage")
    many = [Asker(turns, "a") for _ in range(MAX_QUERIES_OF_WORKSPACE)]
    await settled()
    other = Asker(turns, "b")
    await settled()
    assert num_running(many) == 1
    assert other.runs.is_set()
    third = Asker(turns, None)
    await settled()
    assert num_running([*many, other, third]) == MAX_QUERIES
    for asker in (*many, other, third):
        asker.may_end.set()
    await asyncio.gather(*[asker.task for asker in (*many, other, third)])


async def test_too_many_queries_of_a_workspace_are_refused_until_some_have_ended() -> None:
    turns = QueryTurns("usage")
    askers = [Asker(turns, "a") for _ in range(MAX_QUERIES_OF_WORKSPACE)]
    await settled()
    with pytest.raises(RateLimited):
        await Asker(turns, "a").task
    askers[1].task.cancel()  # its client has gone
    await settled()
    more = Asker(turns, "a")
    for asker in (*askers, more):
        asker.may_end.set()
    await asyncio.gather(*[asker.task for asker in (*askers, more)], return_exceptions=True)
    assert more.runs.is_set()
    assert not turns._num_asked
