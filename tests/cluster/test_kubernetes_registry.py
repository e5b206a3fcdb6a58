"""A registry in the API server of Kubernetes: what no other registry does. `test_registry` has the rest."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import kubernetes_validate
import pytest

from penstock.cluster import kubernetes_leases, kubernetes_registry
from penstock.cluster.kubernetes_registry import KubernetesRegistry, Pod
from penstock.cluster.registry import Follower, Publisher, RegistryError
from penstock.core.errors import ConfigError
from tests.cluster.engines import until
from tests.cluster.kubernetes_server import NAMESPACE, KubernetesServer, running_kubernetes
from tests.cluster.test_registry import TOKENS, member
from tests.loop_time import pass_time

LEADER = "penstock-leader"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesServer]:
    monkeypatch.setattr(kubernetes_leases, "TIMEOUT_S", 60.0)  # a busy machine is not an outage
    monkeypatch.setattr(kubernetes_leases, "RETRY_S", 0.01)
    monkeypatch.setattr(kubernetes_registry, "HOSTS_SILENCE_S", 0.5)
    with running_kubernetes(tmp_path) as server:
        yield server


@pytest.fixture
async def cluster(server: KubernetesServer) -> AsyncIterator[KubernetesRegistry]:
    registry = server.registry()
    yield registry
    await registry.close()


@pytest.fixture
async def other(server: KubernetesServer) -> AsyncIterator[KubernetesRegistry]:
    registry = server.registry()
    yield registry
    await registry.close()


async def shows(registry: KubernetesRegistry, **records: bytes) -> None:
    """Wait until a registry knows of these records, whatever it must live through."""
    async with asyncio.timeout(60):
        while True:
            try:
                if await registry.records() == records:
                    return
            except RegistryError:
                pass
            await registry.wait_for_change(0.02)


async def test_a_watch_tells_of_a_change_at_once_and_not_of_a_renewal(
    cluster: KubernetesRegistry, other: KubernetesRegistry, server: KubernetesServer
) -> None:
    await other.publish("a", b"record", 60.0)
    await cluster.records()
    waiting = asyncio.create_task(cluster.wait_for_change(1000.0))
    await other.publish("a", b"record", 60.0)
    await until(lambda: cluster._hosts._version == str(server._version))  # the watch has told of the renewal
    assert not waiting.done()
    await other.publish("a", b"changed", 60.0)
    await asyncio.wait_for(waiting, 60)
    assert await cluster.records() == {"a": b"changed"}
    assert [verb for verb, _ in server.asked if verb in ("list", "watch")].count("watch") == 1


async def test_a_copy_outlives_all_that_happens_to_a_watch(
    cluster: KubernetesRegistry, other: KubernetesRegistry, server: KubernetesServer
) -> None:
    await other.publish("a", b"1", 60.0)
    await shows(cluster, a=b"1")
    server.end_watches()  # as the API server does every few minutes
    await other.publish("a", b"2", 60.0)
    await shows(cluster, a=b"2")
    server.forget_changes()  # 410 Gone
    server.end_watches()
    await other.publish("b", b"3", 60.0)
    await shows(cluster, a=b"2", b=b"3")
    server.cut()
    await other.publish("b", b"4", 60.0)
    await shows(cluster, a=b"2", b=b"4")
    server.garbage = b"<html>"
    server.end_watches()
    await until(lambda: cluster._hosts._error is not None)
    with pytest.raises(RegistryError, match="answers with no Leases"):
        await cluster.records()
    server.garbage = None
    server.remove(next(name for _, name in server.objects if "-host-" in name))
    async with asyncio.timeout(60):
        while True:
            try:
                if len(await cluster.records()) == 1:
                    break
            except RegistryError:
                pass
            await asyncio.sleep(0.01)


async def test_a_silent_server_is_away_and_its_hosts_are_not_gone(
    cluster: KubernetesRegistry,
    other: KubernetesRegistry,
    server: KubernetesServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Records whose renewals cannot be seen do not end: engines and gateways go on without a registry."""
    now_s = 100.0  # by which leases end: a busy machine may stop for longer than a lease
    monkeypatch.setattr(kubernetes_leases, "time", SimpleNamespace(monotonic=lambda: now_s))
    cluster._hosts._silence_s = 0.1
    await other.publish("a", b"1", 1.0)
    await shows(cluster, a=b"1")
    server.is_silent = True
    server.end_watches()
    now_s += 2.0  # longer than the lease
    await asyncio.sleep(0.3)  # the question that follows the watch has no answer
    assert await cluster.records() == {"a": b"1"}, "nobody knows yet that the server is away"
    heard_s = cluster._hosts.heard_s
    server.is_silent = False
    await other.publish("a", b"1", 1.0)
    await until(lambda: cluster._hosts.heard_s > heard_s)  # the question that waited is answered
    await shows(cluster, a=b"1")
    monkeypatch.setattr(kubernetes_leases, "TIMEOUT_S", 0.2)
    server.is_silent = True
    server.cut()
    await until(lambda: "in time" in str(cluster._hosts._error))
    now_s += 2.0
    with pytest.raises(RegistryError, match="did not answer in time"):
        await cluster.records()
    monkeypatch.setattr(kubernetes_leases, "TIMEOUT_S", 60.0)
    server.is_silent = False
    await until(lambda: cluster._hosts._error is None)
    assert await cluster.records() == {"a": b"1"}, "its host has a lease to renew it"
    now_s += 2.0
    await shows(cluster)


