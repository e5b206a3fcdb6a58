"""A shared fleet with real engine processes on TCP: two hosts, gateways, faults, and clients without the token."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from penstock.cluster.fleet import Fleet, SharedFleet
from penstock.cluster.host_record import JoinTokens
from penstock.cluster.local import LocalLauncher, NetworkAddress
from penstock.cluster.registry import Follower, Publisher
from penstock.cluster.supervisor import Supervisor
from penstock.cluster.transport import KeyPair, ZmqEngineClient
from penstock.router import ReplicaState
from tests.cluster.engines import ENDLESS, check_beginning, echo_spec, until
from tests.cluster.memory_registry import MemoryRegistry
from tests.cluster.test_faults import check_echoes, echoes, prompts

TOKENS = JoinTokens.parse("a token that these machines share")
MAX_TOKENS = 2_000


@dataclass
class Host:
    """One machine with engines."""

    name: str
    supervisor: Supervisor

    def signal(self, number: signal.Signals) -> None:
        for member in self.supervisor.members():
            pid = self.supervisor.pid(member.id)
            assert pid is not None
            os.kill(pid, number)


@asynccontextmanager
async def hosting(registry: MemoryRegistry, name: str) -> AsyncIterator[Host]:
    network = NetworkAddress("127.0.0.1", TOKENS.accepted_clients(), TOKENS.client_keys())
    supervisor = Supervisor(
        {"local": LocalLauncher(network=network)},
        heartbeat_timeout_s=60.0,
        name=name,
        client_keys=TOKENS.client_keys(),
    )
    publisher = Publisher(registry, TOKENS, name)
    supervisor.on_change.append(publisher.tell)
    async with publisher.running():
        try:
            await supervisor.launch(echo_spec(max_num_batched_tokens=64))  # short steps: short patience
            yield Host(name, supervisor)
        finally:
            await supervisor.close()


@asynccontextmanager
async def gateway(registry: MemoryRegistry) -> AsyncIterator[Fleet]:
    fleet = Fleet(shared=SharedFleet(TOKENS.client_keys(), heartbeat_timeout_s=60.0))
    async with Follower(registry, TOKENS, fleet.update).running():
        try:
            yield fleet
        finally:
            fleet.close()


def num_ready(fleet: Fleet) -> int:
    return sum(replica.state is ReplicaState.READY for replica in fleet.replicas.values())


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def test_two_gateways_share_two_hosts_and_outlive_one(stack: AsyncExitStack) -> None:
    registry = MemoryRegistry()
    first, second = await asyncio.gather(
        *(stack.enter_async_context(hosting(registry, name)) for name in ("north", "south"))
    )
    fleets = [await stack.enter_async_context(gateway(registry)) for _ in range(2)]
    await until(lambda: all(num_ready(fleet) == 2 for fleet in fleets))
    texts = prompts(6)
    streams = [echoes(fleet, texts, ENDLESS, f"gateway-{number}") for number, fleet in enumerate(fleets)]
    for inboxes in streams:
        for inbox in inboxes:
            await inbox.until(lambda inbox: bool(inbox.tokens))
    first.signal(signal.SIGKILL)  # with its answers; the closed connection tells before any lease ends
    for number, (fleet, inboxes) in enumerate(zip(fleets, streams, strict=True)):
        for inbox, text in zip(inboxes, texts, strict=True):
            await check_beginning(inbox, text, len(inbox.tokens) + 500)
        for index in range(len(texts)):
            fleet.abort(f"gateway-{number}-{index}")
    assert sum(sum(fleet.verdicts.values()) for fleet in fleets) >= 1
    await until(lambda: all(num_ready(fleet) == 2 for fleet in fleets))  # the host has replaced its engine
    assert {member.id for member in fleets[0].members} == {"north-2", "south-1"}

    await second.supervisor.drain("south-1", 60.0)
    await until(lambda: num_ready(fleets[0]) == 1)
    await check_echoes(echoes(fleets[0], texts, 50, "late"), texts, 50)
    assert fleets[0].replicas["south-1"].state is ReplicaState.DRAINING


async def test_a_frozen_engine_on_another_machine_costs_a_retry(stack: AsyncExitStack) -> None:
    """The host's supervisor is patient here, as if the network between the two machines were cut."""
    registry = MemoryRegistry()
    first, _ = await asyncio.gather(
        *(stack.enter_async_context(hosting(registry, name)) for name in ("north", "south"))
    )
    fleet = await stack.enter_async_context(gateway(registry))
    await until(lambda: num_ready(fleet) == 2)
    texts = prompts(6)
    inboxes = echoes(fleet, texts, MAX_TOKENS)
    first.signal(signal.SIGSTOP)
    assert fleet._reach is not None
    fleet._reach._silences[
        "north-1"
    ]._timeout_s = 0.6  # the other one may be as slow as a busy machine makes it
    try:
        await check_echoes(inboxes, texts, MAX_TOKENS)
    finally:
        first.signal(signal.SIGCONT)
    await until(lambda: num_ready(fleet) == 2)  # it answers again, and nobody has replaced it
    assert "north-1" in fleet.replicas


async def test_a_cut_connection_is_noticed_at_once(stack: AsyncExitStack) -> None:
    """Before any lease or heartbeat is missed, and whether or not the registry tells."""
    registry = MemoryRegistry()
    host = await stack.enter_async_context(hosting(registry, "north"))
    [member] = host.supervisor.members()
    lost = asyncio.Event()
    client = ZmqEngineClient(member.endpoint, client_keys=TOKENS.client_keys(), on_lost=lost.set)
    client.start()
    await asyncio.wait_for(client.wait_ready(), 60)
    assert not lost.is_set()
    host.signal(signal.SIGKILL)
    await asyncio.wait_for(lost.wait(), 60)
    client.close()


async def test_only_machines_with_the_token_reach_an_engine(stack: AsyncExitStack) -> None:
    registry = MemoryRegistry()
    await stack.enter_async_context(hosting(registry, "north"))
    fleet = await stack.enter_async_context(gateway(registry))
    await until(lambda: num_ready(fleet) == 1)
    endpoint = fleet.members[0].endpoint
    for keys in (KeyPair.make(), JoinTokens.parse("some other token which is long").client_keys()):
        stranger = ZmqEngineClient(endpoint, client_keys=keys)
        stranger.start()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stranger.wait_ready(), 0.5)
        stranger.close()
    friend = ZmqEngineClient(endpoint, client_keys=TOKENS.client_keys())
    friend.start()
    await asyncio.wait_for(friend.wait_ready(), 60)
    friend.close()
