"""Replicas as actors of a real Ray cluster: served, a killed actor, a removed node, a replica on two nodes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from penstock.cluster.control_plane import ControlPlane
from penstock.cluster.fleet import Fleet
from penstock.cluster.local import LocalLauncher
from penstock.cluster.ray_launcher import RayLauncher
from penstock.cluster.replica import ReplicaSpec
from penstock.cluster.staged_records import MemoryRecords
from penstock.cluster.supervisor import Supervisor
from penstock.control.autoscaler import AutoscalerConfig
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import Adapter, Request, SamplingParams
from penstock.dispatch import DispatchConfig
from penstock.router import ReplicaState
from tests.cluster.control_stage import SPEC, resolve
from tests.engine.tiny import write_tiny_adapter, write_tiny_model
from tests.models.checkpoints import make_reference

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

WAIT_S = 180.0
NUM_STREAMS = 4
LENGTH = 10_000  # a quarter of an answer's tokens: long enough for Ray to do something meanwhile
ENGINE = msgspec.structs.replace(SPEC.engine, cache=CacheConfig(num_kv_blocks=1 << 14))
HEAD = {"num_cpus": 1, "memory": 1 << 10, "include_dashboard": False}
ON_RAY = msgspec.structs.replace(SPEC, engine=ENGINE, launcher="ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
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


async def until_lost(node: Any) -> None:
    """Wait until Ray has noticed that a node was killed. Before that, the node's memory counts as room."""
    import ray

    await until(lambda: not any(each["Alive"] for each in ray.nodes() if each["NodeID"] == node.node_id))


def num_ready(supervisor: Supervisor) -> int:
    return sum(member.replica.state is ReplicaState.READY for member in supervisor.members())


def num_connected(fleet: Fleet) -> int:
    return sum(link.state is ReplicaState.READY for link in fleet.replicas.values())


async def answered(
    fleet: Fleet,
    request_id: str,
    max_tokens: int = 8,
    prompt: tuple[int, ...] = tuple(b"abcd"),
    adapter: Adapter | None = None,
) -> list[int]:
    done = asyncio.get_running_loop().create_future()
    tokens: list[int] = []

    def on_event(event: TokenEvent) -> None:
        tokens.extend(event.token_ids)
        if event.finish_reason is not None:
            done.set_result(None)

    def on_error(error: PenstockError) -> None:
        done.set_exception(error)

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    request = Request(id=request_id, prompt_token_ids=prompt, sampling=sampling, adapter=adapter)
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
        await until_lost(second_node)
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
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(address)
        peer.send(msgspec.msgpack.encode({"type": "hello"}))
        return bool(peer.poll(500))


async def test_a_model_that_no_node_holds_runs_on_two_and_outlives_a_stage(
    cluster: Any, tmp_path: Path
) -> None:
    import ray
    from ray.util import placement_group_table

    model = make_reference("llama", tmp_path).folder
    stored = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    engine = EngineConfig(
        model=ModelConfig(model=str(model), device="cpu", dtype="float32"),
        cache=CacheConfig(num_kv_blocks=256),
        num_threads=1,
        speculate="off",
    )
    spec = ReplicaSpec(model="tiny", engine=engine, model_path=str(model), launcher="ray")
    two_stages = msgspec.structs.replace(
        spec, engine=msgspec.structs.replace(engine, parallel=ParallelConfig(pipeline_parallel_size=2))
    )
    # Each node declares memory for a half of the model, and not for the whole.
    nodes = [cluster.add_node(num_cpus=2, memory=int(0.9 * stored)) for _ in range(2)]
    prompt = tuple(range(3, 40))
    supervisor = Supervisor(
        {"ray": RayLauncher(cluster.address, placement="strict-spread"), "local": LocalLauncher()}
    )
    fleet = Fleet(DispatchConfig(routing_policy="round-robin"))
    supervisor.on_change.append(fleet.update)
    try:
        with pytest.raises(ConfigError, match=r"needs .* of memory, and the largest node") as refused:
            await supervisor.launch(spec)
        assert "--pipeline-parallel-size 2" in (refused.value.hint or "")

        alone = await supervisor.launch(msgspec.structs.replace(spec, launcher="local"))
        await until(lambda: num_connected(fleet) == 1)
        expected = await answered(fleet, "alone", 200, prompt)
        await supervisor.stop(alone)

        await supervisor.launch(two_stages)
        await until(lambda: num_connected(fleet) == 1)
        assert await answered(fleet, "two-nodes", 200, prompt) == expected
        (member,) = supervisor.members()
        (group,) = [
            each
            for each in placement_group_table().values()
            if each["name"] == f"penstock-{member.id}" and each["state"] == "CREATED"  # others had this name
        ]
        assert len(set(group["bundles_to_node_id"].values())) == 2

        # A rank of the second stage is lost with streams underway: they go on when the replica is replaced.
        streams = [asyncio.create_task(answered(fleet, f"lost-{n}", 200, prompt)) for n in range(NUM_STREAMS)]
        await until(lambda: fleet.stats.num_running == NUM_STREAMS)
        started_s = time.monotonic()
        ray.kill(ray.get_actor(f"{member.id}-stage-1"))
        assert await asyncio.gather(*streams) == [expected] * NUM_STREAMS
        assert sum(fleet.verdicts.values()) > 0
        assert member.id not in {each.id for each in supervisor.members()}
        print(f"lost a stage: all answered in {time.monotonic() - started_s:.1f} s")
    finally:
        supervisor.on_change.remove(fleet.update)
        fleet.close()
        await supervisor.close()
        for node in nodes:
            await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
            await until_lost(node)


