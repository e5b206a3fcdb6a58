"""Replicas as actors of a real Ray cluster of two nodes: served, a killed actor, a node that is removed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from penstock.cluster.fleet import Fleet
from penstock.cluster.ray_launcher import RayLauncher
from penstock.cluster.supervisor import Supervisor
from penstock.core.engine_config import CacheConfig
from penstock.core.errors import PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import Request, SamplingParams
from penstock.dispatch import DispatchConfig
from penstock.router import ReplicaState
from tests.cluster.control_stage import SPEC

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

WAIT_S = 60.0
NUM_STREAMS = 4
LENGTH = 10_000  # a quarter of an answer's tokens: long enough for Ray to do something meanwhile
ENGINE = msgspec.structs.replace(SPEC.engine, cache=CacheConfig(num_kv_blocks=1 << 14))
ON_RAY = msgspec.structs.replace(SPEC, engine=ENGINE, launcher="ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    ray.shutdown()
    # Not `cluster.shutdown()`, which gives every process a minute to say goodbye.
    for node in (*cluster.worker_nodes, cluster.head_node):
        node.kill_all_processes(check_alive=False, allow_graceful=False)


@pytest.fixture
async def supervisor(cluster: Any) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor({"ray": RayLauncher(cluster.address, log_level="WARNING")})
    yield supervisor
    await supervisor.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.05)


def num_ready(supervisor: Supervisor) -> int:
    return sum(member.replica.state is ReplicaState.READY for member in supervisor.members())


def num_connected(fleet: Fleet) -> int:
    return sum(link.state is ReplicaState.READY for link in fleet.replicas.values())


async def answered(fleet: Fleet, request_id: str, max_tokens: int = 8) -> list[int]:
    done = asyncio.get_running_loop().create_future()
    tokens: list[int] = []

    def on_event(event: TokenEvent) -> None:
        tokens.extend(event.token_ids)
        if event.finish_reason is not None:
            done.set_result(None)

    def on_error(error: PenstockError) -> None:
        done.set_exception(error)

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    request = Request(id=request_id, prompt_token_ids=tuple(b"abcd"), sampling=sampling)
    fleet.add(request, timeout_s=WAIT_S, on_event=on_event, on_error=on_error)
    async with asyncio.timeout(WAIT_S):
        await done
    return tokens


async def test_a_fleet_on_two_nodes_outlives_an_actor_and_a_node(
    cluster: Any, supervisor: Supervisor
) -> None:
    import ray

    second_node = cluster.add_node(num_cpus=1)
    # Each takes the one CPU that a node has: they land on different ones.
    await asyncio.gather(supervisor.launch(ON_RAY), supervisor.launch(ON_RAY))
    assert num_ready(supervisor) == 2
    fleet = Fleet(DispatchConfig(routing_policy="round-robin"))  # so that some streams are on each node
    supervisor.on_change.append(fleet.update)
    fleet.update(supervisor.members())
    await until(lambda: num_connected(fleet) == 2)
    try:
        assert await answered(fleet, "first") == list(b"abcdabcd")
        first = supervisor.members()[0]
        assert first.endpoint.startswith("tcp://")
        assert not is_answered_without_key(first.endpoint)

        # The actor's process dies, and its engine with it: another one takes its place on the same node.
        async with crowd(fleet, "actor"):
            ray.kill(ray.get_actor(first.id))
        await until(lambda: first.id not in {member.id for member in supervisor.members()})
        await until(lambda: num_connected(fleet) == 2)

        # A node goes, with whatever ran there; the other one serves on.
        async with crowd(fleet, "node"):
            await asyncio.to_thread(cluster.remove_node, second_node, allow_graceful=False)
        await until(lambda: num_ready(supervisor) == 1)
        assert await answered(fleet, "last") == list(b"abcdabcd")
    finally:
        supervisor.on_change.remove(fleet.update)
        fleet.close()


@contextlib.asynccontextmanager
async def crowd(fleet: Fleet, name: str) -> AsyncIterator[None]:
    """Streams that are underway meanwhile. Not a token of any is lost or repeated."""
    streams = [asyncio.create_task(answered(fleet, f"{name}-{n}", 4 * LENGTH)) for n in range(NUM_STREAMS)]
    await until(lambda: fleet.stats.num_running == NUM_STREAMS)
    before = sum(fleet.verdicts.values())
    started_s = time.monotonic()
    yield
    assert await asyncio.gather(*streams) == [list(b"abcd" * LENGTH)] * NUM_STREAMS
    retried = sum(fleet.verdicts.values()) - before
    assert retried > 0
    took_s = time.monotonic() - started_s
    print(f"lost {name}: {NUM_STREAMS} streams, {retried} went on elsewhere, all answered in {took_s:.1f} s")


def is_answered_without_key(endpoint: str) -> bool:
    address = endpoint.partition("#")[0]
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(address)
        stranger.send(msgspec.msgpack.encode({"type": "hello"}))
        return bool(stranger.poll(500))
