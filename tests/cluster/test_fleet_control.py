"""The control plane of a shared fleet: leaders that take over, fencing, orders to hosts, and gateways that follow.
Hosts are real but for their engines, which are only written down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.cluster.control_link import FleetLink
from penstock.cluster.control_messages import CurveChannel
from penstock.cluster.fleet import Fleet, SharedFleet
from penstock.cluster.fleet_leader import FleetLeader, LeaderSettings, Stores
from penstock.cluster.host_record import JoinTokens, Offer
from penstock.cluster.leadership import (
    HOST_PREFIX,
    LEADER,
    SERVING,
    DocumentReader,
    HostOrders,
    LeaderDocument,
    Leadership,
    Serving,
    Slot,
    Writer,
    sealed,
)
from penstock.cluster.ordered_host import OrderedHost
from penstock.cluster.registry import Follower, Publisher, RegistryError
from penstock.cluster.replica import ReplicaSpec
from penstock.cluster.staged_records import MemoryRecords
from penstock.cluster.transport import KeyPair, with_key
from penstock.core.cluster_view import ClusterView, ExperimentOrder, HostOrder, ReleaseOrder
from penstock.core.config import ScalingConfig
from penstock.core.errors import Conflict, EngineUnavailable, NotFound, Superseded
from penstock.core.machine import free_port
from penstock.core.objective import ObjectiveSettings, PolicySet
from penstock.router import ReplicaState
from tests.cluster.control_stage import SPEC
from tests.cluster.engines import until
from tests.cluster.fake_manager import FakeManager
from tests.cluster.memory_registry import MemoryRegistry

TOKENS = JoinTokens.parse("a token that these machines share")
LEASE_S = 5.0
CHANNEL_TIMEOUT_S = 60.0  # a leader that has the same core may take long to answer on a busy machine


class Uplink(MemoryRegistry):
    """The way of one process to a registry that several share. It can be cut."""

    def __init__(self, registry: MemoryRegistry) -> None:
        self._registry = registry
        self.is_cut = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("_registry", "is_cut"):
            return object.__getattribute__(self, name)
        if self.is_cut and not name.startswith("_"):
            raise RegistryError("the way to the registry is cut")
        return getattr(self._registry, name)


class Host:
    """`specs` are the replicas of its own settings, if they are not `count` of `SPEC`."""

    def __init__(
        self,
        registry: MemoryRegistry,
        name: str,
        most: int,
        count: int = 1,
        specs: Sequence[ReplicaSpec] = (),
    ) -> None:
        self.manager = FakeManager(name, is_quick=True)
        self.reader = DocumentReader(TOKENS)
        self.publisher = Publisher(registry, TOKENS, name)
        own = [*specs] or [SPEC] * count
        offers = [
            Offer(spec=spec, replicas=own.count(spec), max_replicas=max(most, own.count(spec)))
            for spec in dict.fromkeys(own)
        ]
        manager: Any = self.manager
        self.ordered = OrderedHost(manager, self.publisher, self.reader, own, offers, self._localise)
        self.follower = Follower(registry, TOKENS, on_documents=self.ordered.take)

    async def _localise(self, spec: ReplicaSpec) -> ReplicaSpec:
        return spec

    def states(self) -> list[str]:
        return self.manager.states()

    def roles(self) -> list[str]:
        return [member.role for member in self.manager.members()]


class Fleets:
    """Everything that a test starts."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.registry = MemoryRegistry()
        self.stores = Stores(MemoryRecords(), MemoryRecords())
        self._stack = stack

    async def host(self, name: str, most: int = 2, count: int = 1, specs: Sequence[ReplicaSpec] = ()) -> Host:
        host = Host(self.registry, name, most, count, specs)
        await self._stack.enter_async_context(host.follower.running())
        await self._stack.enter_async_context(host.publisher.running())
        await self._stack.enter_async_context(host.ordered.taking_orders())
        await host.ordered.start_own()
        return host

    async def control(self, name: str, scaling: ScalingConfig | None = None) -> tuple[Leadership, Uplink]:
        uplink = Uplink(self.registry)
        leadership = Leadership(uplink, name, lease_s=LEASE_S)
        settings = LeaderSettings(
            name, "127.0.0.1", scaling or ScalingConfig(), 10.0, look_interval_s=0.02, settle_s=0.0
        )

        async def open_stores(epoch: int) -> Stores:
            return self.stores

        leader = FleetLeader(settings, uplink, TOKENS, leadership, open_stores)
        await self._stack.enter_async_context(_leading(leader, leadership))
        return leadership, uplink

    async def gateway(self, name: str = "gateway") -> FleetLink:
        fleet = Fleet(shared=SharedFleet(TOKENS.client_keys(), 5.0))
        self._stack.callback(fleet.close)
        link = FleetLink(fleet, TOKENS, name)
        follower = Follower(self.registry, TOKENS, fleet.update, on_documents=link.take)
        await self._stack.enter_async_context(follower.running())
        await self._stack.enter_async_context(link.running())
        return link

    def documents(self) -> Mapping[str, bytes]:
        return self.registry._documents


