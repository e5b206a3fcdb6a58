"""Releases in a database: what was written down is what comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from sqlalchemy import update

from penstock.cluster.leadership import Leadership
from penstock.cluster.releases import ReleaseOwner
from penstock.cluster.staged_records import ReleaseRecord, changed
from penstock.control.release import ReleaseConfig, ReleaseEvent, Releases, Stage
from penstock.core.errors import Conflict, Superseded
from penstock.gateway.store.database import Database, sqlite_url
from penstock.gateway.store.tables import releases
from penstock.serve.database_registry import SERVER_LEASE, DatabaseRegistry, DatabaseReleases, OwnedReleases
from tests.cluster.control_stage import SPEC


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(sqlite_url(tmp_path))
    yield database
    database.close()


def record(name: str, created_at: float) -> ReleaseRecord:
    config = ReleaseConfig(canary_shares=(0.5,), min_stage_s=1.0)
    return ReleaseRecord(
        id=name,
        model="echo",
        base_revision=SPEC.revision,
        stable=(SPEC,),
        candidate=(changed(SPEC, weights=None, settings={"max_num_seqs": 7}, revision="v2"),),
        num_replicas=(2,),
        state=Releases(config).start(SPEC.revision, "v2", now=created_at),
        config=config,
        created_at=created_at,
    )


async def test_what_is_written_comes_back_oldest_first(database: Database) -> None:
    store = DatabaseReleases(database)
    older, newer = record("rel_b", 1.0), record("rel_a", 2.0)
    await store.save(newer)
    await store.save(older)
    state = Releases(older.config).happened(older.state, ReleaseEvent.WARMED_UP, now=5.0)
    await store.save(older.at(state))
    assert await store.load() == (replace(older, state=state), newer)


async def test_a_server_that_releases_nothing_leaves_no_file(database: Database, tmp_path: Path) -> None:
    assert await DatabaseReleases(database).load() == ()
    assert list(tmp_path.iterdir()) == []


class Server:
    """One of several servers on a database: its owner of releases, and what the owner has its service do."""

    def __init__(
        self,
        database: Database,
        name: str,
        lease_s: float = 600.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        registry = DatabaseRegistry(database, SERVER_LEASE)
        self.leadership = Leadership(registry, name, lease_s=lease_s, now=now)
        self.store = OwnedReleases(database, self.leadership)
        self.running: set[str] = set()
        self.owner = ReleaseOwner(self.leadership, self, self.store, {"echo": SPEC.revision})  # type: ignore[arg-type]

    async def resume(self, records: Sequence[ReleaseRecord], base_revisions: dict[str, str]) -> None:
        self.running = {record.id for record in records if not record.state.is_over}

    async def give_up(self) -> None:
        self.running.clear()

    def is_active(self, model: str) -> bool:
        return bool(self.running)

    async def end_release(self, ended: ReleaseRecord) -> None:
        state = Releases(ended.config).happened(ended.state, ReleaseEvent.OPERATOR_ROLLS_BACK, now=9.0)
        await self.store.save(ended.at(replace(state, stage=Stage.ROLLED_BACK)))
        self.running.clear()


async def until_owned(server: Server) -> None:
    async with asyncio.timeout(60):
        while not server.running:
            await server.owner.look()
            await asyncio.sleep(0.02)


async def test_one_of_several_servers_goes_on_with_a_release(database: Database) -> None:
    unfinished = record("rel_a", 1.0)
    await DatabaseReleases(database).save(unfinished)
    first, second = Server(database, "first"), Server(database, "second")
    await first.owner.begin()
    await second.owner.begin()
    assert (first.running, second.running) == ({"rel_a"}, set())
    with pytest.raises(Conflict, match="Another server"):
        async with second.owner.claimed():
            pytest.fail("two owners")
    await first.end_release(unfinished)
    await first.owner.look()  # gives the lease up
    async with second.owner.claimed():
        await second.owner.look()
        assert second.leadership.epoch is not None, "not given up while a release starts"


async def test_a_first_look_that_takes_longer_than_the_lease_is_no_other_server(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    server = Server(database, "only", lease_s=5.0, now=lambda: now_s)
    leadership, lead = server.leadership, server.leadership._registry.lead

    async def make_tables_first(candidate: str, lease_s: float, above: int) -> int | None:
        nonlocal now_s
        now_s += 10.0 if above == 0 else 0.0
        return await lead(candidate, lease_s, above)

    monkeypatch.setattr(leadership._registry, "lead", make_tables_first)
    async with server.owner.claimed():
        assert leadership.epoch == 2


async def test_a_server_goes_on_when_the_owner_has_died(database: Database) -> None:
    await DatabaseReleases(database).save(record("rel_a", 1.0))
    dead, heir = Server(database, "dead"), Server(database, "heir")
    await dead.owner.begin()
    await DatabaseRegistry(database, SERVER_LEASE).lead("dead", 0.0, 0)  # the lease ends now
    await until_owned(heir)
    # The first one was only frozen: its release is no longer its own, whatever it tries.
    with pytest.raises(Superseded):
        await dead.store.save(record("rel_a", 1.0))
    await dead.owner.look()
    assert dead.running == set()
    assert heir.running == {"rel_a"}


async def test_an_owner_that_was_slow_goes_on_if_nobody_else_came(database: Database) -> None:
    await DatabaseReleases(database).save(record("rel_a", 1.0))
    late_s = 0.0
    server = Server(database, "slow", now=lambda: time.monotonic() + late_s)
    await server.owner.begin()
    first = server.leadership.latest_epoch
    server.running = {"still the same"}
    late_s = 700.0
    await server.owner.look()
    assert server.leadership.latest_epoch == first + 1
    assert server.running == {"still the same"}


async def test_what_another_version_wrote_is_passed_over(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    store = DatabaseReleases(database)
    await store.save(record("rel_a", 1.0))
    await store.save(record("rel_b", 2.0))
    database.run_now(
        lambda connection: connection.execute(
            update(releases).where(releases.c.id == "rel_a").values(body=b'{"id": "rel_a"}')
        )
    )
    assert [known.id for known in await store.load()] == ["rel_b"]
    assert "rel_a" in caplog.text
