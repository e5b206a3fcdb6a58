"""Replicas of a shared fleet that change their roles, with real engines, a real Redis and real `penstock control`
processes: under load, while the leader is killed, and before a gateway that hears of it late."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.cluster import redis_registry
from penstock.cluster.control_link import FleetLink
from penstock.cluster.fleet import Fleet, SharedFleet
from penstock.cluster.host_record import Offer
from penstock.cluster.leadership import (
    HOST_PREFIX,
    LEADER,
    DocumentReader,
    HostOrders,
    LeaderDocument,
    opened,
)
from penstock.cluster.local import NetworkAddress
from penstock.cluster.ordered_host import OrderedHost
from penstock.cluster.redis_registry import RedisRegistry
from penstock.cluster.registry import Follower, Publisher
from penstock.cluster.replica import Member, ReplicaSpec
from penstock.cluster.staged_records import revision_of
from penstock.cluster.supervisor import Supervisor
from penstock.core.cluster_view import ReplicaOrder
from penstock.core.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from penstock.core.errors import PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import Request, SamplingParams
from penstock.dispatch.kv_sources import TransferConfig
from penstock.router import ReplicaState
from tests.cluster.test_disaggregation import answers_alone
from tests.cluster.test_fleet_control import TOKENS, view_of
from tests.cluster.test_paused_leader import Control
from tests.copies import CopyingLauncher
from tests.engine.tiny import write_tiny_model
from tests.gateway.ratelimits.redis_server import running_redis

pytest.importorskip("nixl_cu12", reason="needs the extra disaggregation")
pytestmark = pytest.mark.slow

WAIT_S = 300.0
PROMPT = 700  # tokens: more than a decode replica computes itself while there is a prefill replica
ANSWER = 1500  # tokens of an answer that streams while the replica changes its role


def spec_of(model: Path, role: str, num_ranks: int = 1) -> ReplicaSpec:
    engine = EngineConfig(
        model=ModelConfig(model=str(model), device="cpu", dtype="float32", load_format="random"),
        cache=CacheConfig(num_kv_blocks=512),
        scheduler=SchedulerConfig(itl_target_ms=None, max_num_batched_tokens=256, max_num_seqs=16),
        num_threads=1,
        kv_transfer=True,
        speculate="off",
        parallel=ParallelConfig(tensor_parallel_size=num_ranks),
    )
    revision = revision_of(engine, str(model))
    return ReplicaSpec(model="tiny", engine=engine, model_path=str(model), revision=revision, role=role)  # type: ignore[arg-type]


class Host:
    """One machine with engines. It can be kept from hearing the leader."""

    def __init__(self, registry: RedisRegistry, name: str, specs: Sequence[ReplicaSpec]) -> None:
        network = NetworkAddress("127.0.0.1", TOKENS.accepted_clients(), TOKENS.client_keys())
        self.supervisor = Supervisor(
            {"local": CopyingLauncher(network=network, log_level="WARNING")},
            heartbeat_timeout_s=60.0,
            name=name,
            client_keys=TOKENS.client_keys(),
        )
        self.publisher = Publisher(registry, TOKENS, name)
        self.reader = DocumentReader(TOKENS)
        offers = [Offer(spec=specs[0], replicas=len(specs), max_replicas=len(specs))]
        self.ordered = OrderedHost(self.supervisor, self.publisher, self.reader, specs, offers, _as_it_is)
        self.follower = Follower(registry, TOKENS, on_documents=self._take)
        self.is_deaf = False

    def _take(self, documents: Mapping[str, bytes]) -> None:
        if not self.is_deaf:
            self.ordered.take(documents)

    def pids(self) -> dict[str, int | None]:
        return {member.id: self.supervisor.pid(member.id) for member in self.supervisor.members()}


async def _as_it_is(spec: ReplicaSpec) -> ReplicaSpec:
    return spec


class Gateway:
    """One gateway. News of replicas can be held back from it."""

    def __init__(self, registry: RedisRegistry, name: str) -> None:
        self.fleet = Fleet(shared=SharedFleet(TOKENS.client_keys(), 60.0))
        self.link = FleetLink(self.fleet, TOKENS, name)
        self.follower = Follower(registry, TOKENS, self._update, on_documents=self.link.take)
        self.answers: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.failures: list[PenstockError] = []
        self._held: tuple[Member, ...] | None = None
        self.is_late = False

    def _update(self, members: tuple[Member, ...]) -> None:
        if self.is_late:
            self._held = members
        else:
            self.fleet.update(members)

    def catch_up(self) -> None:
        self.is_late = False
        if self._held is not None:
            self.fleet.update(self._held)

    def roles(self) -> dict[str, str]:
        return {member.id: member.role for member in self.fleet.members}

    def num_ready(self) -> int:
        return sum(replica.state is ReplicaState.READY for replica in self.fleet.replicas.values())

    def ask(self, request: Request) -> None:
        self.answers[request.id] = []
        self.fleet.add(request, timeout_s=WAIT_S, on_event=self._on_event, on_error=self.failures.append)

    def has(self, *request_ids: str) -> bool:
        """Whether these are answered. Fails at once if any request was."""
        assert not self.failures
        return self.ended >= set(request_ids)

    def _on_event(self, event: TokenEvent) -> None:
        self.answers[event.request_id].extend(event.token_ids)
        if event.finish_reason is not None:
            self.ended.add(event.request_id)


def make_request(request_id: str, seed: int, max_tokens: int = 8) -> Request:
    prompt = tuple(3 + (seed * n * n + n) % 290 for n in range(PROMPT))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(id=request_id, prompt_token_ids=prompt, sampling=sampling, model="tiny")


async def until(condition: object) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.02)


@dataclass
class Machines:
    """Everything that a test starts."""

    url: str
    folder: Path
    model: Path
    stack: AsyncExitStack
    controls: list[Control] = field(default_factory=list)

    def registry(self) -> RedisRegistry:
        registry = RedisRegistry(self.url)
        self.stack.push_async_callback(registry.close)
        return registry

    async def host(self, name: str, *roles: str, num_ranks: int = 1) -> Host:
        host = Host(self.registry(), name, [spec_of(self.model, role, num_ranks) for role in roles])
        await self.stack.enter_async_context(host.follower.running())
        await self.stack.enter_async_context(host.publisher.running())
        self.stack.push_async_callback(host.supervisor.close)
        await self.stack.enter_async_context(host.ordered.taking_orders())
        await host.ordered.start_own()
        return host

    async def gateway(self, name: str) -> Gateway:
        gateway = Gateway(self.registry(), name)
        self.stack.callback(gateway.fleet.close)
        await self.stack.enter_async_context(gateway.follower.running())
        await self.stack.enter_async_context(gateway.link.running())
        return gateway

    def control(self, *arguments: str) -> Control:
        control = Control(self.folder, len(self.controls), self.url, *arguments)
        self.controls.append(control)
        self.stack.callback(control.close)
        return control


@pytest.fixture
async def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Machines]:
    monkeypatch.setattr(redis_registry, "TIMEOUT_S", 60.0)  # a busy machine is not an outage
    model = write_tiny_model(tmp_path / "tiny")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 4096}))
    with running_redis() as server:
        async with AsyncExitStack() as stack:
            yield Machines(server.url, tmp_path, model, stack)


async def test_the_leader_is_killed_between_its_order_and_the_host_and_a_gateway_hears_late(
    machines: Machines,
) -> None:
    north, south = await asyncio.gather(
        machines.host("north", "prefill", "decode"), machines.host("south", "decode")
    )
    pids = north.pids() | south.pids()
    quick, late = await machines.gateway("quick"), await machines.gateway("late")
    first = machines.control()
    await until(lambda: quick.num_ready() == late.num_ready() == 3 and first.name)
    await view_of(quick.link, lambda view: view.leader and len(view.pools) == 2 and len(view.replicas) == 3)
    machines.control()
    registry = machines.registry()

    # What every answer must be: each prompt is computed where nothing is cached of it.
    quick.ask(make_request("short", 5))
    quick.ask(make_request("long", 6, ANSWER))
    await until(lambda: quick.has("short", "long"))
    expected = {"short": quick.answers["short"], "long": quick.answers["long"]}

    # A decode replica streams for both gateways while it becomes one for prefill.
    for gateway in (quick, late):
        for number in range(3):
            name = f"{id(gateway)}-{number}"
            gateway.ask(replace(make_request(name, 6, ANSWER), tenant=name))
    streams = {gateway: set(gateway.answers) - {"short", "long"} for gateway in (quick, late)}
    await until(
        lambda: all(len(gateway.answers[name]) > 20 for gateway, names in streams.items() for name in names)
    )
    late.is_late = north.is_deaf = south.is_deaf = True
    await quick.link.order_replica(ReplicaOrder(action="convert", replica_id="south-1", role="prefill"))

    async def ordered() -> HostOrders | None:
        data = (await registry.documents()).get(HOST_PREFIX + "south")
        return None if data is None else opened(HOST_PREFIX + "south", data, TOKENS).read(HostOrders)

    while (orders := await ordered()) is None or not orders.slots:
        await asyncio.sleep(0.02)
    first.process.kill()  # the order is written, and no host has heard of it
    assert quick.roles()["south-1"] == "decode"

    async def leader() -> str:
        document = opened(LEADER, (await registry.documents())[LEADER], TOKENS).read(LeaderDocument)
        assert document is not None
        return document.name

    async with asyncio.timeout(WAIT_S):
        while await leader() == first.name:
            await asyncio.sleep(0.05)
    north.is_deaf = south.is_deaf = False
    await until(lambda: quick.roles() == {"north-1": "prefill", "north-2": "decode", "south-1": "prefill"})
    assert late.roles()["south-1"] == "decode"  # and it sends requests by that

    for gateway in (quick, late):
        for number in range(6):
            name = f"after-{id(gateway)}-{number}"
            gateway.ask(replace(make_request(name, 5), tenant=name))
            streams[gateway].add(name)
    await until(lambda: all(gateway.has(*names) for gateway, names in streams.items()))
    late.catch_up()
    late.ask(replace(make_request("caught up", 5), tenant="caught up"))
    await until(lambda: late.has("caught up"))
    for gateway, names in streams.items():
        for name in names:
            assert gateway.answers[name] == expected["short" if name.startswith("after") else "long"]
    assert late.answers["caught up"] == expected["short"]
    assert quick.fleet.dispatcher.kv_sources.chosen["prefill"] >= 6
    # Nothing was loaded again, and no attempt of a request failed.
    assert north.pids() | south.pids() == pids
    assert not quick.fleet.verdicts
    assert not late.fleet.verdicts
    view = await view_of(
        quick.link, lambda view: view.leader and view.leader.name != first.name and view.pools
    )
    assert Counter(each.role for each in view.replicas) == {"prefill": 2, "decode": 1}
    # A converted replica that dies keeps its role in its successor.
    south.supervisor._slot("south-1").process._running.kill()  # type: ignore[union-attr]
    await until(lambda: quick.roles().get("south-2") == "prefill" and quick.num_ready() == 3)


async def test_the_leader_gives_a_full_decode_pool_a_prefill_replica_of_another_host(
    machines: Machines,
) -> None:
    north, south = await asyncio.gather(
        machines.host("north", "prefill", "prefill"), machines.host("south", "decode")
    )
    pids = north.pids() | south.pids()
    gateway = await machines.gateway("gateway")
    control = machines.control(
        *("--min-replicas", "1", "--scale-up-pause-s", "0.5", "--scale-down-pause-s", "600"),
        *("--kv-usage-target", "0.2"),
    )
    await until(lambda: gateway.num_ready() == 3)
    number = 0
    while Counter(gateway.roles().values()) != {"prefill": 1, "decode": 2}:
        number += 1
        names = [f"{number}-{each}" for each in range(3)]
        for name in names:
            gateway.ask(replace(make_request(name, 6, ANSWER), tenant=name))
        await until(lambda: gateway.has(*names))  # noqa: B023
        assert number < 100, control.said
    assert len({tuple(tokens) for tokens in gateway.answers.values()}) == 1
    assert "convert 1: KV utilisation" in control.said
    assert north.pids() | south.pids() == pids
    assert not gateway.fleet.verdicts


async def test_a_prefill_host_with_two_ranks_computes_for_decode_hosts_with_one(machines: Machines) -> None:
    await asyncio.gather(machines.host("wide", "prefill", num_ranks=2), machines.host("narrow", "decode"))
    gateway = await machines.gateway("gateway")
    await until(lambda: gateway.num_ready() == 2)
    # Times that a busy machine measures do not decide.
    gateway.fleet.dispatcher.kv_sources._config = TransferConfig(allowed_delay_s=WAIT_S)
    requests: list[Request] = []
    fetched = failed = 0
    # A sender that a busy machine silences for three seconds is given up, and its KV is computed anew.
    for _ in range(4):
        before, failed_before = fetched, failed
        first = len(requests)
        requests += [make_request(f"long-{number}", 20 + number, 50) for number in range(first, first + 4)]
        for request in requests[first:]:
            gateway.ask(request)
        await until(lambda: gateway.has(*gateway.answers))

        def is_counted(
            least: int = before + 4 * (PROMPT // 16 * 16), most_failed: int = failed_before
        ) -> bool:
            stats = gateway.fleet.stats
            return stats.kv_fetched_tokens >= least or stats.kv_fetches_failed > most_failed

        await until(is_counted)
        fetched, failed = gateway.fleet.stats.kv_fetched_tokens, gateway.fleet.stats.kv_fetches_failed
        if failed == failed_before:
            break
    else:
        pytest.fail("KV failed to move in every round")
    assert gateway.fleet.dispatcher.kv_sources.chosen == {"prefill": len(requests)}
    expected = answers_alone(spec_of(machines.model, "both").engine, requests)
    assert [gateway.answers[request.id] for request in requests] == expected
