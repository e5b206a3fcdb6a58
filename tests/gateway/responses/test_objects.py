"""The store of conversations and chat completions: bounds, expiry, pages, and walls between workspaces."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from penstock.core.errors import InvalidRequest
from penstock.gateway.responses import objects
from penstock.gateway.responses.objects import ROW_BYTES, ObjectStore, StoredObject
from penstock.gateway.responses.store import ResponseStore, StoredResponse
from penstock.gateway.store.database import Database, sqlite_url
from tests.gateway.store.ready_made import ready_made_database


class Clock:
    time = 1000.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = ready_made_database(tmp_path)
    yield database
    database.close()


@pytest.fixture
def store(database: Database, clock: Clock) -> ObjectStore:
    return ObjectStore(database, now=clock.now)


def thing(name: str, parent: str = "", **changes: object) -> StoredObject:
    fields: dict[str, object] = {
        "id": name,
        "workspace_id": "w",
        "kind": "item" if parent else "conversation",
        "parent_id": parent,
        "created_at": 1000.0,
        "expires_at": 2000.0,
        "body": b"{}",
    }
    return StoredObject(**(fields | changes))  # type: ignore[arg-type]


async def test_children_go_with_their_parent(store: ObjectStore) -> None:
    await store.add([thing("a"), thing("1", "a"), thing("2", "a"), thing("3", "never")])
    found = await store.children("w", "item", "a", keep_until=5000.0, param="x")
    assert found is not None
    assert [each.id for each in found] == ["1", "2"]
    for name, parent in (("a", ""), ("1", "a"), ("2", "a")):
        kept = await store.find("w", "item" if parent else "conversation", name, parent_id=parent)
        assert kept is not None
        assert kept.expires_at == 5000.0
    assert await store.find("w", "item", "3", parent_id="never") is None, "its parent is not there"
    assert await store.children("other", "item", "a", keep_until=0, param="x") is None
    assert not await store.delete("other", "conversation", "a")
    assert await store.delete("w", "conversation", "a")
    assert not await store.delete("w", "conversation", "a")
    assert await store.find("w", "item", "1", parent_id="a") is None


async def test_expired_is_gone(store: ObjectStore, clock: Clock) -> None:
    await store.add([thing("a"), thing("1", "a")])
    clock.time = 2000.0
    assert await store.find("w", "conversation", "a") is None
    assert await store.children("w", "item", "a", keep_until=9000.0, param="x") is None
    assert (await store.page("w", "conversation", limit=5, order="asc")).objects == []


async def test_a_workspace_loses_its_oldest_objects(database: Database) -> None:
    store = ObjectStore(database, max_workspace_bytes=4 * ROW_BYTES + 40, now=lambda: 0.0)
    await store.add([thing("other", workspace_id="v")])
    await store.add([thing("a"), thing("1", "a")])
    for name in ("b", "c", "d"):
        await store.add([thing(name)])
    assert await store.find("w", "conversation", "a") is None
    assert await store.find("w", "item", "1", parent_id="a") is None
    assert [each.id for each in (await store.page("w", "conversation", limit=9, order="asc")).objects] == [
        "b",
        "c",
        "d",
    ]
    assert await store.find("v", "conversation", "other") is not None


async def test_pages_and_filters(store: ObjectStore) -> None:
    for number in range(5):
        labels = {"parity": str(number % 2), "n": str(number)}
        await store.add(
            [thing(str(number), metadata=labels, model="m" if number < 4 else "o", body=b"%d" % number)]
        )
    page = await store.page("w", "conversation", limit=2, order="desc")
    assert ([each.id for each in page.objects], page.has_more) == (["4", "3"], True)
    page = await store.page("w", "conversation", limit=3, order="desc", after="3")
    assert ([each.id for each in page.objects], page.has_more) == (["2", "1", "0"], False)
    page = await store.page(
        "w", "conversation", limit=3, order="asc", model="m", metadata={"parity": "0"}, after="0"
    )
    assert [each.id for each in page.objects] == ["2"]
    with pytest.raises(InvalidRequest):
        await store.page("w", "conversation", limit=1, order="asc", after="9")


async def test_a_page_of_large_objects_is_short(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MAX_PAGE_BYTES", 2 * ROW_BYTES + 100)
    for name, size in (("a", 10), ("b", 1000), ("c", 10), ("d", 10), ("e", 10)):
        await store.add([thing(name, body=b"x" * size)])
    pages, after = [], None
    while True:
        page = await store.page("w", "conversation", limit=3, order="asc", after=after)
        pages.append([each.id for each in page.objects])
        if not page.has_more:
            break
        after = pages[-1][-1]
    assert pages == [["a"], ["b"], ["c", "d"], ["e"]]


async def test_a_list_sorts_nothing(store: ObjectStore, database: Database) -> None:
    """A workspace may keep a million objects, and clients ask for lists as often as they like."""
    await store.add([thing(each) for each in "abc"])
    asked: list[tuple[str, Any]] = []
    listener = lambda *event: asked.append((event[2], event[3]))  # noqa: E731
    sqlalchemy.event.listen(database._engine, "before_cursor_execute", listener)
    for order in ("asc", "desc"):
        assert len((await store.page("w", "conversation", limit=2, order=order, after="b")).objects) == 1
    sqlalchemy.event.remove(database._engine, "before_cursor_execute", listener)
    assert any("ORDER BY" in statement for statement, _ in asked)
    for statement, values in asked:
        if statement.startswith("SELECT"):
            plan = database.run_now(
                lambda connection, asked=(statement, values): connection.exec_driver_sql(
                    f"EXPLAIN QUERY PLAN {asked[0]}", asked[1]
                ).all()
            )
            assert not any("B-TREE" in step.detail or "SCAN" in step.detail for step in plan), plan


@pytest.mark.parametrize("search", [{"metadata": {"x": "y"}}, {"model": "m"}])
async def test_searches_take_turns_and_leave_threads_for_other_work(
    store: ObjectStore, database: Database, monkeypatch: pytest.MonkeyPatch, search: dict[str, Any]
) -> None:
    await store.add([thing("a", metadata={"x": "y"}, model="m")])
    released = asyncio.Event()
    begun: list[str] = []
    run = database.run

    async def held_up(*arguments: Any, **options: Any) -> Any:
        begun.append("work")
        await released.wait()
        return await run(*arguments, **options)

    monkeypatch.setattr(database, "run", held_up)
    searches = [
        asyncio.create_task(store.page("w", "conversation", limit=1, order="asc", **search)) for _ in range(8)
    ]
    neighbour = asyncio.create_task(store.page("v", "conversation", limit=1, order="asc", **search))
    listing = asyncio.create_task(store.page("w", "conversation", limit=1, order="asc"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(begun) == 3, "one search of each workspace, and the list"
    released.set()
    assert (await neighbour).objects == []
    pages = await asyncio.gather(*searches, listing)
    assert [[each.id for each in page.objects] for page in pages] == [["a"]] * 9


async def test_changes(store: ObjectStore) -> None:
    await store.add([thing("a"), thing("a", body=b"other")])
    assert (await store.find("w", "conversation", "a")) == thing("a"), "the first stays"
    assert await store.change(thing("a", metadata={"x": "y"}, body=b"new"))
    assert await store.find("w", "conversation", "a") == thing("a", metadata={"x": "y"}, body=b"new")
    assert not await store.change(thing("a", workspace_id="other"))
    assert await store.known_ids("w", "conversation", ["a", "b", "\0"], parent_id="") == {"a"}
    assert await store.find("w", "conversation", "\0") is None


async def test_conversations_are_read_while_another_process_writes(tmp_path: Path) -> None:
    """Reading renews what is about to expire, and otherwise waits for no writer and keeps none waiting: a workspace
    that reads long conversations all the time would hold the database for itself."""
    database = Database(sqlite_url(tmp_path))
    objects = ObjectStore(database, now=lambda: 1000.0)
    responses = ResponseStore(database, now=lambda: 1000.0)
    await objects.add([thing("a"), thing("1", "a")])
    fields = {"workspace_id": "w", "created_at": 1000.0, "expires_at": 2000.0, "is_final": True}
    for name, previous in (("r", None), ("s", "r")):
        await responses.add(
            StoredResponse(id=name, previous_id=previous, body=b"{}", input_items=b"[]", **fields)  # type: ignore[arg-type]
        )
    with closing(sqlite3.connect(str(database.file), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        found = await objects.children("w", "item", "a", keep_until=2050.0, param="x")
        history = await responses.history("w", "s", keep_until=2050.0)
    assert [each.id for each in found or ()] == ["1"]
    assert [each.id for each in history or ()] == ["r", "s"]
    database.close()


async def test_no_row_of_a_family_is_looked_for_in_all_of_a_workspace(database: Database) -> None:
    """Most of these statements hold the lock of writers, and a workspace may have millions of rows."""
    store = ObjectStore(database, now=lambda: 1000.0)
    await store.add([thing("a"), thing("1", "a")])
    asked: list[tuple[str, Any]] = []

    def note(_: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool) -> None:
        if statement.startswith(("SELECT", "UPDATE", "DELETE")) and "stored_objects" in statement:
            asked.append((statement, parameters))

    sqlalchemy.event.listen(database._engine, "before_cursor_execute", note)
    await store.add([thing("2", "a")])
    await store.children("w", "item", "a", keep_until=9000.0, param="x")
    await store.delete("w", "conversation", "a")
    sqlalchemy.event.remove(database._engine, "before_cursor_execute", note)
    assert len(asked) >= 6
    with closing(sqlite3.connect(str(database.file))) as connection:
        for statement, parameters in asked:
            plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]
            assert all("parent_id=?" in step or "rowid" in step for step in plan if "SEARCH" in step), plan
            assert not any("SCAN" in step for step in plan), plan