async def test_ranks_on_two_nodes_exchange_kv_and_use_an_adapter(cluster: Any, tmp_path: Path) -> None:
    """Prefill and decode replicas of two ranks each, on different nodes, answer as one rank on this machine."""
    pytest.importorskip("nixl_cu12", reason="needs the extra disaggregation")
    model = write_tiny_model(tmp_path / "model", max_position_embeddings=2048)
    adapter = write_tiny_adapter(tmp_path / "adapter", 1)
    alone = EngineConfig(
        model=ModelConfig(model=str(model), device="cpu", dtype="float32", load_format="random"),
        cache=CacheConfig(num_kv_blocks=256),
        num_threads=1,
        speculate="off",
    )
    parallel = msgspec.structs.replace(
        alone, kv_transfer=True, parallel=ParallelConfig(tensor_parallel_size=2)
    )
    spec = ReplicaSpec(model="tiny", engine=alone, model_path=str(model))
    on_ray = msgspec.structs.replace(spec, engine=parallel, launcher="ray")
    prompt = tuple(3 + (5 * n * n + n) % 290 for n in range(700))
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    supervisor = Supervisor({"ray": RayLauncher(cluster.address), "local": LocalLauncher()})
    fleet = Fleet()
    supervisor.on_change.append(fleet.update)
    try:
        local = await supervisor.launch(spec)
        await until(lambda: num_connected(fleet) == 1)
        expected = [
            await answered(fleet, f"alone {n}", 20, prompt, each) for n, each in enumerate((adapter, None))
        ]
        assert expected[0] != expected[1]
        await supervisor.stop(local)

        await asyncio.gather(
            *(supervisor.launch(msgspec.structs.replace(on_ray, role=role)) for role in ("prefill", "decode"))
        )
        await until(lambda: num_connected(fleet) == 2)
        tokens = [
            await answered(fleet, f"moved {n}", 20, prompt, each) for n, each in enumerate((adapter, None))
        ]
        assert tokens == expected
        assert fleet.dispatcher.kv_sources.chosen["prefill"] == 2
        await until(lambda: fleet.stats.kv_fetched_tokens == 2 * (700 // 16 * 16))
        assert fleet.stats.kv_fetches_failed == 0
    finally:
        supervisor.on_change.remove(fleet.update)
        fleet.close()
        await supervisor.close()
        for node in nodes:
            await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
            await until_lost(node)


async def test_a_replica_on_another_node_changes_its_role_and_its_stream_continues(cluster: Any) -> None:
    """The autoscaler converts replicas on Ray as it converts local processes: no actor is started."""
    node = cluster.add_node(num_cpus=2)
    supervisor = Supervisor({"ray": RayLauncher(cluster.address, log_level="WARNING")})
    prefill = msgspec.structs.replace(
        ON_RAY, role="prefill", engine=msgspec.structs.replace(ENGINE, cache=CacheConfig(num_kv_blocks=4096))
    )
    decode = msgspec.structs.replace(prefill, role="decode")
    scaling = AutoscalerConfig(max_replicas=3, kv_target=0.2, up_cooldown_s=0.2, down_cooldown_s=600.0)
    pools = [(prefill, scaling), (decode, scaling)]
    plane = ControlPlane(supervisor, pools, MemoryRecords(), resolve, look_interval_s=0.05)
    fleet = Fleet()
    try:
        await asyncio.gather(*(supervisor.launch(spec) for spec in (prefill, prefill, decode)))
        ids = {member.id for member in supervisor.members()}
        supervisor.on_change.append(fleet.update)
        fleet.update(supervisor.members())
        await until(lambda: num_connected(fleet) == 3)

        def roles() -> Counter[str]:
            return Counter(member.role for member in supervisor.members())

        async with plane.running():
            number = 0
            while roles() != {"prefill": 1, "decode": 2}:
                number += 1
                assert number < 50
                # This fills half of the KV cache of the only decode replica.
                assert await answered(fleet, f"stream-{number}", 4 * LENGTH) == list(b"abcd" * LENGTH)
            assert [each.decision for each in plane.view().decisions] == ["convert 1: KV utilisation"]
            # A role that changes in the middle of a stream changes nothing for the stream.
            stream = asyncio.create_task(answered(fleet, "last", 4 * LENGTH))
            await until(lambda: fleet.stats.num_running == 1)
            [busy] = [each.id for each in supervisor.members() if supervisor.stats(each.id).num_running]
            supervisor.convert(busy, "prefill")
            assert await stream == list(b"abcd" * LENGTH)
        assert {member.id for member in supervisor.members()} == ids
        assert supervisor.num_restarts == 0
        assert not fleet.verdicts
    finally:
        await supervisor.close()
        fleet.close()
        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
