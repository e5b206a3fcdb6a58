"""A key signs in while it is alive and not a moment longer than promised, in every gateway, at little cost."""

from __future__ import annotations

import asyncio
import logging

import pytest
from sqlalchemy import Connection, event

from penstock.core.errors import AuthenticationFailed, StoreUnavailable
from penstock.core.identity import Scope
from penstock.core.request import Tier
from penstock.gateway.store.database import Database, sqlite_url
from penstock.gateway.tenants import keyring, records
from penstock.gateway.tenants.directory import Directory
from penstock.gateway.tenants.keyring import CHECK_EVERY_S, OUTAGE_GRACE_S, TRUST_S, KeyRing
from penstock.gateway.tenants.records import (
    KEYS,
    ORGANIZATIONS,
    WORKSPACES,
    KeyChanges,
    NewKey,
    new_secret,
    prefix_of,
)
from tests.gateway.tenants.conftest import ACTOR, World


async def test_a_key_speaks_for_its_workspace_with_what_it_was_given(world: World) -> None:
    organization = await world.directory.create_organization(ACTOR, "Acme")
    workspace = await world.directory.create_workspace(ACTOR, "W", organization.id)
    issued = await world.directory.create_key(
        ACTOR,
        NewKey(
            name="k",
            workspace_id=workspace.id,
            scopes=(Scope.INFERENCE, Scope.USAGE),
            allowed_models=("m",),
            best_tier=Tier.PRIORITY,
            caches_responses=True,
        ),
    )
    principal = await world.ring().identify(issued.secret)
    assert (principal.organization_id, principal.workspace_id) == (organization.id, workspace.id)
    assert principal.key_id == issued.key.id
    assert principal.scopes == {Scope.INFERENCE, Scope.USAGE}
    assert principal.allowed_models == {"m"}
    assert (principal.best_tier, principal.caches_responses) == (Tier.PRIORITY, True)


async def test_wrong_keys_are_refused_alike(world: World) -> None:
    issued = await world.directory.create_key(ACTOR, NewKey(name="k"))
    stranger = new_secret().secret
    ring = world.ring()
    await ring.identify(issued.secret)
    # The right prefix with another's secret: found, compared, refused.
    start = issued.secret[:16] + stranger[16:48]
    impostor = start + records._checksum(start)
    assert prefix_of(impostor) == issued.key.prefix
    for secret in (stranger, impostor):
        with pytest.raises(AuthenticationFailed, match=r"^Incorrect API key provided\.$"):
            await ring.identify(secret)
    with pytest.raises(AuthenticationFailed, match="no key looks like this"):
        await ring.identify("sk-ps-short")


async def checked(ring: KeyRing) -> None:
    """Wait for the check that a busy gateway makes beside its requests."""
    if ring._checking is not None:
        await asyncio.wait((ring._checking,))


async def test_every_gateway_refuses_a_revoked_key_within_seconds(world: World) -> None:
    issued = await world.directory.create_key(ACTOR, NewKey(name="k"))
    busy, idle = world.ring(), world.ring()
    for ring in (busy, idle):
        await ring.identify(issued.secret)
    await world.directory.revoke_key(ACTOR, issued.key.id)
    refused_after_s = None
    for tenth in range(1, 31):
        world.time.pass_s(0.1)
        try:
            await busy.identify(issued.secret)
        except AuthenticationFailed:
            refused_after_s = tenth / 10
            break
        await checked(busy)
    assert refused_after_s is not None
    assert refused_after_s <= TRUST_S
    world.time.pass_s(TRUST_S)
    with pytest.raises(AuthenticationFailed, match="revoked"):
        await idle.identify(issued.secret)  # nothing was asked of it since, so it checks before it answers


