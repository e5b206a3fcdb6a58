"""The same key and request: one answer, made once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, func, select

from penstock.core.errors import Conflict, InvalidRequest, Overloaded, StoreUnavailable
from penstock.core.gateway_config import GatewayConfig
from penstock.core.identity import Principal
from penstock.core.request import FinishReason
from penstock.gateway.accounts import Accounts
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import AnswerStream, ReaderGone
from penstock.gateway.gateway import Gateway
from penstock.gateway.prepared import PreparedRequest
from penstock.gateway.prompts import GenerationRequest, SamplingOptions, TextPrompt
from penstock.gateway.reuse import idempotency
from penstock.gateway.reuse.idempotency import (
    Answered,
    Claimed,
    IdempotentAnswers,
    KeyClaim,
    RunsElsewhere,
    claim_key,
    keep_answer,
    release_key,
    renew_leases,
    retention_of,
)
from penstock.gateway.reuse.replay import IdempotencySettings
from penstock.gateway.reuse.reuse import AnswerReuse
from penstock.gateway.store.database import Database, sqlite_url
from penstock.gateway.store.tables import idempotent_answers
from tests.gateway.fake_engine import FakeEngine, script_text, until
from tests.gateway.ledger.samples import WallClock
from tests.gateway.reuse.test_cache import Rows


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(sqlite_url(tmp_path))
    yield database
    database.close()


@pytest.fixture(params=["memory", "database"])
def shared_database(request: pytest.FixtureRequest, database: Database) -> Database | None:
    return database if request.param == "database" else None


def make_gateway(
    engine: FakeEngine,
    database: Database | None = None,
    rows: Rows | None = None,
    clock: WallClock | None = None,
    **settings: Any,
) -> Gateway:
    clock = clock or WallClock()
    answers = IdempotentAnswers(IdempotencySettings(**settings), database, clock, lambda _: clock())
    accounts = Accounts(ledger=rows) if rows else None
    return Gateway(engine, GatewayConfig(), accounts=accounts, reuse=AnswerReuse(idempotency=answers))


def request_for(
    text: str = "hi", key: str | None = "key", workspace: str = "w", **changes: Any
) -> GenerationRequest:
    return GenerationRequest(
        prompts=(TextPrompt(text),),
        sampling=SamplingOptions(),
        principal=Principal(workspace_id=workspace),
        idempotency_key=key,
        **changes,
    )


async def read(answer: AnswerStream) -> list[Delta]:
    return [delta async for deltas in answer for delta in deltas]


async def recorded(gateway: Gateway) -> None:
    """Wait until every answer is over and its record is written."""
    await gateway.reuse.idempotency.close()


class CountedCalls:
    """A function of the module under test that counts its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self._function = getattr(idempotency, name)
        self.num_calls = 0
        monkeypatch.setattr(idempotency, name, self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.num_calls += 1
        return self._function(*args, **options)

    async def two_more(self) -> None:
        """Wait for two more calls: the second of them began after now, and the one before it has ended."""
        enough = self.num_calls + 2
        await until(lambda: self.num_calls >= enough)


class TestRepeats:
    async def test_a_finished_answer_comes_again(self, shared_database: Database | None) -> None:
        engine, rows = FakeEngine(script_text("Grüße")), Rows()
        gateway = make_gateway(engine, shared_database, rows)
        first = await gateway.submit(request_for(request_id="a"))
        deltas = await read(first)
        await recorded(gateway)
        second = await gateway.submit(request_for(request_id="b"))
        assert await read(second) == deltas
        assert second.id == first.id
        assert len(engine.added) == 1
        assert [(claim.request_id, outcome.is_cached) for claim, outcome in rows.settled] == [
            ("a", False),
            ("b", True),
        ]

    async def test_a_repeat_reads_along_from_the_beginning(self, shared_database: Database | None) -> None:
        engine, rows = FakeEngine(), Rows()
        gateway = make_gateway(engine, shared_database, rows)
        first = await gateway.submit(request_for())
        name = engine.added[0].id
        engine.emit(name, *b"ab")
        assert (await anext(first))[0].text == "ab"
        second, third = await asyncio.gather(gateway.submit(request_for()), gateway.submit(request_for()))
        reading = asyncio.create_task(third.collect())
        assert (await anext(second))[0].text == "ab"
        engine.emit(name, *b"cd", finish_reason=FinishReason.LENGTH)
        assert [delta.text for delta in await read(first)] == ["cd"]
        assert [delta.text for delta in await read(second)] == ["cd"]
        assert [delta.text for delta in await reading] == ["abcd"]
        assert len(engine.added) == 1
        assert sorted(outcome.is_cached for _, outcome in rows.settled) == [False, True, True]

    async def test_two_at_the_same_moment_run_once(self, shared_database: Database | None) -> None:
        engine = FakeEngine(script_text("x"))
        gateway = make_gateway(engine, shared_database)
        answers = await asyncio.gather(*(gateway.submit(request_for()) for _ in range(8)))
        texts = await asyncio.gather(*(answer.collect() for answer in answers))
        assert len(engine.added) == 1
        assert len({str(deltas) for deltas in texts}) == 1

    async def test_another_request_with_the_key_is_a_conflict(self, shared_database: Database | None) -> None:
        engine = FakeEngine()
        gateway = make_gateway(engine, shared_database)
        first = await gateway.submit(request_for())
        with pytest.raises(Conflict):
            await gateway.submit(request_for("other"))
        engine.emit(engine.added[0].id, 65, finish_reason=FinishReason.STOP)
        await read(first)
        await recorded(gateway)
        with pytest.raises(Conflict):
            await gateway.submit(request_for("other"))

    async def test_keys_belong_to_a_workspace(self, shared_database: Database | None) -> None:
        engine = FakeEngine(script_text("x"))
        gateway = make_gateway(engine, shared_database)
        await read(await gateway.submit(request_for()))
        await read(await gateway.submit(request_for("other", workspace="w2")))
        assert len(engine.added) == 2

    async def test_a_failure_frees_the_key(self, shared_database: Database | None) -> None:
        engine = FakeEngine(lambda request: [Overloaded("no")])
        gateway = make_gateway(engine, shared_database)
        with pytest.raises(Overloaded):
            await read(await gateway.submit(request_for()))
        await recorded(gateway)
        with pytest.raises(InvalidRequest):
            await gateway.submit(request_for(n=0))
        engine.script = script_text("x")
        assert (await read(await gateway.submit(request_for("now another"))))[0].text == "x"

    async def test_a_day_later_the_key_is_new(self, shared_database: Database | None) -> None:
        engine, clock = FakeEngine(script_text("x")), WallClock()
        gateway = make_gateway(engine, shared_database, clock=clock)
        await read(await gateway.submit(request_for()))
        await recorded(gateway)
        clock.now += 86_400
        await read(await gateway.submit(request_for("other")))
        assert len(engine.added) == 2

    @pytest.mark.parametrize("key", ["", "x" * 256])
    async def test_a_key_has_a_sensible_length(self, key: str) -> None:
        with pytest.raises(InvalidRequest):
            await make_gateway(FakeEngine()).submit(request_for(key=key))


class TestReadersWhoLeave:
    async def test_the_answer_runs_on_and_a_retry_finds_it(self) -> None:
        engine = FakeEngine()
        gateway = make_gateway(engine)
        first = await gateway.submit(request_for())
        engine.emit(engine.added[0].id, *b"ab")
        await anext(first)
        first.cancel()
        with pytest.raises(ReaderGone):
            await anext(first)
        assert engine.aborted == []
        again = await gateway.submit(request_for())
        engine.emit(engine.added[0].id, *b"c", finish_reason=FinishReason.STOP)
        assert "".join(delta.text for delta in await read(again)) == "abc"
        assert len(engine.added) == 1

    async def test_nobody_comes_back_in_time(self) -> None:
        engine = FakeEngine()
        gateway = make_gateway(engine, abandoned_after_s=0.01)
        first = await gateway.submit(request_for())
        first.cancel()
        await until(lambda: engine.aborted)
        await recorded(gateway)
        await gateway.submit(request_for())
        assert len(engine.added) == 2

    async def test_somebody_still_reads(self) -> None:
        engine = FakeEngine()
        gateway = make_gateway(engine, abandoned_after_s=0.0)
        first, second = await gateway.submit(request_for()), await gateway.submit(request_for())
        first.cancel()
        engine.emit(engine.added[0].id, *b"ab")
        assert (await anext(second))[0].text == "ab", "it came later than an abort after 0 seconds"
        assert engine.aborted == []
        second.cancel()
        await until(lambda: len(engine.aborted) == 1)


class TestAcrossProcesses:
    async def test_after_a_restart(self, database: Database) -> None:
        engine = FakeEngine(script_text("x"))
        first = make_gateway(engine, database)
        answer = await read(await first.submit(request_for()))
        await recorded(first)
        restarted = make_gateway(engine, database)
        assert await read(await restarted.submit(request_for())) == answer
        with pytest.raises(Conflict):
            await restarted.submit(request_for("other"))
        assert len(engine.added) == 1

    async def test_closing_waits_for_a_record_that_is_being_written(
        self, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, written = threading.Event(), threading.Event()

        def write_slowly(*args: Any, **options: Any) -> None:
            begun.set()
            time.sleep(0.1)
            keep_answer(*args, **options)
            written.set()

        monkeypatch.setattr(idempotency, "keep_answer", write_slowly)
        gateway = make_gateway(FakeEngine(script_text("x")), database)
        await read(await gateway.submit(request_for()))
        await until(begun.is_set)
        await gateway.reuse.idempotency.close()
        assert written.is_set()

    async def test_while_another_gateway_runs_it(
        self, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(idempotency, "POLL_S", 0.001)
        engine = FakeEngine()
        first = await make_gateway(engine, database).submit(request_for())
        elsewhere = make_gateway(FakeEngine(), database)
        repeat = asyncio.create_task(elsewhere.submit(request_for()))
        with pytest.raises(Conflict):
            await make_gateway(FakeEngine(), database).submit(request_for("other"))
        assert not repeat.done()
        engine.emit(engine.added[0].id, 65, finish_reason=FinishReason.STOP)
        deltas = await read(first)
        assert await read(await repeat) == deltas

    async def test_gateways_whose_clocks_differ_run_it_once(
        self, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(idempotency, "POLL_S", 0.001)
        engines = FakeEngine(), FakeEngine()
        clocks = WallClock(), WallClock()
        clocks[1].now += 3600.0
        first, second = (
            Gateway(
                engine,
                GatewayConfig(),
                reuse=AnswerReuse(
                    idempotency=IdempotentAnswers(IdempotencySettings(), database, wall_clock=clock)
                ),
            )
            for engine, clock in zip(engines, clocks, strict=True)
        )
        answer = await first.submit(request_for())
        claims = CountedCalls(monkeypatch, "claim_key")
        repeat = asyncio.create_task(second.submit(request_for()))
        await claims.two_more()
        assert not repeat.done()
        engines[0].emit(engines[0].added[0].id, 65, finish_reason=FinishReason.STOP)
        assert await read(await repeat) == await read(answer)
        assert not engines[1].added

    @pytest.mark.parametrize("step_s", [-86_400.0, 86_400.0])
    async def test_a_step_of_the_clock_changes_no_wait(
        self, database: Database, monkeypatch: pytest.MonkeyPatch, step_s: float
    ) -> None:
        monkeypatch.setattr(idempotency, "POLL_S", 0.001)
        clock = WallClock()
        running, elsewhere = (
            Gateway(
                FakeEngine(),
                GatewayConfig(),
                reuse=AnswerReuse(
                    idempotency=IdempotentAnswers(IdempotencySettings(), database, wall_clock=clock)
                ),
            )
            for _ in range(2)
        )
        loop, late_s = asyncio.get_running_loop(), 0.0
        loop_time = loop.time
        monkeypatch.setattr(loop, "time", lambda: loop_time() + late_s)
        answer = await running.submit(request_for())
        claims = CountedCalls(monkeypatch, "claim_key")
        repeat = asyncio.create_task(elsewhere.submit(request_for()))
        await claims.two_more()
        clock.now += step_s
        await claims.two_more()
        assert not repeat.done()
        clock.now -= 3600.0
        late_s = idempotency.MAX_WAIT_S
        with pytest.raises(Conflict):
            await asyncio.wait_for(repeat, 60)
        answer.cancel()

    async def test_a_claim_is_renewed_while_its_request_is_prepared(
        self, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(idempotency, "RENEWAL_S", 0.001)
        renewals, prepared = CountedCalls(monkeypatch, "renew_leases"), asyncio.Event()
        gateway = make_gateway(FakeEngine(script_text("x")), database)
        prepare = gateway._prepare

        async def slowly(work: PreparedRequest) -> None:
            await prepared.wait()
            await prepare(work)

        monkeypatch.setattr(gateway, "_prepare", slowly)
        asking = asyncio.create_task(gateway.submit(request_for()))
        renewing = asyncio.create_task(gateway.reuse.idempotency.run())
        await renewals.two_more()
        renewing.cancel()
        prepared.set()
        await read(await asking)

    async def test_a_client_that_leaves_during_the_claim_frees_the_key(
        self, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        claims, may_claim = threading.Event(), threading.Event()

        def slow(*args: Any, **options: Any) -> Any:
            claims.set()
            may_claim.wait(60)
            return claim_key(*args, **options)

        monkeypatch.setattr(idempotency, "claim_key", slow)
        gateway = make_gateway(FakeEngine(script_text("yes")), database)
        leaving = asyncio.ensure_future(gateway.submit(request_for()))
        await until(claims.is_set)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        may_claim.set()
        again = make_gateway(FakeEngine(script_text("yes")), database)
        await recorded(gateway)
        answer = await asyncio.wait_for(again.submit(request_for()), idempotency.LEASE_S / 2)
        assert "".join(delta.text for delta in await read(answer)) == "yes"

    async def test_whoever_ran_it_has_died(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(idempotency, "POLL_S", 0.001)
        clock, claims = WallClock(), CountedCalls(monkeypatch, "claim_key")
        await make_gateway(FakeEngine(), database, clock=clock).submit(request_for())
        engine = FakeEngine(script_text("x"))
        repeat = asyncio.create_task(make_gateway(engine, database, clock=clock).submit(request_for()))
        await claims.two_more()
        assert not repeat.done()
        clock.now += idempotency.LEASE_S
        assert (await read(await repeat))[0].text == "x"

    async def test_without_the_database_it_holds_within_the_process(
        self, database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def away(*args: Any, **options: Any) -> Any:
            raise StoreUnavailable("gone")

        monkeypatch.setattr(Database, "run", away)
        engine = FakeEngine(script_text("x"))
        gateway = make_gateway(engine, database)
        for key in ("one", "one", "two"):
            await read(await gateway.submit(request_for(key=key)))
            await recorded(gateway)
        assert len(engine.added) == 2
        assert len([line for line in caplog.messages if "within this process only" in line]) == 1


class TestStore:
    async def test_leases_and_expiry(self, database: Database) -> None:
        def claim(owner: str, now: float, fingerprint: bytes = b"f") -> Any:
            mine = KeyClaim(workspace_id="w", idempotency_key="k", fingerprint=fingerprint, owner=owner)
            return mine, database.run_now(
                lambda connection: claim_key(
                    connection, mine, now, lease_until=now + 30, expires_at=now + 100
                )
            )

        mine, result = claim("a", 0)
        assert result == Claimed()
        assert claim("b", 10)[1] == RunsElsewhere(b"f")
        database.run_now(lambda connection: renew_leases(connection, [mine], lease_until=50))
        assert claim("b", 40)[1] == RunsElsewhere(b"f")
        thief, result = claim("b", 51, b"g")
        assert result == Claimed()
        database.run_now(lambda connection: keep_answer(connection, mine, b"late", 200))
        assert claim("c", 52)[1] == RunsElsewhere(b"g"), "the first owner lost its claim"
        database.run_now(lambda connection: keep_answer(connection, thief, b"answer", 200))
        assert claim("c", 199)[1] == Answered(b"g", b"answer")
        database.run_now(lambda connection: release_key(connection, thief))
        assert claim("c", 199)[1] == Answered(b"g", b"answer"), "an answer is not released"
        assert claim("c", 200)[1] == Claimed()
        assert await retention_of(database, 1000).sweep(299) == 0
        kept = retention_of(database, 1000)
        assert await kept.sweep(300) == 1
        assert claim("c", 400)[1] == Claimed()
        assert [await kept.sweep(now) for now in (600, 299, 900)] == [0, 0, 1], "the clock was set back"

    async def test_the_oldest_answers_of_a_workspace_with_too_many_bytes_go_first(
        self, database: Database
    ) -> None:
        """Each answer may have megabytes, and a client may send any number of keys a day."""
        claims = [
            KeyClaim(
                workspace_id=workspace,
                idempotency_key=str(number),
                fingerprint=b"f",
                owner=f"{workspace}{number}",
            )
            for workspace in ("w", "other")
            for number in range(250)
        ]

        def keep(connection: Connection) -> None:
            for at, claim in enumerate(claims):
                assert claim_key(connection, claim, at, at + 30, at + 100) == Claimed()
                keep_answer(connection, claim, b"x" * 100, expires_at=at + 5000)

        database.run_now(keep)
        await retention_of(database, 1050).note_added("w", 0)
        now = 1000
        known = [
            (claim.workspace_id, int(claim.idempotency_key))
            for claim in claims
            if database.run_now(
                lambda connection, claim=claim: claim_key(connection, claim, now, now + 30, now + 100)
            )
            != Claimed()
        ]
        assert known == [("w", number) for number in range(240, 250)] + [
            ("other", number) for number in range(250)
        ]

    async def test_what_a_workspace_keeps_in_the_database_is_bounded(self, database: Database) -> None:
        gateway = Gateway(
            FakeEngine(script_text("x")),
            GatewayConfig(),
            reuse=AnswerReuse(
                idempotency=IdempotentAnswers(IdempotencySettings(max_workspace_bytes=1), database)
            ),
        )
        await read(await gateway.submit(request_for()))
        await recorded(gateway)
        kept = select(func.count()).select_from(idempotent_answers)
        assert database.run_now(lambda connection: connection.scalar(kept)) == 0

    def test_a_clock_that_is_set_back_keeps_no_claim_of_a_lost_process(self, database: Database) -> None:
        def claim(owner: str, now: float) -> Any:
            mine = KeyClaim(workspace_id="w", idempotency_key="k", fingerprint=b"f", owner=owner)
            until = {"lease_until": now + 30, "expires_at": now + 9000}
            return database.run_now(lambda connection: claim_key(connection, mine, now, **until))

        assert claim("lost", 8000) == Claimed()
        assert claim("next", 1000) == RunsElsewhere(b"f"), "its owner may live"
        assert claim("next", 1029) == RunsElsewhere(b"f")
        assert claim("next", 1030) == Claimed()

    async def test_leases_of_running_requests_are_renewed(
        self, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(idempotency, "RENEWAL_S", 0.001)
        clock, renewals = WallClock(), CountedCalls(monkeypatch, "renew_leases")
        gateway = make_gateway(FakeEngine(), database, clock=clock)
        await gateway.submit(request_for())
        renewing = asyncio.create_task(gateway.reuse.idempotency.run())
        clock.now += idempotency.LEASE_S - 1
        await renewals.two_more()
        renewing.cancel()
        clock.now += idempotency.LEASE_S - 1
        other = KeyClaim(workspace_id="w", idempotency_key="key", fingerprint=b"f", owner="o")
        result = database.run_now(
            lambda connection: claim_key(connection, other, clock.now, clock.now + 30, clock.now + 100)
        )
        assert isinstance(result, RunsElsewhere)


async def test_a_request_that_ends_late_leaves_the_lease_of_its_keys_next_owner(tmp_path: Path) -> None:
    """A failed request frees its key, which another request may claim before the first has heard of it."""
    database = Database(sqlite_url(tmp_path))
    answers = IdempotentAnswers(IdempotencySettings(), database)
    first, second = (
        KeyClaim(workspace_id="w", idempotency_key="k", fingerprint=b"f" * 32, owner=owner) for owner in "ab"
    )
    key = "w", "k"
    answers._running[key] = None  # type: ignore[assignment]
    answers._fingerprints[key] = first.fingerprint
    answers._claims[key] = second
    await answers._on_over(key, first, None)
    assert answers._claims == {key: second}
    database.close()