@asynccontextmanager
async def _leading(leader: FleetLeader, leadership: Leadership) -> AsyncIterator[None]:
    async with leadership.running():
        task = asyncio.create_task(leader.keep_leading())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.fixture
async def fleets(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleets]:
    monkeypatch.setitem(CurveChannel.__init__.__kwdefaults__, "timeout_s", CHANNEL_TIMEOUT_S)
    async with AsyncExitStack() as stack:
        yield Fleets(stack)


async def view_of(link: FleetLink, condition: Any) -> ClusterView:
    async with asyncio.timeout(120):
        while not condition(view := await link.cluster()):
            # Each question opens a connection, on the loop that the leader needs too.
            await asyncio.sleep(0.2)
    return view


async def test_a_leader_scales_over_hosts_and_another_goes_on(fleets: Fleets) -> None:
    north, south = await fleets.host("north", most=2), await fleets.host("south", most=3)
    scaling = ScalingConfig(min_replicas=4)
    first, uplink = await fleets.control("first", scaling)
    link = await fleets.gateway()
    await until(lambda: len(north.states()) + len(south.states()) == 4)
    assert len(north.states()) == 2
    assert len(south.states()) == 2
    view = await view_of(link, lambda view: view.leader and view.gateways and view.pools[0].num_ready == 4)
    assert [host.name for host in view.hosts] == ["north", "south"]
    decision = view.pools[0].last_decision
    assert view.leader is not None
    assert decision.startswith("start 2")

    second, _ = await fleets.control("second", scaling)
    uplink.is_cut = True  # as if the leader's machine were cut off
    await until(lambda: second.epoch is not None and first.epoch is None)
    epoch = second.epoch
    assert epoch is not None
    assert epoch > view.leader.epoch
    view = await view_of(link, lambda view: view.leader and view.leader.name == "second" and view.pools)
    assert view.pools[0].last_decision == decision  # the state of the last decision
    # On a busy machine a term may end, and another one of the same process begin.
    await until(lambda: second.epoch is not None and north.reader.epoch == second.epoch)
    assert len(north.states()) + len(south.states()) == 4  # nothing is started twice


async def test_a_host_that_has_gone_is_replaced_elsewhere(fleets: Fleets) -> None:
    north, south = await fleets.host("north", most=1), await fleets.host("south", most=3)
    await fleets.control("first", ScalingConfig(min_replicas=2))
    await until(lambda: south.reader.epoch)
    north.ordered.leave()
    await until(lambda: south.states() == ["ready", "ready"])


async def test_a_leader_that_wakes_up_late_changes_nothing(
    fleets: Fleets, caplog: pytest.LogCaptureFixture
) -> None:
    host = await fleets.host("north")
    paused, awake = Leadership(fleets.registry, "paused"), Leadership(fleets.registry, "awake")
    await paused.try_once()
    assert paused.epoch is not None
    old = Writer(fleets.registry, TOKENS, paused, paused.epoch)
    await fleets.registry.resign("paused")  # its lease ran out while the process was stopped
    await awake.try_once()
    assert awake.epoch is not None
    assert paused.epoch is not None
    slot = Slot(name="1-1", spec=SPEC)
    orders = HostOrders(host="north", slots=(slot,))
    with pytest.raises(Superseded):
        await old.write(HOST_PREFIX + "north", orders)
    await Writer(fleets.registry, TOKENS, awake, awake.epoch).write(SERVING, Serving())
    await until(lambda: host.reader.epoch == awake.epoch)
    # A registry that does not check, and orders that were signed in time: the host itself refuses them.
    late = sealed(HOST_PREFIX + "north", old.epoch, 9, orders, TOKENS)
    with caplog.at_level(logging.WARNING):
        host.ordered.take({**fleets.documents(), HOST_PREFIX + "north": late})
    assert "has taken over" in caplog.text
    assert host.states() == ["ready"]
    host.ordered.take({HOST_PREFIX + "north": sealed(HOST_PREFIX + "north", awake.epoch, 1, orders, TOKENS)})
    await until(lambda: host.states() == ["ready", "ready"])