class HeldDatabase(Database):
    """Reads, and then keeps what it read to itself until it may speak."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.may_speak, self.has_read = asyncio.Event(), asyncio.Event()
        self.may_speak.set()

    async def run(self, work, *, reads_only=False):  # type: ignore[no-untyped-def]
        result = await super().run(work, reads_only=reads_only)
        self.has_read.set()
        await self.may_speak.wait()
        return result


async def test_a_check_that_began_before_a_change_does_not_settle_a_doubt(world: World) -> None:
    issued = await world.directory.create_key(ACTOR, NewKey(name="k"))
    assert world.database.file is not None
    database = HeldDatabase(sqlite_url(world.database.file.parent))
    ring = KeyRing(database, clock=world.time.clock, wall_time=world.time.wall)
    await ring.identify(issued.secret)
    world.time.pass_s(CHECK_EVERY_S)
    database.may_speak.clear()
    database.has_read.clear()
    await ring.identify(issued.secret)
    early_check = ring._checking
    assert early_check is not None
    await database.has_read.wait()
    await Directory(world.database, world.time.wall, on_change=ring.doubt).revoke_key(ACTOR, issued.key.id)
    database.may_speak.set()
    await early_check
    with pytest.raises(AuthenticationFailed, match="revoked"):
        await ring.identify(issued.secret)
    await ring.close()
    database.close()


async def test_a_database_that_never_answers_holds_nobody_up(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that was stopped, or a table that another session has locked: no error ever comes."""
    issued, unknown = [await world.directory.create_key(ACTOR, NewKey(name="k")) for _ in range(2)]
    assert world.database.file is not None
    database = HeldDatabase(sqlite_url(world.database.file.parent))
    ring = KeyRing(database, clock=world.time.clock, wall_time=world.time.wall)
    async with asyncio.timeout(120):
        await ring.identify(issued.secret)
        database.may_speak.clear()
        for module in (keyring, keyring):
            monkeypatch.setattr(module, "PATIENCE_S", 0.001)
        for _ in range(int(OUTAGE_GRACE_S / TRUST_S) - 1):
            world.time.pass_s(TRUST_S)
            assert (await ring.identify(issued.secret)).key_id == issued.key.id
        assert caplog.text.count("cannot be checked") == 1
        with pytest.raises(StoreUnavailable, match="looked up"):
            await ring.identify(unknown.secret)
        world.time.pass_s(TRUST_S)
        with pytest.raises(StoreUnavailable, match="checked"):
            await ring.identify(issued.secret)
        monkeypatch.undo()
        database.may_speak.set()
        world.time.pass_s(CHECK_EVERY_S)
        for secret in (issued.secret, unknown.secret):
            await ring.identify(secret)
        await ring.close()
    database.close()


@pytest.mark.parametrize("level", ["workspace", "organization"])
async def test_archiving_ends_the_keys_below(world: World, level: str) -> None:
    organization = await world.directory.create_organization(ACTOR, "Acme")
    workspace = await world.directory.create_workspace(ACTOR, "W", organization.id)
    issued = await world.directory.create_key(ACTOR, NewKey(name="k", workspace_id=workspace.id))
    other = await world.directory.create_key(ACTOR, NewKey(name="other"))
    ring = world.ring()
    await ring.identify(issued.secret)
    assert await ring.workspace(workspace.id) is not None
    if level == "workspace":
        await world.directory.archive(ACTOR, WORKSPACES, workspace.id)
    else:
        await world.directory.archive(ACTOR, ORGANIZATIONS, organization.id)
    world.time.pass_s(TRUST_S)
    with pytest.raises(AuthenticationFailed, match="revoked"):
        await ring.identify(issued.secret)
    assert await ring.workspace(workspace.id) is None
    await ring.identify(other.secret)


async def test_a_key_expires_on_time_without_a_look_at_the_database(world: World) -> None:
    issued = await world.directory.create_key(ACTOR, NewKey(name="k", expires_at=world.time.wall() + 0.5))
    ring = world.ring()
    await ring.identify(issued.secret)
    world.time.pass_s(0.5)
    with pytest.raises(AuthenticationFailed, match="expired"):
        await ring.identify(issued.secret)


async def test_a_changed_key_is_noticed(world: World) -> None:
    issued = await world.directory.create_key(ACTOR, NewKey(name="k"))
    ring = world.ring()
    await ring.identify(issued.secret)
    await world.directory.update_key(ACTOR, issued.key.id, KeyChanges(scopes=(Scope.ADMIN,)))
    world.time.pass_s(TRUST_S)
    assert (await ring.identify(issued.secret)).scopes == {Scope.ADMIN}


async def test_a_busy_gateway_asks_the_database_once_a_second(world: World) -> None:
    issued = [await world.directory.create_key(ACTOR, NewKey(name=f"k{n}")) for n in range(5)]
    ring = world.ring()
    for one in issued:
        await ring.identify(one.secret)
    statements = _count_statements(world.database)
    for _ in range(100):
        world.time.pass_s(0.01)
        for one in issued:
            await ring.identify(one.secret)
        await asyncio.sleep(0)
    await ring.close()
    num_reads = [statement for statement in statements if statement.startswith("SELECT")]
    assert len(num_reads) <= 2, statements


