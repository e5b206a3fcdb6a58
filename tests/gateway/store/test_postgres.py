"""The same promises on a real PostgreSQL server."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, event, func, select, text

from penstock.cluster.registry import RegistryError
from penstock.core.errors import (
    AuthenticationFailed,
    NotFound,
    PenstockError,
    PreconditionFailed,
    StoreUnavailable,
)
from penstock.core.identity import Scope
from penstock.gateway.blobs.blobs import FileFolder
from penstock.gateway.files import FileStore
from penstock.gateway.ledger.journal import UsageRow
from penstock.gateway.ledger.usage_store import insert_rows
from penstock.gateway.responses.objects import ObjectStore
from penstock.gateway.responses.store import ResponseStore
from penstock.gateway.settings.live import LiveSettings, SharedSettings
from penstock.gateway.settings.store import SettingsStore
from penstock.gateway.store import database as database_module
from penstock.gateway.store import versions
from penstock.gateway.store.database import Database
from penstock.gateway.store.tables import fleet_leases, keys, metadata, tenant_revision, workspaces
from penstock.gateway.store.versions import Follower
from penstock.gateway.tenants.keyring import TRUST_S
from penstock.gateway.tenants.records import KEYS, KeyChanges, NewKey
from penstock.gateway.uploads import UploadPlan, Uploads
from penstock.serve.database_registry import DatabaseRegistry
from tests.gateway.responses.test_objects import thing
from tests.gateway.responses.test_store import response
from tests.gateway.store.postgres_server import PostgresServer, running_postgres
from tests.gateway.store.test_migrations import check_migration, differences
from tests.gateway.tenants.conftest import ACTOR, Time, World

psycopg = pytest.importorskip("psycopg", reason="needs the extra postgres")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


@pytest.fixture
def url(server: PostgresServer) -> str:
    """An empty database."""

    def empty(connection: Connection) -> None:
        metadata.drop_all(connection)
        connection.execute(text("DROP TABLE IF EXISTS alembic_version"))

    database = Database(server.url)
    database._transaction(empty, reads_only=False)
    database.close()
    return server.url


@pytest.fixture
def world(url: str) -> Iterator[World]:
    world = World(Database(url), Time())
    yield world
    world.database.close()


def test_a_setting_that_the_server_refuses_is_one_warning(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(database_module._SERVER_SETTINGS, "no_such_setting", 7)
    database = Database(url)
    with database._engine.connect(), database._engine.connect() as connection:
        assert connection.execute(text("SHOW idle_in_transaction_session_timeout")).scalar() == "10s"
    database.close()
    warnings = [record.getMessage() for record in caplog.records if "no_such_setting" in record.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].startswith("the database server refuses no_such_setting = 7 (unrecognized")


def test_the_migrations_make_the_tables_that_the_code_describes(world: World) -> None:
    assert world.database.run_now(differences) == []


def test_a_database_of_the_oldest_version_gets_the_same_tables(world: World, url: str) -> None:
    check_migration(world.database, Database(url))


async def test_the_registry_of_a_shared_fleet(url: str) -> None:
    registry = DatabaseRegistry(Database(url))
    try:
        await registry.publish("a", b"first", 60.0)
        await registry.publish("a", b"binary\0\xff", 60.0)
        await registry.publish("b", b"", -1.0)  # whose lease has ended
        assert await registry.records() == {"a": b"binary\0\xff"}
    finally:
        await registry.close()


async def test_a_change_of_settings_is_announced(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "SLOW_POLL_S", 3600.0)
    ours, theirs = Database(url), Database(url)
    live, follower = LiveSettings(), Follower(theirs)
    await SharedSettings(SettingsStore(theirs), live, None).start(follower, seeds=False)
    following = asyncio.create_task(follower.run())
    async with asyncio.timeout(60):
        while not follower._hears:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(versions, "POLL_S", 3600.0)
        await SettingsStore(ours).replace(ACTOR, {"response_cache": {"ttl_s": 7}}, 0)
        while live.source.version != 1:
            await asyncio.sleep(0.001)
    assert live.current.response_cache.ttl_s == 7
    changes = [SettingsStore((ours, theirs)[number % 2]).replace(ACTOR, {}, 1) for number in range(6)]
    outcomes = await asyncio.gather(*changes, return_exceptions=True)
    assert sum(isinstance(outcome, PreconditionFailed) for outcome in outcomes) == 5
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following
    ours.close()
    theirs.close()


def test_a_full_disk_is_an_outage_that_is_logged_once(url: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        UsageRow(f"{number}", 1.0, "o", "w", "k", "m", "chat", "default", None, status="completed")
        for number in range(2000)
    ]
    database = Database(url)
    database.run_now(lambda connection: None)
    fill = [
        "CREATE FUNCTION no_space() RETURNS trigger AS $$ BEGIN RAISE EXCEPTION 'No space left on device' "
        "USING ERRCODE = '53100'; END $$ LANGUAGE plpgsql",
        "CREATE TRIGGER full_disk BEFORE INSERT ON usage FOR EACH ROW WHEN (NEW.request_id = '300') "
        "EXECUTE FUNCTION no_space()",
    ]
    with psycopg.connect(url) as connection:
        for statement in fill:
            connection.execute(statement)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            database.run_now(lambda connection: insert_rows(connection, rows))
    assert [record.name for record in caplog.records] == ["penstock.gateway.store.database"]
    with psycopg.connect(url) as connection:
        connection.execute("DROP FUNCTION no_space CASCADE")
    assert database.run_now(lambda connection: insert_rows(connection, rows)) == 2000
    database.close()


def test_several_processes_start_on_an_empty_database_at_once(url: str) -> None:
    script = (
        "import sys; from penstock.gateway.store.database import Database; "
        "database = Database(sys.argv[1]); database.migrate(); database.close()"
    )
    starting = [subprocess.Popen([sys.executable, "-c", script, url]) for _ in range(3)]
    assert [process.wait() for process in starting] == [0, 0, 0]
    database = Database(url)
    count = select(func.count()).select_from(workspaces)
    assert database.run_now(lambda connection: connection.scalar(count)) == 1
    database.close()


async def test_a_key_from_its_making_to_its_end(world: World, url: str) -> None:
    organization = await world.directory.create_organization(ACTOR, "Acme")
    workspace = await world.directory.create_workspace(ACTOR, "W", organization.id)
    request = NewKey(name="k", workspace_id=workspace.id, scopes=(Scope.USAGE,), allowed_models=("m",))
    issued = await world.directory.create_key(ACTOR, request)
    other_gateway = World(Database(url), world.time)
    here, elsewhere = world.ring(), other_gateway.ring()
    for ring in (here, elsewhere):
        principal = await ring.identify(issued.secret)
        assert (principal.organization_id, principal.workspace_id) == (organization.id, workspace.id)
        assert (principal.scopes, principal.allowed_models) == ({Scope.USAGE}, {"m"})
        await ring.write_uses()
    assert (await world.directory.find(KEYS, issued.key.id)).last_used_at == world.time.wall()
    changed = await world.directory.update_key(ACTOR, issued.key.id, KeyChanges(allowed_models=None))
    assert changed.allowed_models is None
    await world.directory.revoke_key(ACTOR, issued.key.id)
    world.time.pass_s(TRUST_S)
    for ring in (here, elsewhere):
        with pytest.raises(AuthenticationFailed, match="revoked"):
            await ring.identify(issued.secret)
        await ring.close()
    other_gateway.database.close()
    page = await world.directory.keys(limit=1)
    assert [key.status(0) for key in page.data] == ["revoked"]
    actions = [entry.action for entry in (await world.directory.audit()).data]
    assert actions == ["key.revoke", "key.update", "key.create", "workspace.create", "organization.create"]


async def test_pages_show_everything_once(world: World) -> None:
    made = [(await world.directory.create_key(ACTOR, NewKey(name=f"k{n}"))).key.id for n in range(5)]
    first = await world.directory.keys(limit=3)
    rest = await world.directory.keys(limit=3, after=first.data[-1].id)
    assert sorted(key.id for key in (*first.data, *rest.data)) == sorted(made)


async def test_numbers_of_changes_rise_without_gaps_or_repeats(world: World) -> None:
    world.database.migrate()
    await asyncio.gather(*(world.directory.create_key(ACTOR, NewKey(name=f"k{n}")) for n in range(20)))

    def revisions(connection: Connection) -> tuple[list[int], int]:
        rows = connection.execute(select(keys.c.revision)).scalars()
        return sorted(rows), connection.execute(select(tenant_revision.c.revision)).scalar_one()

    assert await world.database.run(revisions) == (list(range(2, 22)), 21)


async def test_work_that_says_it_only_reads_cannot_write(world: World) -> None:
    world.database.migrate()

    def write(connection: Connection) -> None:
        connection.execute(workspaces.update().values(name="x"))

    with pytest.raises(Exception, match="read-only transaction"):
        await world.database.run(write, reads_only=True)


@pytest.mark.parametrize("text_that_no_id_has", ["a\0b", "\ud800", "", "ü", "x" * 1000])
async def test_odd_ids_are_not_found_rather_than_an_accident(world: World, text_that_no_id_has: str) -> None:
    with pytest.raises(NotFound):
        await world.directory.find(KEYS, text_that_no_id_has)
    assert (await world.directory.keys(workspace_id=text_that_no_id_has)).data == ()
    assert (await world.directory.audit(target=text_that_no_id_has)).data == ()
    with pytest.raises(PenstockError):
        await world.directory.keys(after=text_that_no_id_has)


async def test_a_server_that_restarts_is_found_again(world: World, server: PostgresServer) -> None:
    issued = await world.directory.create_key(ACTOR, NewKey(name="k"))
    ring = world.ring()
    await ring.identify(issued.secret)
    server.stop()
    try:
        with pytest.raises(StoreUnavailable):
            await world.directory.keys()
        world.time.pass_s(TRUST_S)
        assert (await ring.identify(issued.secret)).key_id == issued.key.id
    finally:
        server.start()
    assert len((await world.directory.keys()).data) == 1
    world.time.pass_s(TRUST_S)
    assert (await ring.identify(issued.secret)).key_id == issued.key.id
    await ring.close()


async def test_a_server_that_became_a_standby_is_away_for_writers(
    world: World, server: PostgresServer
) -> None:
    issued = await world.directory.create_key(ACTOR, NewKey(name="k"))
    server.become("standby")
    try:
        with contextlib.suppress(StoreUnavailable):  # connections that the restart has broken
            await world.directory.keys()
        with pytest.raises(StoreUnavailable):
            await world.directory.create_key(ACTOR, NewKey(name="second"))
        assert [key.id for key in (await world.directory.keys()).data] == [issued.key.id]
    finally:
        server.become("primary")
    with contextlib.suppress(StoreUnavailable):
        await world.directory.keys()
    await world.directory.create_key(ACTOR, NewKey(name="second"))


async def test_a_connection_that_takes_no_writes_is_not_used_again(world: World) -> None:
    """The address may lead to a new primary by now: the connection to the standby stays open for as long as the
    standby runs."""

    def connection_id(connection: Connection) -> int:
        return int(connection.scalar(text("SELECT pg_backend_pid()")) or 0)

    def write_on_standby(connection: Connection) -> None:
        connection.execute(text("SET TRANSACTION READ ONLY"))
        connection.execute(text("CREATE TABLE refused ()"))

    database = world.database
    before = await database.run(connection_id)
    assert await database.run(connection_id) == before
    with pytest.raises(StoreUnavailable):
        await database.run(write_on_standby)
    assert await database.run(connection_id) != before


async def test_a_response_with_a_nul_in_its_id_does_not_exist(world: World) -> None:
    world.database.migrate()
    responses = ResponseStore(world.database)
    assert await responses.find("default", "a\0") is None
    assert await responses.history("default", "a\0", keep_until=0.0) is None
    assert not await responses.delete("default", "a\0")


def test_objects_events_and_uploads_on_postgresql(url: str, tmp_path: Path) -> None:
    database = Database(url)

    async def use() -> None:
        responses = ResponseStore(database, now=lambda: 0.0)
        await responses.add(response("a", num_event_bytes=0))
        for first, events in ((0, b"one"), (5, b"two")):
            await responses.add_events("w", "a", first, events)
        assert await responses.events("w", "a", 6) == [(5, b"two")]
        assert await responses.events("v", "a", 0) == []
        assert await responses.delete("w", "a")
        objects = ObjectStore(database, now=lambda: 0.0)
        await objects.add([thing("c", metadata={"x": "1"}), thing("1", "c"), thing("2", "c")])
        found = await objects.children("w", "item", "c", keep_until=9e9, param="x")
        assert found is not None
        assert [each.id for each in found] == ["1", "2"]
        page = await objects.page("w", "conversation", limit=1, order="desc", metadata={"x": "1"})
        assert [each.id for each in page.objects] == ["c"]
        assert await objects.delete("w", "conversation", "c")
        uploads = Uploads(FileStore(database, FileFolder(tmp_path / "files")))
        upload = await uploads.create("w", "a.txt", UploadPlan(purpose="batch", num_bytes=3))
        part = await uploads.files.upload("w", prefix="part_")
        await part.write(b"abc")
        kept = await uploads.add_part(upload, part)
        _, file = await uploads.complete("w", upload.id, [kept.id])
        assert (await uploads.files.get("w", file.id)).num_bytes == 3

    try:
        asyncio.run(use())
    finally:
        database.close()


def lose_patience(connection: Connection) -> None:
    """The server ends this transaction soon after its next statement. Until now, it is as patient as with any other:
    a busy machine may stop between two statements."""
    patience = connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar()
    assert patience == f"{database_module._GONE_S}s"
    connection.exec_driver_sql("SET idle_in_transaction_session_timeout = 500")


async def test_a_process_that_stops_within_a_transaction_keeps_no_lock(url: str) -> None:
    """As one does that is frozen or cut off while it renews the lease of the leader."""
    other = Database(url)
    registry = DatabaseRegistry(other)
    assert await registry.lead("first", 0.01, 0) == 1
    frozen, has_lock, resume = Database(url), threading.Event(), threading.Event()

    def renew(connection: Connection) -> None:
        connection.execute(select(fleet_leases).with_for_update())
        lose_patience(connection)
        has_lock.set()
        resume.wait(60.0)
        connection.execute(select(fleet_leases))

    renewing = asyncio.create_task(frozen.run(renew))
    try:
        assert await asyncio.to_thread(has_lock.wait, 60.0)
        async with asyncio.timeout(60):
            assert await registry.lead("second", 5.0, 0) == 2
    finally:
        resume.set()
    with pytest.raises(StoreUnavailable):
        await renewing
    frozen.close()
    other.close()


async def test_a_leader_that_stops_between_its_check_and_its_document_writes_nothing(url: str) -> None:
    other = Database(url)
    registry = DatabaseRegistry(other)
    assert await registry.lead("first", 0.01, 0) == 1
    assert await registry.write("orders", b"before", 1)
    frozen, is_checked, resume = Database(url), threading.Event(), threading.Event()

    def stop(connection: Connection, cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("INSERT INTO fleet_documents"):
            lose_patience(connection)
            is_checked.set()
            resume.wait(60.0)

    event.listen(frozen._engine, "before_cursor_execute", stop)
    writing = asyncio.create_task(DatabaseRegistry(frozen).write("orders", b"late", 1))
    try:
        assert await asyncio.to_thread(is_checked.wait, 60.0)
        async with asyncio.timeout(60):
            while (epoch := await registry.lead("second", 60.0, 0)) is None:
                await asyncio.sleep(0.01)
        assert epoch == 2
        assert await registry.write("orders", b"after", 2)
    finally:
        resume.set()
    with pytest.raises(RegistryError):
        await writing
    assert await registry.documents() == {"orders": b"after"}
    frozen.close()
    other.close()


async def test_a_server_without_one_of_the_settings_is_used_all_the_same(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As servers that are not Linux lack `tcp_user_timeout`."""
    monkeypatch.setattr(database_module, "_SERVER_SETTINGS", {"unknown": 1, "tcp_keepalives_idle": 7})
    database = Database(url)
    try:
        told = await database.run(lambda connection: connection.scalar(text("SHOW tcp_keepalives_idle")))
    finally:
        database.close()
    assert told == "7"
