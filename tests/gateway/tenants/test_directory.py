"""Organisations, workspaces and keys: made, listed, changed, ended; each change with its audit entry."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from sqlalchemy import select, text

from penstock.core.errors import Conflict, InvalidRequest, NotFound, PenstockError
from penstock.core.identity import Scope
from penstock.core.request import Tier
from penstock.gateway.store.tables import audit_log, keys
from penstock.gateway.tenants.directory import Actor, Directory
from penstock.gateway.tenants.records import KEYS, ORGANIZATIONS, WORKSPACES, KeyChanges, NewKey
from tests.gateway.tenants.conftest import ACTOR, World


async def test_the_default_workspace_is_there_from_the_start(world: World) -> None:
    workspace = await world.directory.find(WORKSPACES, "default")
    assert workspace.organization_id == "default"
    issued = await world.directory.create_key(ACTOR, NewKey(name="first"))
    assert issued.key.workspace_id == "default"


async def test_a_key_keeps_what_it_was_made_with(world: World) -> None:
    directory = world.directory
    organization = await directory.create_organization(ACTOR, "Acme")
    workspace = await directory.create_workspace(ACTOR, "Production", organization.id)
    request = NewKey(
        name=" ci ",
        workspace_id=workspace.id,
        scopes=(Scope.USAGE, Scope.INFERENCE, Scope.USAGE),
        allowed_models=("b", "a", "b"),
        best_tier=Tier.BATCH,
        caches_responses=True,
        expires_at=world.time.wall() + 60,
    )
    issued = await directory.create_key(ACTOR, request)
    key = await directory.find(KEYS, issued.key.id)
    assert key == issued.key
    assert (key.name, key.workspace_id, key.created_by) == ("ci", workspace.id, "test")
    assert key.scopes == (Scope.INFERENCE, Scope.USAGE)
    assert key.allowed_models == ("a", "b")
    assert (key.best_tier, key.caches_responses) == (Tier.BATCH, True)
    assert [key.status(world.time.wall() + s) for s in (0, 59, 60)] == ["active", "active", "expired"]
    assert msgspec.json.decode(msgspec.json.encode(key), type=type(key)) == key


async def test_the_secret_is_stored_nowhere(world: World) -> None:
    issued = await world.directory.create_key(ACTOR, NewKey(name="k"))
    row = await world.database.run(lambda connection: connection.execute(select(keys)).mappings().one())
    assert not any(issued.secret in str(value) for value in row.values())
    assert world.database.file is not None
    for file in world.database.file.parent.iterdir():
        assert issued.secret.encode() not in file.read_bytes()
    assert issued.secret not in repr(issued)


async def test_only_what_is_named_changes(world: World) -> None:
    directory = world.directory
    before = (await directory.create_key(ACTOR, NewKey(name="k", allowed_models=("m",)))).key
    after = await directory.update_key(ACTOR, before.id, KeyChanges(best_tier=Tier.PRIORITY))
    assert after == msgspec.structs.replace(before, best_tier=Tier.PRIORITY)
    after = await directory.update_key(ACTOR, before.id, KeyChanges(allowed_models=None))
    assert after.allowed_models is None
    await directory.update_key(ACTOR, before.id, KeyChanges(expires_at=world.time.wall() + 1))
    assert (await directory.update_key(ACTOR, before.id, KeyChanges(expires_at=None))).expires_at is None


async def test_a_revoked_key_stays_in_the_list_and_stays_revoked(world: World) -> None:
    directory = world.directory
    key_id = (await directory.create_key(ACTOR, NewKey(name="k"))).key.id
    assert (await directory.revoke_key(ACTOR, key_id)).status(world.time.wall()) == "revoked"
    assert [key.id for key in (await directory.keys()).data] == [key_id]
    with pytest.raises(Conflict):
        await directory.revoke_key(ACTOR, key_id)
    with pytest.raises(Conflict):
        await directory.update_key(ACTOR, key_id, KeyChanges(name="back"))


async def test_nothing_new_in_what_is_archived(world: World) -> None:
    directory = world.directory
    organization = await directory.create_organization(ACTOR, "Acme")
    workspace = await directory.create_workspace(ACTOR, "W", organization.id)
    await directory.archive(ACTOR, ORGANIZATIONS, organization.id)
    with pytest.raises(Conflict, match="archived"):
        await directory.create_workspace(ACTOR, "X", organization.id)
    with pytest.raises(Conflict, match="archived"):
        await directory.create_key(ACTOR, NewKey(name="k", workspace_id=workspace.id))
    with pytest.raises(Conflict, match="archived"):
        await directory.archive(ACTOR, ORGANIZATIONS, organization.id)


Act = Callable[[Directory], Awaitable[object]]


@pytest.mark.parametrize(
    ("act", "error", "sentence"),
    [
        (lambda d: d.create_organization(ACTOR, "  "), InvalidRequest, "A name has 1 to 256"),
        (lambda d: d.create_organization(ACTOR, "x" * 257), InvalidRequest, "A name has 1 to 256"),
        (lambda d: d.create_workspace(ACTOR, "two\nlines"), InvalidRequest, "printable"),
        (
            lambda d: d.create_workspace(ACTOR, "x", "org_none"),
            NotFound,
            "no organisation with the id 'org_none'",
        ),
        (lambda d: d.create_key(ACTOR, NewKey(name="k", workspace_id="ws_none")), NotFound, "no workspace"),
        (lambda d: d.create_key(ACTOR, NewKey(name="k", scopes=())), InvalidRequest, "without scopes"),
        (
            lambda d: d.create_key(ACTOR, NewKey(name="k", allowed_models=())),
            InvalidRequest,
            "1 to 256 models",
        ),
        (lambda d: d.create_key(ACTOR, NewKey(name="k", expires_at=1.0)), InvalidRequest, "in the future"),
        (
            lambda d: d.create_key(ACTOR, NewKey(name="k", expires_at=float("inf"))),
            InvalidRequest,
            "in the future",
        ),
        (
            lambda d: d.create_key(ACTOR, NewKey(name="k", expires_at=float("nan"))),
            InvalidRequest,
            "in the future",
        ),
        (lambda d: d.update_key(ACTOR, "key_none", KeyChanges(name="x")), NotFound, "no key"),
        (lambda d: d.update_key(ACTOR, "key_none", KeyChanges()), InvalidRequest, "Nothing to change"),
        (lambda d: d.revoke_key(ACTOR, "key_none"), NotFound, "no key"),
        (lambda d: d.archive(ACTOR, WORKSPACES, "default"), Conflict, "cannot be archived"),
        (lambda d: d.archive(ACTOR, ORGANIZATIONS, "default"), Conflict, "cannot be archived"),
        (lambda d: d.keys(limit=0), InvalidRequest, "limit"),
        (lambda d: d.keys(limit=1001), InvalidRequest, "limit"),
        (lambda d: d.keys(after="key_none"), InvalidRequest, "after"),
        (lambda d: d.audit(limit=0), InvalidRequest, "limit"),
    ],
)
async def test_what_cannot_be_is_refused_and_leaves_no_trace(
    world: World, act: Act, error: type[PenstockError], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        await act(world.directory)
    assert (await world.directory.audit()).data == ()


async def test_pages_show_everything_once_newest_first(world: World) -> None:
    directory = world.directory
    made = []
    for number in range(7):
        made.append((await directory.create_key(ACTOR, NewKey(name=f"key {number}"))).key.id)
        if number % 3 == 0:  # some share a moment
            world.time.pass_s(1)
    seen: list[str] = []
    after = None
    while True:
        page = await directory.keys(limit=2, after=after)
        seen += [key.id for key in page.data]
        if not page.has_more:
            break
        after = page.data[-1].id
    assert sorted(seen) == sorted(made)
    assert seen[-1] == made[0]


async def test_lists_can_be_narrowed_to_an_owner(world: World) -> None:
    directory = world.directory
    workspace = await directory.create_workspace(ACTOR, "W")
    mine = (await directory.create_key(ACTOR, NewKey(name="mine", workspace_id=workspace.id))).key
    await directory.create_key(ACTOR, NewKey(name="other"))
    assert (await directory.keys(workspace_id=workspace.id)).data == (mine,)
    assert (await directory.workspaces(organization_id="org_none")).data == ()


async def test_every_change_is_in_the_audit_log_with_what_it_changed(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.audit")
    directory = world.directory
    by = Actor("key_admin", "request-7")
    organization = await directory.create_organization(by, "Acme")
    await directory.rename(by, ORGANIZATIONS, organization.id, "Acme 2")
    workspace = await directory.create_workspace(by, "W", organization.id)
    await directory.rename(by, WORKSPACES, workspace.id, "W2")
    issued = await directory.create_key(by, NewKey(name="k", workspace_id=workspace.id))
    await directory.update_key(by, issued.key.id, KeyChanges(scopes=(Scope.ADMIN,)))
    await directory.revoke_key(by, issued.key.id)
    await directory.archive(by, WORKSPACES, workspace.id)
    await directory.archive(by, ORGANIZATIONS, organization.id)

    entries = (await directory.audit(limit=100)).data[::-1]
    assert [entry.action for entry in entries] == [
        *("organization.create", "organization.update", "workspace.create", "workspace.update"),
        *("key.create", "key.update", "key.revoke", "workspace.archive", "organization.archive"),
    ]
    assert {(entry.actor, entry.request_id) for entry in entries} == {("key_admin", "request-7")}
    assert (entries[1].before, entries[1].after) == ({"name": "Acme"}, {"name": "Acme 2"})
    assert (entries[5].before, entries[5].after) == ({"scopes": ["inference"]}, {"scopes": ["admin"]})
    assert entries[4].before is None
    assert entries[4].after is not None
    assert entries[4].after["prefix"] == issued.key.prefix

    # The log says the same, and neither says a secret.
    lines = [record.getMessage() for record in caplog.records if record.name == "penstock.audit"]
    assert [line.removeprefix("audit ") for line in lines] == [
        msgspec.json.encode(entry).decode() for entry in entries
    ]
    assert issued.secret not in caplog.text
    assert issued.secret not in str(entries)

    target = await directory.audit(target=issued.key.id)
    assert [entry.action for entry in target.data] == ["key.revoke", "key.update", "key.create"]
    page = await directory.audit(limit=2)
    older = await directory.audit(limit=100, before_id=page.data[-1].id)
    assert [*page.data, *older.data] == list(entries[::-1])


async def test_a_change_without_its_audit_entry_does_not_happen(world: World) -> None:
    await world.database.run(lambda connection: connection.execute(text(f"DROP TABLE {audit_log.name}")))
    with pytest.raises(PenstockError):
        await world.directory.create_key(ACTOR, NewKey(name="k"))
    assert (await world.directory.keys()).data == ()


async def test_whether_keys_exist_and_whether_any_still_works(world: World) -> None:
    directory = world.directory

    async def states() -> tuple[bool, bool]:
        return await directory.has_keys(), await directory.has_keys(only_live=True)

    assert await states() == (False, False)
    short = await directory.create_key(ACTOR, NewKey(name="k", expires_at=world.time.wall() + 5))
    assert await states() == (True, True)
    world.time.pass_s(5)
    assert await states() == (True, False)
    await directory.update_key(ACTOR, short.key.id, KeyChanges(expires_at=None))
    assert await states() == (True, True)
    await directory.revoke_key(ACTOR, short.key.id)
    assert await states() == (True, False)
