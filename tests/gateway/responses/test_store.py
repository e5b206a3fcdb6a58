"""A store keeps the same promises in memory and in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event

from penstock.core.errors import InvalidRequest
from penstock.gateway.responses import store as store_module
from penstock.gateway.responses.store import ResponseStore, StoredResponse
from penstock.gateway.store import retention
from penstock.gateway.store.database import Database, sqlite_url


class FakeClock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["memory", "database"])
def store(request: pytest.FixtureRequest, clock: FakeClock, tmp_path: Path) -> Iterator[ResponseStore]:
    database = Database("sqlite://" if request.param == "memory" else sqlite_url(tmp_path))
    yield ResponseStore(database, now=clock.now)
    database.close()


def response(response_id: str, previous_id: str | None = None, **changes: object) -> StoredResponse:
    fields: dict[str, object] = {
        "id": response_id,
        "workspace_id": "w",
        "created_at": 1000.0,
        "expires_at": 2000.0,
        "is_final": True,
        "body": b"{}",
        "input_items": b"[]",
        "previous_id": previous_id,
    }
    return StoredResponse(**(fields | changes))  # type: ignore[arg-type]


async def test_saved_found_and_deleted(store: ResponseStore) -> None:
    assert await store.find("w", "a") is None
    assert not await store.delete("w", "a")
    await store.add(response("a"))
    assert await store.find("w", "a") == response("a")
    assert await store.delete("w", "a")
    assert await store.find("w", "a") is None
    assert not await store.delete("w", "a")


async def test_another_workspace_sees_nothing(store: ResponseStore) -> None:
    await store.add(response("a"))
    assert await store.find("other", "a") is None
    assert await store.history("other", "a", keep_until=0) is None
    assert not await store.delete("other", "a")
    assert await store.find("w", "a") is not None


async def test_a_conversation_cannot_reach_into_another_workspace(store: ResponseStore) -> None:
    await store.add(response("a", workspace_id="other"))
    await store.add(response("b", "a"))
    assert await store.history("w", "b", keep_until=0) is None


async def test_expired_is_gone(store: ResponseStore, clock: FakeClock) -> None:
    await store.add(response("a"))
    clock.time = 2000.0
    assert await store.find("w", "a") is None
    await store.add(response("b", expires_at=9000.0))
    assert await store.find("w", "b") is not None


async def test_history_is_in_order_and_lives_on(store: ResponseStore, clock: FakeClock) -> None:
    await store.add(response("a"))
    await store.add(response("b", "a"))
    await store.add(response("c", "b", expires_at=9000.0))
    history = await store.history("w", "c", keep_until=5000.0)
    assert history is not None
    assert [each.id for each in history] == ["a", "b", "c"]
    clock.time = 4000.0
    assert await store.find("w", "a") is not None
    clock.time = 6000.0
    assert await store.find("w", "a") is None
    assert await store.find("w", "c") is not None


async def test_a_gap_in_the_history_is_no_history(store: ResponseStore) -> None:
    await store.add(response("a"))
    await store.add(response("b", "a"))
    await store.delete("w", "a")
    assert await store.history("w", "b", keep_until=0) is None


async def test_endless_history_is_refused(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_HISTORY", 2)
    for response_id, previous in (("a", None), ("b", "a"), ("c", "b")):
        await store.add(response(response_id, previous))
    assert await store.history("w", "b", keep_until=0) is not None
    with pytest.raises(InvalidRequest):
        await store.history("w", "c", keep_until=0)


async def test_only_what_is_not_final_is_replaced(store: ResponseStore) -> None:
    await store.add(response("a", is_final=False, body=b"running"))
    assert not await store.replace(response("a", body=b"stolen", workspace_id="other"))
    assert await store.replace(response("a", body=b"cancelled"))
    assert not await store.replace(response("a", body=b"completed"))
    found = await store.find("w", "a")
    assert found is not None
    assert found.body == b"cancelled"


async def test_what_is_added_again_stays_as_it_was(store: ResponseStore) -> None:
    await store.add(response("a", body=b"first"))
    await store.add(response("a", body=b"second"))
    found = await store.find("w", "a")
    assert found is not None
    assert found.body == b"first"


async def test_deleted_while_it_runs_stays_deleted(store: ResponseStore) -> None:
    await store.add(response("a", is_final=False))
    await store.delete("w", "a")
    assert not await store.replace(response("a"))
    assert await store.find("w", "a") is None


async def test_memory_is_bounded(clock: FakeClock) -> None:
    store = ResponseStore(Database("sqlite://"), max_workspace_bytes=100, now=clock.now)
    for number in range(10):
        await store.add(response(str(number), body=b"x" * 38, created_at=float(number)))
    assert [number for number in range(10) if await store.find("w", str(number))] == [8, 9]
    await store.add(response("large", body=b"x" * 200))
    assert [number for number in range(10) if await store.find("w", str(number))] == []


async def test_nothing_is_written_by_looking(tmp_path: Path, clock: FakeClock) -> None:
    database = Database(sqlite_url(tmp_path))
    store = ResponseStore(database, now=clock.now)
    assert await store.find("w", "a") is None
    assert await store.history("w", "a", keep_until=0) is None
    assert not await store.delete("w", "a")
    assert list(tmp_path.iterdir()) == []
    database.close()


async def test_an_id_that_no_database_could_look_for_does_not_exist(store: ResponseStore) -> None:
    await store.add(response("a"))
    assert await store.find("w", "a\0") is None
    assert await store.history("w", "a\0", keep_until=3000.0) is None
    assert not await store.delete("w", "a\0")


async def test_a_conversation_is_bounded_in_bytes(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_HISTORY_BYTES", 1000)
    await store.add(response("a", body=b"x" * 400, input_items=b"y" * 100))
    await store.add(response("b", "a", body=b"x" * 400, input_items=b"y" * 100))
    assert await store.history("w", "b", keep_until=0.0) is not None
    await store.add(response("c", "b", body=b"x"))
    with pytest.raises(InvalidRequest, match="1000 bytes"):
        await store.history("w", "c", keep_until=0.0)


async def test_a_workspace_is_bounded_in_bytes(tmp_path: Path, clock: FakeClock) -> None:
    """The oldest responses of the workspace go, those of other workspaces and those that still run stay."""
    database = Database(sqlite_url(tmp_path))
    store = ResponseStore(database, max_workspace_bytes=10_000, now=clock.now)
    await store.add(response("theirs", workspace_id="v", body=b"x" * 9000, created_at=1.0))
    await store.add(response("running", is_final=False, created_at=1.0, lease_until=1e9))
    for number in range(300):
        await store.add(response(f"r{number}", body=b"x" * 100, created_at=10.0 + number))
    kept = [number for number in range(300) if await store.find("w", f"r{number}") is not None]
    assert kept == list(range(300 - len(kept), 300))
    assert 90 <= len(kept) <= 100
    assert await store.find("v", "theirs") is not None
    assert await store.find("w", "running") is not None
    await store.replace(response("running", body=b"x" * 20_000, created_at=1.0))
    assert await store.find("w", "running") is not None  # the newest outcome stays, whatever its size
    assert await store.find("w", "r299") is None
    database.close()


async def test_making_room_keeps_no_writer_waiting(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of a workspace are read while others write, and few rows are deleted in one transaction."""
    monkeypatch.setattr(retention, "_DELETED_AT_ONCE", 5)
    monkeypatch.setattr(retention, "_PLANNED_AT_ONCE", 12)
    database = Database(sqlite_url(tmp_path))
    roomy = ResponseStore(database, now=clock.now)
    for number in range(40):
        workspace = "gone" if number < 10 else "w"
        expires_at = clock.now() + (1.0 if number < 10 else 1e6)
        await roomy.add(
            response(str(number), workspace_id=workspace, created_at=float(number), expires_at=expires_at)
        )
    clock.time += 700.0
    deleted: list[int] = []
    run = database.run

    async def run_and_look(work: Callable[[Connection], Any], *, reads_only: bool = False) -> Any:
        def looked_at(connection: Connection) -> Any:
            statements: list[str] = []

            def note(_: object, cursor: Any, statement: str, *more: object) -> None:
                statements.append(statement)
                if statement.startswith("DELETE"):
                    deleted.append(cursor.rowcount)
                    assert "workspace_id" not in statement, (
                        "SQLite would go through all rows of the workspace"
                    )

            event.listen(connection, "after_cursor_execute", note)
            try:
                result = work(connection)
            finally:
                event.remove(connection, "after_cursor_execute", note)
            assert reads_only or not any("sum(" in each for each in statements)
            return result

        return await run(looked_at, reads_only=reads_only)

    monkeypatch.setattr(database, "run", run_and_look)
    store = ResponseStore(database, max_workspace_bytes=100, now=clock.now)
    await store.add(response("new", body=b"x" * 60))
    assert [number for number in range(40) if await store.find("w", str(number))] == list(range(31, 40))
    assert max(deleted) == 5
    assert sum(deleted) == 31
    database.close()