def _count_statements(database: Database) -> list[str]:
    statements: list[str] = []

    def note(connection: Connection, cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    event.listen(database._engine, "before_cursor_execute", note)
    return statements


async def test_without_a_database_there_are_no_keys_and_no_file_is_made(world: World) -> None:
    assert world.database.file is not None
    folder = world.database.file.parent / "elsewhere"
    database = Database(sqlite_url(folder))
    ring = KeyRing(database, clock=world.time.clock, wall_time=world.time.wall)
    with pytest.raises(AuthenticationFailed):
        await ring.identify(new_secret().secret)
    assert await ring.workspace("default") is not None
    assert await ring.workspace("ws_other") is None
    await ring.close()
    assert not folder.exists()
    # Once another process makes it, its keys are known.
    other = World(Database(sqlite_url(folder)), world.time)
    issued = await other.directory.create_key(ACTOR, NewKey(name="k"))
    world.time.pass_s(TRUST_S)
    assert (await ring.identify(issued.secret)).key_id == issued.key.id
    other.database.close()
    database.close()


async def test_last_uses_are_written_late_and_never_backwards(world: World) -> None:
    issued = await world.directory.create_key(ACTOR, NewKey(name="k"))
    key_id = issued.key.id
    first, second = world.ring(), world.ring()
    await first.identify(issued.secret)
    first_use = world.time.wall()
    assert (await world.directory.find(KEYS, key_id)).last_used_at is None
    world.time.pass_s(10)
    await second.identify(issued.secret)
    await second.close()
    assert (await world.directory.find(KEYS, key_id)).last_used_at == first_use + 10
    await first.close()
    assert (await world.directory.find(KEYS, key_id)).last_used_at == first_use + 10


class BreakableDatabase(Database):
    is_broken = False

    def run_now(self, work, *, reads_only=False):  # type: ignore[no-untyped-def]
        if self.is_broken:
            raise StoreUnavailable("The database is gone.")
        return super().run_now(work, reads_only=reads_only)


async def test_an_outage_is_survived_for_a_minute_then_nobody_gets_in(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    issued = await world.directory.create_key(ACTOR, NewKey(name="k"))
    assert world.database.file is not None
    database = BreakableDatabase(sqlite_url(world.database.file.parent))
    ring = KeyRing(database, clock=world.time.clock, wall_time=world.time.wall)
    await ring.identify(issued.secret)
    database.is_broken = True
    with caplog.at_level(logging.WARNING):
        for _ in range(int(OUTAGE_GRACE_S / CHECK_EVERY_S) - 1):
            world.time.pass_s(CHECK_EVERY_S)
            await ring.identify(issued.secret)
            await checked(ring)
    assert "cannot be checked" in caplog.text
    with pytest.raises(StoreUnavailable):
        await ring.identify(new_secret().secret)
    world.time.pass_s(CHECK_EVERY_S)
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="Keys cannot be checked"):
            await ring.identify(issued.secret)
    database.is_broken = False
    world.time.pass_s(CHECK_EVERY_S)
    assert (await ring.identify(issued.secret)).key_id == issued.key.id
    await ring.close()
    database.close()


async def test_a_gateway_that_starts_in_an_outage_lets_nobody_in(world: World) -> None:
    issued = await world.directory.create_key(ACTOR, NewKey(name="k"))
    assert world.database.file is not None
    database = BreakableDatabase(sqlite_url(world.database.file.parent))
    database.is_broken = True
    ring = KeyRing(database, clock=world.time.clock, wall_time=world.time.wall)
    with pytest.raises(StoreUnavailable):
        await ring.identify(issued.secret)
    database.close()


async def test_nothing_that_is_shown_holds_a_secret(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    issued = await world.directory.create_key(ACTOR, NewKey(name="k"))
    ring = world.ring()
    principal = await ring.identify(issued.secret)
    stranger = new_secret().secret
    with pytest.raises(AuthenticationFailed) as caught:
        await ring.identify(stranger)
    shown = f"{caplog.text} {principal!r} {caught.value!r} {caught.value.hint} {ring.__dict__!r}"
    assert issued.secret not in shown
    assert stranger not in shown