async def test_a_leader_that_wakes_up_late_writes_nothing(
    cluster: KubernetesRegistry, other: KubernetesRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its write was on its way when another took over, and comes after that, to a document that the other has not
    written yet."""
    epoch = await cluster.lead("first", 1.0, 0)
    assert epoch is not None
    assert await cluster.write("one", b"1", epoch)
    paused, awake = asyncio.Event(), asyncio.Event()
    change = cluster._leases.change

    async def late(name: str, body: dict[str, object]) -> object:
        paused.set()
        await awake.wait()
        return await change(name, body)

    with monkeypatch.context() as patch:
        patch.setattr(cluster._leases, "change", late)
        writing = asyncio.create_task(cluster.write("two", b"late", epoch))
        await paused.wait()
        async with asyncio.timeout(60):
            while (second := await other.lead("second", 60.0, 0)) is None:
                await asyncio.sleep(0.02)
        awake.set()
        assert not await writing
    assert second == epoch + 1
    assert await cluster.lead("first", 1.0, 0) is None
    assert await other.documents() == {"one": b"1"}
    assert await other.write("two", b"2", second)
    assert await other.documents() == {"one": b"1", "two": b"2"}


async def test_what_a_person_edits_or_removes_is_made_again(
    cluster: KubernetesRegistry, server: KubernetesServer
) -> None:
    epoch = await cluster.lead("x", 60.0, 0)
    assert epoch is not None
    assert await cluster.write("one", b"1", epoch)
    server.edit(LEADER, {"metadata": {"annotations": {"note": "hello"}}})
    for number in range(kubernetes_registry.NUM_PARTS):
        server.edit(f"penstock-documents-{number}", {"metadata": {"annotations": {"note": "hello"}}})
    assert await cluster.lead("x", 60.0, 0) == epoch
    assert await cluster.write("one", b"2", epoch), "a conflict is no other leader"
    for number in range(kubernetes_registry.NUM_PARTS):
        server.remove(f"penstock-documents-{number}")
    assert await cluster.write("two", b"2", epoch)
    assert await cluster.documents() == {"two": b"2"}
    server.remove(LEADER)
    assert not await cluster.write("two", b"3", epoch - 1)
    assert await cluster.lead("x", 60.0, 41) == 42, "a registry without a memory is told of earlier epochs"


async def test_records_leave_with_their_pods_and_forgotten_ones_are_removed(
    server: KubernetesServer, cluster: KubernetesRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.publish("old", b"", 1.0)
    name = next(name for _, name in server.objects)
    server.edit(name, {"spec": {"renewTime": "2020-01-01T00:00:00.000000Z"}})
    own = server.registry(pod=Pod("engine-1", "uid-1"))
    await own.publish("new", b"", 60.0)
    (lease,) = server.objects.values()
    assert lease["spec"]["holderIdentity"] == "new"
    assert lease["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Pod", "name": "engine-1", "uid": "uid-1"}
    ]
    await own.close()


async def test_a_replaced_token_and_a_busy_server(
    server: KubernetesServer, cluster: KubernetesRegistry
) -> None:
    await cluster.publish("a", b"1", 60.0)
    server.tokens = {"second"}
    with pytest.raises(RegistryError, match="does not accept the token"):
        await cluster.publish("a", b"2", 60.0)
    (server.account / "token").write_text("second")
    server.num_busy = 2
    await cluster.publish("a", b"2", 60.0)
    assert await cluster.records() == {"a": b"2"}
    server.num_busy = 1_000_000
    publishing = asyncio.create_task(cluster.publish("a", b"3", 60.0))
    await until(lambda: server.num_busy < 999_999)  # the first answer has come
    pass_time(kubernetes_leases.TIMEOUT_S)
    with pytest.raises(RegistryError, match="too many requests"):
        await publishing


async def test_a_record_that_is_too_large_is_told(cluster: KubernetesRegistry) -> None:
    with pytest.raises(RegistryError, match="may not be more than 262144 bytes"):
        await cluster.publish("a", bytes(200_000), 60.0)


@pytest.mark.parametrize(
    ("verb", "said"),
    [("list", "may not list leases in llm"), ("watch", "may not watch"), ("patch", "may not patch")],
)
async def test_missing_rights_are_told_before_a_role_joins(
    server: KubernetesServer, cluster: KubernetesRegistry, verb: str, said: str
) -> None:
    server.forbidden = {verb}
    with pytest.raises(ConfigError, match=said):
        async with (
            Follower(cluster, TOKENS, on_documents=lambda documents: None).running(),
            Publisher(cluster, TOKENS, "north").running(),
        ):
            pass
    assert server.objects == {}


async def test_a_namespace_that_does_not_exist_is_told(
    server: KubernetesServer, cluster: KubernetesRegistry
) -> None:
    server.namespaces.clear()
    publisher = Publisher(cluster, TOKENS, "north")
    publisher.tell((member("one"),))
    with pytest.raises(ConfigError, match=f'namespaces "{NAMESPACE}" not found'):
        async with publisher.running():
            pass


async def test_hosts_watch_documents_and_no_records(
    server: KubernetesServer, cluster: KubernetesRegistry
) -> None:
    """Every host would be told of every renewal of every other host."""
    async with Follower(cluster, TOKENS, on_documents=lambda documents: None).running():
        assert cluster._hosts._following is None
        assert cluster._documents._following is not None


async def test_objects_are_those_of_kubernetes(server: KubernetesServer) -> None:
    registry = server.registry(pod=Pod("engine-1", "uid-1"))
    await registry.publish("north", b"record", 10.0)
    epoch = await registry.lead("x", 5.0, 0)
    assert epoch is not None
    assert await registry.write("host/north", b"orders", epoch)
    await registry.resign("x")
    await registry.close()
    assert len(server.objects) == kubernetes_registry.NUM_PARTS + 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for lease in server.objects.values():
            kubernetes_validate.validate(lease, "1.37", strict=True)
