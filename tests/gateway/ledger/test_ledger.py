"""Every admitted request becomes one row, once, whatever happens."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from penstock.core.errors import StoreUnavailable
from penstock.core.request import Tier
from penstock.gateway.accounts import Accounts, Limiter
from penstock.gateway.ledger import journal as journal_module
from penstock.gateway.ledger import ledger as ledger_module
from penstock.gateway.ledger.journal import Journal, begun_request, encode_line, usage_row
from penstock.gateway.ledger.ledger import JOURNAL_FOLDER, UsageLedger, _insert_all
from penstock.gateway.ledger.prices import ModelPrice, PriceSettings, PriceTable
from penstock.gateway.ledger.usage_store import UsageQuery, UsageTotal, insert_rows
from penstock.gateway.prompts import Usage
from penstock.gateway.store.database import Database, sqlite_url
from penstock.gateway.store.tables import usage
from tests.gateway.ledger.samples import NOON, WallClock, claim, open_ledger, outcome


def stored_rows(folder: Path) -> dict[str, Any]:
    database = Database(sqlite_url(folder))
    rows = database.run_now(lambda connection: connection.execute(sa.select(usage)).all())
    database.close()
    return {row.request_id: row for row in rows}


async def total(ledger: UsageLedger, **query: Any) -> UsageTotal:
    (found,) = await ledger.totals(UsageQuery(group_by=(), **query))
    return found


async def test_each_way_to_end_gives_one_row(tmp_path: Path) -> None:
    async with open_ledger(tmp_path) as ledger:
        for name, status, code in (
            ("a", "completed", None),
            ("b", "cancelled", None),
            ("c", "failed", "overloaded"),
        ):
            ledger.begin(claim(name, user="someone"))
            ledger.settle(claim(name, user="someone"), outcome(status=status, error_code=code))
    rows = stored_rows(tmp_path)
    assert {name: row.status for name, row in rows.items()} == {
        "a": "completed",
        "b": "cancelled",
        "c": "failed",
    }
    assert rows["c"].error_code == "overloaded"
    row = rows["a"]
    assert (row.workspace_id, row.key_id, row.model, row.endpoint, row.tier, row.user) == (
        "w1",
        "k1",
        "m",
        "chat",
        "default",
        "someone",
    )
    assert (row.started_at, row.day) == (NOON, int(NOON // 86_400))
    assert (row.prompt_tokens, row.completion_tokens) == (10, 5)
    assert row.cost_picodollars == (10 * 1 + 5 * 2) * 10**6
    assert (row.duration_s, row.first_token_s) == (0.5, 0.1)


async def test_a_clean_end_leaves_no_journal(tmp_path: Path) -> None:
    async with open_ledger(tmp_path) as ledger:
        ledger.begin(claim("a"))
        ledger.settle(claim("a"), outcome())
    assert [path.name for path in (tmp_path / JOURNAL_FOLDER).iterdir()] == ["claim.lock"]


async def test_totals_include_what_was_settled_a_moment_ago(tmp_path: Path) -> None:
    async with open_ledger(tmp_path) as ledger:
        ledger.begin(claim("a"))
        ledger.settle(claim("a"), outcome())
        assert (await total(ledger)).requests == 1


async def test_replayed_answers_are_marked_and_free(tmp_path: Path) -> None:
    async with open_ledger(tmp_path) as ledger:
        ledger.begin(claim("a"))
        ledger.settle(claim("a"), outcome(is_cached=True))
        found = await total(ledger)
    assert (found.cached_answers, found.cost_picodollars) == (1, 0)


async def test_new_prices_hold_for_requests_that_settle_later(tmp_path: Path) -> None:
    dear = PriceTable(PriceSettings(models={"m": ModelPrice(input=100, output=100)}))  # type: ignore[arg-type]
    async with open_ledger(tmp_path) as ledger:
        for name in ("a", "b"):
            ledger.begin(claim(name, tier=Tier.BATCH))
            ledger.settle(claim(name, tier=Tier.BATCH), outcome())
            ledger.set_prices(dear)
    rows = stored_rows(tmp_path)
    assert rows["a"].cost_picodollars == 10 * 10**6
    assert rows["b"].cost_picodollars == 750 * 10**6


async def test_what_a_dead_process_left_is_recovered_once(tmp_path: Path) -> None:
    dead = Journal(tmp_path / JOURNAL_FOLDER)
    for name in ("settled", "running"):
        dead.append(encode_line(begun_request(claim(name), NOON)))
    dead.append(encode_line(usage_row(begun_request(claim("settled"), NOON), outcome(), 5)))
    dead.append(b'0123abcd ["settle","torn')
    dead.close(delete=False)
    async with open_ledger(tmp_path) as ledger:
        assert ledger.metrics.recovered_rows == 2
        assert await ledger.recover() == 0
    rows = stored_rows(tmp_path)
    assert {name: row.status for name, row in rows.items()} == {
        "settled": "completed",
        "running": "interrupted",
    }
    assert rows["running"].cost_picodollars == rows["running"].prompt_tokens == 0


async def test_a_row_that_reached_the_database_before_the_crash_is_not_repeated(tmp_path: Path) -> None:
    row = usage_row(begun_request(claim("a"), NOON), outcome(), 5)
    database = Database(sqlite_url(tmp_path))
    assert database.run_now(lambda connection: insert_rows(connection, [row])) == 1
    database.close()
    dead = Journal(tmp_path / JOURNAL_FOLDER)
    dead.append(encode_line(row))
    dead.close(delete=False)
    async with open_ledger(tmp_path) as ledger:
        assert ledger.metrics.recovered_rows == 0
        found = await total(ledger)
    assert (found.requests, found.cost_picodollars) == (1, 5)


async def test_all_orphans_are_let_go_when_one_cannot_be_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        dead = Journal(tmp_path / JOURNAL_FOLDER)
        dead.append(encode_line(usage_row(begun_request(claim(name), NOON), outcome(), 5)))
        dead.close(delete=False)
    real_insert, calls = UsageLedger._insert, []

    async def insert_twice(self: UsageLedger, rows: Any) -> int:
        calls.append(rows)
        if len(calls) == 2:
            raise StoreUnavailable("gone")
        return await real_insert(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(UsageLedger, "_insert", insert_twice)
        async with open_ledger(tmp_path) as ledger:
            assert ledger.metrics.recovered_rows == 1
            assert await ledger.recover() == 2
    assert stored_rows(tmp_path).keys() == {"a", "b", "c"}


async def test_rotation_keeps_running_requests_and_drops_written_segments(tmp_path: Path) -> None:
    journal = Journal(tmp_path / JOURNAL_FOLDER, segment_bytes=2_000)
    async with open_ledger(tmp_path, journal=journal) as ledger:
        ledger.begin(claim("long"))
        for number in range(100):
            ledger.begin(claim(str(number)))
            ledger.settle(claim(str(number)), outcome())
        await ledger.flush()
        segments = sorted(journal.folder.glob("*.journal"))
        assert len(segments) == 1
        assert journal.end.segment > 5
        assert b'"long"' in segments[0].read_bytes()
        ledger.settle(claim("long"), outcome())
        assert (await total(ledger)).requests == 101


def settle_all(ledger: UsageLedger, names: str) -> None:
    for name in names:
        ledger.begin(claim(name))
        ledger.settle(claim(name), outcome())


class TestTrouble:
    @pytest.fixture
    def full_disk(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        def allocate(file: int, start: int, num_bytes: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(journal_module, "_ROOM_BYTES", 1)  # each line needs room of its own
        return lambda: monkeypatch.setattr(journal_module, "_allocate", allocate)

    async def test_serving_on_a_full_disk_keeps_rows_in_memory(
        self, tmp_path: Path, full_disk: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with open_ledger(tmp_path) as ledger:
            full_disk()
            for name in ("a", "b"):
                ledger.begin(claim(name))
                ledger.settle(claim(name), outcome())
            assert ledger.metrics.journal_failures == 4
            assert (await total(ledger)).requests == 2
        assert [record.message for record in caplog.records if "journal" in record.message] == [
            "the usage journal cannot be written, so rows are kept in memory: "
            "[Errno 28] No space left on device"
        ]

    async def test_refusing_on_a_full_disk_gives_the_reservation_back(
        self, tmp_path: Path, full_disk: Any
    ) -> None:
        settled: list[str] = []

        class Lease:
            rate_limits = None

            async def reserve(self, claim: Any) -> Any:
                return self

            def settle(self, outcome: Any) -> None:
                settled.append(outcome.status)

        class OneLease(Limiter):
            async def open(self, claim: Any) -> Any:
                return Lease()

        async with open_ledger(tmp_path, when_unrecorded="refuse") as ledger:
            ledger.begin(claim("running"))
            full_disk()
            with pytest.raises(StoreUnavailable):
                await Accounts(OneLease(), ledger).open(claim("new"))
            ledger.settle(claim("running"), outcome())  # an answer that exists is never taken away
            assert (await total(ledger)).requests == 1
        assert settled == ["failed"]

    async def test_a_database_that_is_away_loses_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real_run = Database.run

        async def away(*args: Any, **options: Any) -> Any:
            raise StoreUnavailable("gone")

        async with open_ledger(tmp_path) as ledger:
            monkeypatch.setattr(Database, "run", away)
            for name in ("a", "b"):
                ledger.begin(claim(name))
                ledger.settle(claim(name), outcome())
            with pytest.raises(StoreUnavailable):
                await ledger.totals(UsageQuery())
            assert ledger.metrics.flush_failures == 1
            monkeypatch.setattr(Database, "run", real_run)
            assert (await total(ledger)).requests == 2

    async def test_the_lag_behind_the_database_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def lag(ledger: UsageLedger) -> tuple[float, float]:
            found: Any = ledger.metrics.figures()
            return found["usage_unwritten_rows"], found["usage_lag_seconds"]

        async def away(*args: Any, **options: Any) -> Any:
            raise StoreUnavailable("gone")

        clock = WallClock()
        async with open_ledger(tmp_path, clock=clock) as ledger:
            clock.now += 3_600
            await ledger.flush()
            assert lag(ledger) == (0, 0.0), "an idle hour is no lag"
            with monkeypatch.context() as patch:
                patch.setattr(Database, "run", away)
                for name in ("a", "b"):
                    ledger.begin(claim(name))
                    ledger.settle(claim(name), outcome())
                    clock.now += 20
                with pytest.raises(StoreUnavailable):
                    await ledger.flush()
                assert lag(ledger) == (2, 40.0)
            await ledger.flush()
            assert lag(ledger) == (0, 0.0)

    async def test_it_starts_without_a_database_and_leaves_the_journal(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def away(*args: Any, **options: Any) -> Any:
            raise StoreUnavailable("gone")

        with monkeypatch.context() as patch:
            patch.setattr(Database, "run", away)
            async with open_ledger(tmp_path) as ledger:
                ledger.begin(claim("a"))
                ledger.settle(claim("a"), outcome())
        async with open_ledger(tmp_path) as ledger:
            assert (await total(ledger)).requests == 1

    async def test_rows_of_a_failed_flush_are_read_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def away(*args: Any, **options: Any) -> Any:
            raise StoreUnavailable("gone")

        async with open_ledger(tmp_path) as ledger:
            settle_all(ledger, "ab")
            with monkeypatch.context() as patch:
                patch.setattr(Database, "run", away)
                with pytest.raises(StoreUnavailable):
                    await ledger.flush()
            settle_all(ledger, "c")
            await ledger.flush()
            settle_all(ledger, "de")
            await ledger.flush()
            assert (await total(ledger)).requests == 5

    async def test_more_rows_than_memory_keeps_are_read_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ledger_module, "MAX_ROWS_IN_MEMORY", 3)
        monkeypatch.setattr(ledger_module, "_BATCH_ROWS", 2)
        async with open_ledger(tmp_path) as ledger:
            for names in ("abc", "defghij", "k"):
                settle_all(ledger, names)
                await ledger.flush()
            assert (await total(ledger)).requests == 11

    def test_one_bad_row_does_not_hold_up_the_others(self) -> None:
        rows = [usage_row(begun_request(claim(str(number)), NOON), outcome(), 1) for number in range(9)]
        rows[4] = usage_row(begun_request(claim("bad"), NOON), outcome(usage=Usage(None, 0, 0)), 1)  # type: ignore[arg-type]
        database = Database("sqlite://")
        assert database.run_now(lambda connection: _insert_all(connection, rows)) == (8, ["bad"])
        database.close()


async def test_a_clients_name_for_its_user_cannot_spoil_a_row(tmp_path: Path) -> None:
    async with open_ledger(tmp_path) as ledger:
        ledger.begin(claim("a", user="x\0" * 500))
        ledger.settle(claim("a", user="x\0" * 500), outcome())
    assert stored_rows(tmp_path)["a"].user == "x" * 128


async def test_a_number_that_no_column_holds_does_not_keep_others_from_the_database(tmp_path: Path) -> None:
    async with open_ledger(tmp_path) as ledger:
        for name, tokens in (("a", 10), ("b", 2**63), ("c", 10)):
            ledger.begin(claim(name))
            ledger.settle(claim(name), outcome(tokens))
    assert set(stored_rows(tmp_path)) == {"a", "c"}
