"""Replicas of a shared fleet that change their roles by orders of the leader: what is kept, fenced off and refused.
Hosts are real but for their engines, which are only written down."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from msgspec.structs import replace

from penstock.cluster.control_link import FleetLink
from penstock.cluster.control_messages import CurveChannel
from penstock.cluster.leadership import HOST_PREFIX, HostOrders, Leadership, Slot, Writer, opened, sealed
from penstock.cluster.registry import RegistryError
from penstock.core.cluster_view import ClusterView, HostOrder, ReleaseOrder, ReplicaOrder
from penstock.core.config import ScalingConfig
from penstock.core.errors import Conflict, NotFound, PenstockError, Superseded
from tests.cluster.control_stage import SPEC
from tests.cluster.engines import until
from tests.cluster.test_fleet_control import CHANNEL_TIMEOUT_S, TOKENS, Fleets, Host, view_of

PREFILL, DECODE = replace(SPEC, role="prefill"), replace(SPEC, role="decode")
QUICK = ScalingConfig(min_replicas=1, scale_up_pause_s=0.05)


@pytest.fixture
async def fleets(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleets]:
    monkeypatch.setitem(CurveChannel.__init__.__kwdefaults__, "timeout_s", CHANNEL_TIMEOUT_S)
    async with AsyncExitStack() as stack:
        yield Fleets(stack)


def convert(replica_id: str, role: str) -> ReplicaOrder:
    return ReplicaOrder(action="convert", replica_id=replica_id, role=role)


def is_led(view: ClusterView, name: str, num_replicas: int) -> bool:
    """Whether the leader of this name sees all replicas as ready."""
    ready = [replica for replica in view.replicas if replica.state == "ready"]
    return view.leader is not None and view.leader.name == name and len(ready) == num_replicas


async def led(link: FleetLink, name: str, num_replicas: int) -> ClusterView:
    return await view_of(link, lambda view: is_led(view, name, num_replicas) and len(view.pools) == 2)


async def test_an_operators_order_changes_a_role_and_outlives_its_leader(fleets: Fleets) -> None:
    north = await fleets.host("north", specs=(PREFILL, PREFILL, DECODE))
    _, uplink = await fleets.control("first")
    link = await fleets.gateway()
    await led(link, "first", 3)
    await link.order_replica(convert("north-1", "decode"))
    await until(lambda: north.roles() == ["decode", "prefill", "decode"])
    assert north.manager.num_launched == 3
    view = await view_of(link, lambda view: not any(each.next_role for each in view.replicas))
    assert Counter(each.role for each in view.replicas) == {"prefill": 1, "decode": 2}
    assert {pool.role: pool.num_ready for pool in view.pools} == {"prefill": 1, "decode": 2}
    assert "convert north-1: an operator's order" in [each.decision for each in view.decisions]

    uplink.is_cut = True
    second, _ = await fleets.control("second")
    await led(link, "second", 3)
    await until(lambda: north.reader.epoch == second.epoch)
    assert north.roles() == ["decode", "prefill", "decode"]
    with pytest.raises(Conflict, match="the last one for prefill"):
        await link.order_replica(convert("north-2", "decode"))


async def test_a_leader_that_dies_before_the_host_hears_leaves_the_order_to_the_next(fleets: Fleets) -> None:
    north = await fleets.host("north", specs=(PREFILL, PREFILL, DECODE))
    take = north.follower._on_documents
    first, uplink = await fleets.control("first")
    link = await fleets.gateway()
    await led(link, "first", 3)
    north.follower._on_documents = lambda documents: None  # it cannot hear the leader
    await link.order_replica(convert("north-1", "decode"))
    name = HOST_PREFIX + "north"

    def ordered() -> list[str]:
        orders = opened(name, fleets.documents()[name], TOKENS).read(HostOrders)
        assert orders is not None
        return [slot.spec.role for slot in orders.slots]

    await until(lambda: ordered() == ["decode"])
    view = await view_of(link, lambda view: any(each.next_role for each in view.replicas))
    assert [(each.id, each.role) for each in view.replicas if each.next_role == "decode"] == [
        ("north-1", "prefill")
    ]
    epoch = first.epoch
    uplink.is_cut = True
    second, _ = await fleets.control("second")
    view = await led(link, "second", 3)
    # The next leader counts on the order, so it neither takes the role back nor converts another replica.
    assert {pool.role: pool.num_ready for pool in view.pools} == {"prefill": 1, "decode": 2}
    assert north.roles() == ["prefill", "prefill", "decode"]
    north.follower._on_documents = take
    await until(lambda: north.roles() == ["decode", "prefill", "decode"])
    assert north.reader.epoch == second.epoch
    assert second.epoch is not None
    assert epoch is not None
    assert second.epoch > epoch


async def test_a_leader_that_wakes_up_late_changes_no_role(
    fleets: Fleets, caplog: pytest.LogCaptureFixture
) -> None:
    north = await fleets.host("north", specs=(PREFILL, DECODE, DECODE))
    paused, awake = Leadership(fleets.registry, "paused"), Leadership(fleets.registry, "awake")
    await paused.try_once()
    assert paused.epoch is not None
    old = Writer(fleets.registry, TOKENS, paused, paused.epoch)
    await fleets.registry.resign("paused")
    await awake.try_once()
    assert awake.epoch is not None
    slots = (Slot(name="own-2", spec=PREFILL),)
    orders = HostOrders(host="north", slots=slots)
    name = HOST_PREFIX + "north"
    with pytest.raises(Superseded):
        await old.write(name, orders)
    await Writer(fleets.registry, TOKENS, awake, awake.epoch).write(name, HostOrders(host="north"))
    await until(lambda: north.reader.epoch == awake.epoch)
    with caplog.at_level(logging.WARNING):
        north.ordered.take({name: sealed(name, old.epoch, 9, orders, TOKENS)})
    assert "has taken over" in caplog.text
    assert north.roles() == ["prefill", "decode", "decode"]


async def test_a_pool_without_replicas_takes_one_of_the_other_where_no_host_has_room(fleets: Fleets) -> None:
    """Hosts may offer one role only: the two pools are those of the fleet."""
    north = await fleets.host("north", most=0, specs=(PREFILL, PREFILL))
    await fleets.control("first", QUICK)
    link = await fleets.gateway()
    await until(lambda: sorted(north.roles()) == ["decode", "prefill"])
    view = await view_of(link, lambda view: view.pools and view.pools[1].num_ready == 1)
    assert view.pools[1].last_decision == "convert 1: below the floor"
    assert north.manager.num_launched == 2


async def test_roles_share_the_room_of_a_host(fleets: Fleets) -> None:
    """What changes its role takes no room, and what starts takes that of both roles."""
    north = await fleets.host("north", most=3, specs=(PREFILL, DECODE))
    await fleets.control("first", ScalingConfig(min_replicas=2, scale_up_pause_s=0.05))
    link = await fleets.gateway()
    # Two in each role are wanted, and there is room for three replicas: two for one role, one for the other.
    view = await led(link, "first", 3)
    assert view.hosts[0].max_replicas == 3
    assert [(pool.min_replicas, pool.max_replicas) for pool in view.pools] == [(2, 4), (2, 4)]
    south = await fleets.host("south", most=2, specs=(DECODE,))
    await until(lambda: Counter(north.roles() + south.roles()) == {"prefill": 2, "decode": 2})
    assert len(north.roles()) <= 3
    assert len(south.roles()) <= 2


async def test_a_host_of_an_earlier_version_and_one_that_drains_keep_their_roles(
    fleets: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    north = await fleets.host("north", specs=(PREFILL, PREFILL, DECODE))
    south = await fleets.host("south", specs=(PREFILL, DECODE))
    describe = north.publisher.describe
    monkeypatch.setattr(
        north.publisher,
        "describe",
        lambda record: describe(replace(record, converts=False, version="0.0.9")),
    )
    north.ordered.take({})
    await fleets.control("first", ScalingConfig(min_replicas=1, scale_up_pause_s=0.05))
    link = await fleets.gateway()
    await led(link, "first", 5)
    with pytest.raises(Conflict, match=r"north runs version 0\.0\.9"):
        await link.order_replica(convert("north-1", "decode"))
    south.manager.load(num_running=1)
    await link.operate(HostOrder(action="drain", target="south"))
    with pytest.raises((Conflict, NotFound), match="south-1"):
        await link.order_replica(convert("south-1", "decode"))
    assert north.roles() == ["prefill", "prefill", "decode"]
    assert south.roles()[:2] == ["prefill", "decode"]


async def test_an_order_that_the_registry_did_not_take_is_written_again(
    fleets: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    north = await fleets.host("north", specs=(PREFILL, PREFILL, DECODE))
    await fleets.control("first")
    link = await fleets.gateway()
    await led(link, "first", 3)
    write, num_lost = fleets.registry.write, 0

    async def lossy(name: str, document: bytes | None, epoch: int) -> bool:
        nonlocal num_lost
        if name == HOST_PREFIX + "north" and num_lost < 2:
            num_lost += 1
            raise RegistryError("it does not answer")
        return await write(name, document, epoch)

    monkeypatch.setattr(fleets.registry, "write", lossy)
    await link.order_replica(convert("north-1", "decode"))
    await until(lambda: north.roles() == ["decode", "prefill", "decode"])
    assert num_lost == 2


async def test_a_registry_that_lost_its_documents_gives_no_replica_its_first_role_back(
    fleets: Fleets,
) -> None:
    north = await fleets.host("north", specs=(PREFILL, PREFILL, DECODE))
    _, uplink = await fleets.control("first")
    link = await fleets.gateway()
    await led(link, "first", 3)
    await link.order_replica(convert("north-1", "decode"))
    await until(lambda: north.roles() == ["decode", "prefill", "decode"])
    uplink.is_cut = True
    fleets.registry._documents.clear()
    second, _ = await fleets.control("second")
    await until(lambda: second.epoch is not None and north.reader.epoch == second.epoch)
    view = await led(link, "second", 3)
    assert {pool.role: pool.num_ready for pool in view.pools} == {"prefill": 1, "decode": 2}
    assert north.roles() == ["decode", "prefill", "decode"]


async def test_a_release_of_both_roles_continues_under_the_next_leader(fleets: Fleets) -> None:
    north = await fleets.host("north", most=6, specs=(PREFILL, DECODE))
    _, uplink = await fleets.control("first")
    link = await fleets.gateway()
    await led(link, "first", 2)
    order = ReleaseOrder(model="echo", revision="roomy", settings={"max_num_seqs": "64"})
    await link.start_release(order)
    with pytest.raises(Conflict, match="compares revisions"):
        await link.order_replica(convert("north-1", "decode"))
    uplink.is_cut = True
    await fleets.control("second")
    await view_of(link, lambda view: view.leader and view.leader.name == "second" and view.releases)
    with contextlib.suppress(PenstockError):
        await link.promote_release("echo")
    await view_of(link, lambda view: view.releases and view.releases[0].stage == "promoted")
    await until(lambda: Counter(roles_of(north, "roomy")) == {"prefill": 1, "decode": 1})


async def test_roles_with_different_settings_scale_apart_and_are_not_compared(fleets: Fleets) -> None:
    """Such as another number of ranks: no replica becomes one of the other pool."""
    wide = replace(PREFILL, revision="wide")
    north = await fleets.host("north", specs=(wide, wide))
    await fleets.host("south", specs=(DECODE, DECODE))
    await fleets.control("first", QUICK)
    link = await fleets.gateway()
    view = await led(link, "first", 4)
    assert [(pool.role, pool.revision, pool.num_ready) for pool in view.pools] == [
        ("prefill", "wide", 2),
        ("decode", DECODE.revision, 2),
    ]
    with pytest.raises(Conflict, match="have different settings"):
        await link.order_replica(convert("north-1", "decode"))
    with pytest.raises(Conflict, match="only one revision can be compared"):
        await link.start_release(ReleaseOrder(model="echo", settings={"max_num_seqs": "64"}))
    assert north.roles() == ["prefill", "prefill"]


def roles_of(host: Host, revision: str) -> list[str]:
    return [member.role for member in host.manager.members() if member.replica.revision == revision]