async def test_a_leader_stops_by_its_own_clock_before_its_lease_ends() -> None:
    now = 100.0
    leadership = Leadership(MemoryRegistry(), "a", lease_s=5.0, now=lambda: now)
    await leadership.try_once()
    assert leadership.epoch == 1
    now = 104.5
    assert leadership.epoch is None
    with pytest.raises(Superseded):
        await Writer(MemoryRegistry(), TOKENS, leadership, 1).write(SERVING, Serving())


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"nonsense", "was not signed"),
        (
            sealed(SERVING, 1, 1, Serving(), JoinTokens.parse("another token of another fleet")),
            "was not signed",
        ),
        (sealed(HOST_PREFIX + "south", 1, 1, HostOrders(host="south"), TOKENS), "is that of 'host/south'"),
        (sealed(HOST_PREFIX + "north", 1, 1, {"host": 5}, TOKENS), "is not understood"),
    ],
)
async def test_orders_that_are_left_out(
    fleets: Fleets, data: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    host = await fleets.host("north")
    with caplog.at_level(logging.WARNING):
        host.ordered.take({HOST_PREFIX + "north": data})
    assert said in caplog.text
    assert host.states() == ["ready"]


async def test_draining_cordoning_and_moving(fleets: Fleets) -> None:
    north, south = await fleets.host("north", most=2), await fleets.host("south", most=2)
    await fleets.control("first")
    link = await fleets.gateway()
    await view_of(link, lambda view: view.leader and len(view.hosts) == 2 and view.pools)
    for target, to, error in (
        ("nobody", None, NotFound),
        ("north-1", "nowhere", NotFound),
    ):
        with pytest.raises(error):
            await link.operate(HostOrder(action="move", target=target, to=to))

    north.manager.load(num_running=1)  # an answer that must finish first
    await link.operate(HostOrder(action="drain", target="north"))
    await until(lambda: south.states() == ["ready", "ready"] and north.states() == ["draining"])
    view = await view_of(link, lambda view: view.hosts[0].state == "draining")
    assert view.hosts[1].num_replicas == 2
    north.manager.load(num_running=0)
    await until(lambda: north.states() == [])
    with pytest.raises(EngineUnavailable, match="no room"):
        await link.operate(HostOrder(action="move", target="south-1", to="north"))  # it is cordoned

    await link.operate(HostOrder(action="uncordon", target="north"))
    await until(lambda: north.states() == ["ready"])  # its own replica
    await view_of(link, lambda view: view.hosts[0].num_replicas == 1)
    await link.operate(HostOrder(action="move", target="south-1", to="north"))
    await until(lambda: north.states() == ["ready", "ready"] and south.states() == ["ready"])
    await link.operate(HostOrder(action="cordon", target="south"))
    await view_of(link, lambda view: view.hosts[1].state == "cordoned")
    assert south.states() == ["ready"]


async def test_a_replica_that_cannot_start_is_reported_and_tried_again(fleets: Fleets) -> None:
    north = await fleets.host("north", most=2)
    north.manager.failure = EngineUnavailable("The device has no memory left.")
    await fleets.control("first", ScalingConfig(min_replicas=2))
    await until(lambda: north.publisher.record.failures)
    assert "no memory left" in next(iter(north.publisher.record.failures.values()))
    await until(lambda: not north.publisher.record.failures)  # the leader has given the slot up
    north.manager.failure = None
    await until(lambda: north.states() == ["ready", "ready"])


async def test_every_gateway_follows_a_release_and_hosts_that_join_start_the_promoted_revision(
    fleets: Fleets,
) -> None:
    await fleets.host("north", most=1)
    _, uplink = await fleets.control("first")
    links = [await fleets.gateway(f"gateway-{number}") for number in range(2)]
    await view_of(links[0], lambda view: view.leader and view.pools and len(view.gateways) == 2)
    order = ReleaseOrder(model="echo", revision="roomy", settings={"max_num_seqs": "64"})
    await links[0].start_release(order)
    for link in links:
        await until(lambda link=link: link._directive.releases)
    # A gateway that starts while nobody leads follows the last directive, which the registry keeps.
    uplink.is_cut = True
    late = await fleets.gateway("late")
    assert late._directive.releases[0].state.candidate == "roomy"
    await fleets.control("second")
    await view_of(late, lambda view: view.leader and view.leader.name == "second" and view.releases)
    await links[1].promote_release("echo")
    await view_of(late, lambda view: view.releases and view.releases[0].stage == "promoted")
    await until(lambda: SERVING in fleets.documents() and b"roomy" in fleets.documents()[SERVING])
    joined = await fleets.host("south", most=1)
    assert [member.replica.revision for member in joined.manager.members()] == ["roomy"]


def arms_of(*hosts: Host) -> dict[str, int]:
    """Return how many replicas of each revision are ready."""
    found: Counter[str] = Counter()
    for host in hosts:
        ready = (each.replica for each in host.manager.members() if each.replica.state is ReplicaState.READY)
        found.update(replica.revision.rpartition("-")[2] for replica in ready)
    return dict(found)


async def test_every_gateway_follows_an_experiment_and_the_next_leader_goes_on_with_it(
    fleets: Fleets,
) -> None:
    north, south = await fleets.host("north", most=3), await fleets.host("south", most=2)
    _, uplink = await fleets.control("first")
    links = [await fleets.gateway(f"gateway-{number}") for number in range(2)]
    await view_of(
        links[0], lambda view: view.pools and view.pools[0].num_ready == 2 and len(view.gateways) == 2
    )
    order = ExperimentOrder(
        model="echo",
        a="default",
        b="small",
        policy_a=PolicySet(),
        policy_b=PolicySet(max_num_seqs=4),
        objective=ObjectiveSettings(),
        config={"share": 0.5},
    )
    shown = await links[0].start_experiment(order)
    base = SPEC.revision.rpartition("-")[2]
    for link in links:
        await until(lambda link=link: any(each.is_running for each in link._directive.experiments))
    await until(lambda: arms_of(north, south) == {base: 1, "b": 1})
    with pytest.raises(Conflict, match="still running"):
        await links[1].start_experiment(order)
    # A replica that a joining host brings would take load from one arm only.
    joined = await fleets.host("west", most=1)
    await until(lambda: arms_of(north, south, joined) == {base: 1, "b": 1})

    uplink.is_cut = True
    await fleets.control("second")
    await view_of(links[1], lambda view: view.leader and view.leader.name == "second" and view.pools)
    [gone_on] = await links[1].experiments()
    assert (gone_on.id, gone_on.is_over) == (shown.id, False)
    await until(lambda: arms_of(north, south, joined) == {base: 1, "b": 1})
    await links[1].stop_experiment("echo")
    await until(lambda: arms_of(north, south, joined) == {base: 2})
    [over] = await links[1].experiments()
    assert (over.verdict, over.is_over) == ("stopped by an operator", True)


async def test_a_follower_of_directives_refuses_an_earlier_leader(fleets: Fleets) -> None:
    link = await fleets.gateway()
    newest = replace(link._directive, number=5 << 20)
    assert link.follow(newest)
    assert not link.follow(replace(newest, number=4 << 20))
    assert link._directive.number == 5 << 20


async def test_an_order_does_not_wait_for_a_leader_that_another_has_replaced(fleets: Fleets) -> None:
    link = await fleets.gateway()
    nobody = with_key(f"tcp://127.0.0.1:{free_port('127.0.0.1')}", KeyPair.make().public)
    dead, alive = (
        LeaderDocument(name="dead", endpoint=nobody),
        LeaderDocument(name="alive", endpoint="tcp://"),
    )
    link.take({LEADER: sealed(LEADER, 1, 1, dead, TOKENS)})
    ordering = asyncio.create_task(link.operate(HostOrder(action="cordon", target="north")))
    await until(lambda: any(channel._limit for channel in link._channels))
    link.take({LEADER: sealed(LEADER, 2, 1, alive, TOKENS)})
    with pytest.raises(EngineUnavailable, match="does not answer"):
        async with asyncio.timeout(CHANNEL_TIMEOUT_S / 2):
            await ordering


async def test_without_a_leader_orders_are_refused_and_the_fleet_is_shown(fleets: Fleets) -> None:
    link = await fleets.gateway()
    with pytest.raises(EngineUnavailable, match="No control process leads"):
        await link.operate(HostOrder(action="cordon", target="north"))
    assert (await link.cluster()).leader is None


async def test_every_term_has_an_epoch_of_its_own() -> None:
    """A leader that was late, and holds its lease still, must not number its documents from the start again."""
    now = 100.0
    leadership = Leadership(MemoryRegistry(), "a", lease_s=5.0, now=lambda: now)
    await leadership.try_once()
    assert leadership.epoch == 1
    await leadership.give_up(1)
    assert leadership.epoch is None
    await leadership.try_once()
    assert leadership.epoch == 2
    now = 104.5  # late, by its own clock
    await leadership.try_once()
    assert leadership.epoch == 3


async def test_a_registry_that_lost_its_documents_costs_no_replica(fleets: Fleets) -> None:
    north = await fleets.host("north", most=3)
    _, uplink = await fleets.control("first", ScalingConfig(min_replicas=2))
    await until(lambda: north.states() == ["ready", "ready"])
    uplink.is_cut = True
    fleets.registry._documents.clear()
    await fleets.control("second", ScalingConfig(min_replicas=3))
    await until(lambda: len(north.states()) == 3)
    assert set(north.manager.slots().values()) >= {"own-1", "1-1"}  # what the first leader ordered stays
