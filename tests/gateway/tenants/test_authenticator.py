"""Which credential counts as what, and what happens without one."""

from __future__ import annotations

import pytest

from penstock.core.errors import AuthenticationFailed
from penstock.core.identity import OPEN_PRINCIPAL, Scope
from penstock.gateway.tenants import authenticator as module
from penstock.gateway.tenants.authenticator import STATIC_PRINCIPAL, Authenticator
from penstock.gateway.tenants.records import NewKey, new_secret
from tests.gateway.tenants.conftest import ACTOR, World


async def test_the_servers_own_key_may_do_everything() -> None:
    authenticator = Authenticator(static_key="the key")
    principal = await authenticator.identify("the key")
    assert principal is STATIC_PRINCIPAL
    assert all(principal.may(scope) for scope in Scope)
    for wrong in (None, "", "the ke", "the key ", "THE KEY", "\xff"):
        with pytest.raises(AuthenticationFailed):
            await authenticator.identify(wrong)


async def test_the_servers_own_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        lengths.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr(module.hmac, "compare_digest", compare)
    with pytest.raises(AuthenticationFailed):
        await Authenticator(static_key="long " * 100).identify("short")
    assert lengths == [(32, 32)], "digests, whose length says nothing"


async def test_an_open_server_lets_in_whoever_has_no_key_of_ours(world: World) -> None:
    authenticator = Authenticator(ring=world.ring(), is_open=True)
    assert await authenticator.identify(None) is OPEN_PRINCIPAL
    assert await authenticator.identify("none") is OPEN_PRINCIPAL  # SDKs insist on sending something
    issued = await world.directory.create_key(ACTOR, NewKey(name="k"))
    assert (await authenticator.identify(issued.secret)).key_id == issued.key.id


async def test_an_open_server_does_not_take_a_bad_key_for_no_key(world: World) -> None:
    authenticator = Authenticator(ring=world.ring(), is_open=True)
    with pytest.raises(AuthenticationFailed):
        await authenticator.identify(new_secret().secret)


async def test_a_closed_server_takes_the_static_key_beside_made_ones(world: World) -> None:
    issued = await world.directory.create_key(ACTOR, NewKey(name="k"))
    authenticator = Authenticator(static_key="sk-ps-mine", ring=world.ring())
    assert await authenticator.identify("sk-ps-mine") is STATIC_PRINCIPAL
    assert (await authenticator.identify(issued.secret)).key_id == issued.key.id
    for wrong in (None, "other", "a.b.c", new_secret().secret):
        with pytest.raises(AuthenticationFailed):
            await authenticator.identify(wrong)
