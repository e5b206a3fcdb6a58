"""Registries of shared fleets: what hosts publish, what gateways take over, and what is left out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from penstock.cluster import kubernetes_leases, redis_registry
from penstock.cluster.host_record import HostRecord, JoinTokens, decode_record, encode_record
from penstock.cluster.redis_registry import RedisRegistry
from penstock.cluster.registry import (
    LEASE_S,
    Follower,
    Publisher,
    Registry,
    RegistryError,
)
from penstock.cluster.replica import Member
from penstock.core.clock import VirtualClock
from penstock.core.errors import ConfigError
from penstock.core.messages import WIRE_VERSION
from penstock.gateway.store.database import Database
from penstock.router import Replica, ReplicaState
from penstock.serve.database_registry import DatabaseRegistry
from tests.cluster.engines import echo_spec, until
from tests.cluster.kubernetes_server import KubernetesServer, running_kubernetes
from tests.cluster.memory_registry import MemoryRegistry
from tests.gateway.ratelimits.redis_server import RedisServer, running_redis
from tests.gateway.store.postgres_server import PostgresServer, running_postgres

TOKENS = JoinTokens.parse("the token of this fleet is long")
OTHERS = JoinTokens.parse("the token of another fleet is long")


def member(name: str) -> Member:
    replica = Replica(id=name, models=frozenset(("echo",)), state=ReplicaState.READY)
    return Member(replica=replica, spec=echo_spec(), endpoint="tcp://127.0.0.1:1#key")


def record(host: str, *names: str, tokens: JoinTokens = TOKENS) -> bytes:
    return encode_record(HostRecord(host, tuple(map(member, names))), tokens)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with running_redis() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_registry, "TIMEOUT_S", 60.0)  # a busy machine is not an outage
        yield server


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    pytest.importorskip("psycopg", reason="needs the extra postgres")
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesServer]:
    with (
        running_kubernetes(tmp_path_factory.mktemp("kubernetes")) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(kubernetes_leases, "TIMEOUT_S", 60.0)
        patch.setattr("penstock.cluster.kubernetes_registry.HOSTS_SILENCE_S", 0.5)
        yield server


POSTGRESQL = pytest.param("postgresql", marks=pytest.mark.slow)


def fleet_of(folder: Path) -> str:
    return f"fleet-{zlib.crc32(folder.name.encode())}"


@asynccontextmanager
async def opened(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Registry]:
    registry: Registry
    if kind == "redis":
        registry = RedisRegistry(request.getfixturevalue("redis").url, tmp_path.name)
    elif kind == "database":
        registry = DatabaseRegistry(Database(f"sqlite:///{tmp_path / 'fleet.db'}"))
    elif kind == "postgresql":
        url = request.getfixturevalue("postgres").new_database(tmp_path.name)
        registry = DatabaseRegistry(Database(url))
    elif kind == "kubernetes":
        registry = request.getfixturevalue("kubernetes").registry(fleet_of(tmp_path))
    else:
        registry = MemoryRegistry()
    try:
        yield registry
    finally:
        await registry.close()


@pytest.mark.parametrize("kind", ["memory", "redis", "kubernetes", "database", POSTGRESQL])
async def test_a_record_lives_as_long_as_its_lease(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with opened(kind, request, tmp_path) as registry:
        await registry.publish("a", b"1:binary\0\xff", 60.0)
        await registry.publish("b", b"first", 60.0)
        await registry.publish("b", b"second", 60.0)
        await registry.publish("short", b"", 0.05)
        async with asyncio.timeout(60):
            while len(await registry.records()) > 2:
                await registry.wait_for_change(0.02)
        assert await registry.records() == {"a": b"1:binary\0\xff", "b": b"second"}


async def test_redis_tells_of_a_change_at_once(redis: RedisServer) -> None:
    registry, other = RedisRegistry(redis.url), RedisRegistry(redis.url)
    try:
        await registry.wait_for_change(0.01)  # subscribes
        waiting = asyncio.create_task(registry.wait_for_change(1000.0))
        await other.publish("c", b"new", 60.0)
        await asyncio.wait_for(waiting, 60)
    finally:
        await registry.close()
        await other.close()


async def test_a_registry_that_does_not_answer() -> None:
    registry = RedisRegistry("redis://127.0.0.1:1/0")
    with pytest.raises(RegistryError):
        await registry.publish("a", b"", 1.0)
    with pytest.raises(RegistryError):
        await registry.wait_for_change(0.01)
    with pytest.raises(ConfigError, match="cannot be used"):
        async with Follower(registry, TOKENS, lambda members: None).running():
            pass
    await registry.close()


class Seen:
    """A follower on a clock of its own, and the replicas that it told of last."""

    def __init__(self) -> None:
        self.now = 0.0
        self.names: list[str] = []
        self.registry = MemoryRegistry()
        self.follower = Follower(self.registry, TOKENS, self.told, now=lambda: self.now)

    def told(self, members: tuple[Member, ...]) -> None:
        self.names = [each.id for each in members]

    def take(self, **records: bytes) -> list[str]:
        self.follower._take(records)
        return self.names


def test_gateways_know_the_replicas_of_all_hosts() -> None:
    seen = Seen()
    assert seen.take(b=record("b", "b-1"), a=record("a", "a-1", "a-2")) == ["a-1", "a-2", "b-1"]
    assert seen.take(b=record("b"), a=record("a", "a-2")) == ["a-2"]


def test_a_host_that_vanishes_is_dropped_after_its_lease() -> None:
    """A registry that was restarted has lost its records, and living hosts write them again."""
    seen = Seen()
    seen.take(a=record("a", "a-1"))
    seen.now = LEASE_S - 1
    assert seen.take() == ["a-1"]
    assert seen.take(a=record("a", "a-1")) == ["a-1"]
    seen.now += LEASE_S + 1
    assert seen.take() == []


def test_a_host_that_cannot_renew_its_record_stays_while_its_engines_answer() -> None:
    """A registry may take no writes and answer all questions, as a Redis without memory and a standby do."""
    seen = Seen()
    answering = {"a-1", "b-1"}
    seen.follower = Follower(
        seen.registry,
        TOKENS,
        seen.told,
        answers=lambda host: any(each.id in answering for each in host.members),
        now=lambda: seen.now,
    )
    seen.take(a=record("a", "a-1"), b=record("b", "b-1"))
    seen.now += 10 * LEASE_S
    assert seen.take() == ["a-1", "b-1"]
    answering.remove("b-1")
    assert seen.take() == ["a-1"]
    assert seen.take(a=record("a")) == []  # it says itself that it leaves
    seen.now += LEASE_S + 1
    seen.take()
    assert not seen.follower._hosts


def test_records_that_cannot_be_trusted_or_understood_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen()
    forged = record("a", "a-1", tokens=OTHERS)
    mac = record("a", "a-1").partition(b"\n")[0]
    changed = mac + b"\n" + record("a", "a-2").partition(b"\n")[2]
    body = msgspec.json.encode({"wire_version": WIRE_VERSION + 1, "record": {"hosts": 3}})
    newer = TOKENS.sign(body)
    nonsense = TOKENS.sign(msgspec.json.encode({"wire_version": WIRE_VERSION, "record": [1]}))
    under_another_name = record("d", "d-1")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert (
                seen.take(
                    a=forged, b=changed, c=newer, e=nonsense, f=b"\xff\x00", g=under_another_name, h=b""
                )
                == []
            )
    messages = [each.getMessage() for each in caplog.records]
    assert sum("was not signed" in message for message in messages) == 4
    assert sum(f"version {WIRE_VERSION + 1}" in message for message in messages) == 1
    assert len(messages) == 6, "each is complained about once"


def test_two_tokens_are_accepted_while_tokens_are_changed() -> None:
    both = JoinTokens(OTHERS.tokens + TOKENS.tokens)
    assert both.verified(TOKENS.sign(b"x")) == both.verified(OTHERS.sign(b"x")) == b"x"
    assert TOKENS.verified(both.sign(b"x")) is None
    assert set(both.accepted_clients()) == {TOKENS.client_keys().public, OTHERS.client_keys().public}


def test_machines_accept_each_other_in_every_step_of_a_change_of_tokens() -> None:
    old, new = TOKENS.tokens, OTHERS.tokens
    steps = [JoinTokens(tokens) for tokens in (old, old + new, new + old, new)]
    for before, after in itertools.pairwise(steps):
        for one, other in ((before, after), (after, before)):
            assert other.verified(one.sign(b"x")) == b"x"
            assert one.client_keys().public in other.accepted_clients()


@pytest.mark.parametrize("text", ["", "short", "a token that is long enough,short"])
def test_a_weak_join_token_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="at least 20 characters"):
        JoinTokens.parse(text)


class MoodyRegistry(MemoryRegistry):
    """A registry that can be away."""

    is_away = False
    num_refused = 0, 0  # publications and readings

    async def publish(self, name: str, record: bytes, lease_s: float) -> None:
        if self.is_away:
            self.num_refused = self.num_refused[0] + 1, self.num_refused[1]
            raise RegistryError("gone")
        await super().publish(name, record, lease_s)

    async def records(self) -> dict[str, bytes]:
        if self.is_away:
            self.num_refused = self.num_refused[0], self.num_refused[1] + 1
            raise RegistryError("gone")
        return await super().records()

    async def refused_often(self) -> None:
        """Return when the publisher and the follower were refused, and have tried again."""
        before = self.num_refused
        await until(lambda: all(now > then + 1 for now, then in zip(self.num_refused, before, strict=True)))


async def test_replicas_stay_known_while_the_registry_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RENEW_S", "RETRY_S", "POLL_S"):
        monkeypatch.setattr(f"penstock.cluster.registry.{name}", 0.01)
    clock = VirtualClock(100.0)
    monkeypatch.setattr("penstock.cluster.registry.time", SimpleNamespace(monotonic=clock.now))
    registry = MoodyRegistry()
    seen: list[tuple[Member, ...]] = []
    publisher = Publisher(registry, TOKENS, "a")
    follower = Follower(registry, TOKENS, seen.append, now=clock.now)
    async with follower.running():
        async with publisher.running():
            publisher.tell((member("a-1"),))
            await until(lambda: follower.members)
            registry.is_away = True
            await registry.refused_often()
            for _ in range(3):
                clock.advance(0.6 * LEASE_S)
                await registry.refused_often()
            assert [each.id for each in follower.members] == ["a-1"]
            registry.is_away = False
            publisher.tell((member("a-2"),))
            await until(lambda: [each.id for each in follower.members] == ["a-2"])
        await until(lambda: not follower.members)
    assert [len(members) for members in seen] == [1, 1, 0]


async def test_an_error_that_nobody_foresaw_ends_no_publishing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.cluster.registry.RETRY_S", 0.01)
    registry = MemoryRegistry()
    publish, num_failed = registry.publish, 0

    async def fail_once(name: str, data: bytes, lease_s: float) -> None:
        nonlocal num_failed
        num_failed += 1
        if num_failed == 2:
            raise KeyError("unforeseen")
        await publish(name, data, lease_s)

    monkeypatch.setattr(registry, "publish", fail_once)
    publisher = Publisher(registry, TOKENS, "a")
    async with publisher.running():
        publisher.tell((member("a-1"),))
        await until(lambda: num_failed > 2)
    assert "is tried again" in caplog.text


async def test_an_error_in_one_change_ends_no_following(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A gateway would otherwise keep its replicas for ever, whatever became of them, and say nothing."""
    for name in ("RETRY_S", "POLL_S"):
        monkeypatch.setattr(f"penstock.cluster.registry.{name}", 0.01)
    registry, seen = MemoryRegistry(), []

    def take(members: tuple[Member, ...]) -> None:
        seen.append(members)
        if len(seen) == 1:
            raise RuntimeError("once")

    async with Follower(registry, TOKENS, take).running():
        await registry.publish("a", record("a", "a-1"), 60.0)
        await until(lambda: seen)
        await registry.publish("a", record("a", "a-2"), 60.0)
        await until(lambda: len(seen) == 2)
    assert "could not be followed" in caplog.text


@pytest.mark.parametrize("kind", ["memory", "redis", "kubernetes", "database", POSTGRESQL])
async def test_one_candidate_leads_at_a_time(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with opened(kind, request, tmp_path) as registry:
        first = await registry.lead("a", 60.0, 7)
        assert first is not None
        assert first > 7
        assert await registry.lead("b", 60.0, 0) is None
        assert await registry.lead("a", 60.0, 0) == first  # renewed
        await registry.resign("b")  # is not its to give up
        assert await registry.lead("b", 60.0, 0) is None
        await registry.resign("a")
        second = await registry.lead("b", 0.05, 0)
        assert second is not None
        assert second > first
        async with asyncio.timeout(60):
            while (third := await registry.lead("a", 60.0, 0)) is None:
                await asyncio.sleep(0.01)
        assert third > second


@pytest.mark.parametrize("kind", ["redis", "kubernetes", "database", POSTGRESQL])
async def test_a_clock_that_was_set_back_keeps_nobody_for_long(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease of an hour is one that was given an hour ahead of the clock of today."""
    monkeypatch.setattr("penstock.cluster.registry.LONGEST_LEASE_S", 0.05)
    async with opened(kind, request, tmp_path) as registry:
        first = await registry.lead("a", 3600.0, 0)
        await registry.publish("gone", b"record", 3600.0)
        async with asyncio.timeout(60):
            while (second := await registry.lead("b", 60.0, 0)) is None:
                await asyncio.sleep(0.01)
            while "gone" in await registry.records():
                await registry.publish("alive", b"record", 60.0)
        assert first is not None
        assert second == first + 1
        assert await registry.lead("b", 60.0, 0) == second, "whoever holds it may renew it"


@pytest.mark.parametrize("kind", ["memory", "redis", "kubernetes", "database", POSTGRESQL])
async def test_only_the_latest_leader_writes_documents(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with opened(kind, request, tmp_path) as registry:
        first = await registry.lead("x", 60.0, 100)
        assert first is not None
        assert await registry.write("one", b"\0\xff", first)
        assert await registry.write("two", b"2", first)
        await registry.resign("x")
        second = await registry.lead("y", 60.0, 0)
        assert second is not None
        assert not await registry.write("one", b"late", first)  # as a paused leader would
        assert not await registry.write("two", None, first)
        assert await registry.documents() == {"one": b"\0\xff", "two": b"2"}
        assert await registry.write("two", None, second)
        assert await registry.documents() == {"one": b"\0\xff"}


def test_a_record_of_another_version_is_read_without_what_is_unknown() -> None:
    body = msgspec.json.decode(msgspec.json.encode(HostRecord("north", (member("one"),))))
    body["colour"] = "blue"
    body["members"][0]["spec"]["engine"]["scheduler"]["unheard_of"] = 1
    envelope = {"wire_version": WIRE_VERSION, "record": body}
    read = decode_record(TOKENS.sign(msgspec.json.encode(envelope)), TOKENS)
    assert read == HostRecord("north", (member("one"),))


class DeafRegistry(MemoryRegistry):
    """Swallows the first cancellation of a call, as clients of Redis do when it comes with an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = asyncio.Event()
        self._is_deaf = True

    async def _listen(self) -> None:
        self.entered.set()
        if self._is_deaf:
            self._is_deaf = False
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def publish(self, name: str, record: bytes, lease_s: float) -> None:
        if await self.records():  # the first publication is awaited by whoever begins to publish
            await self._listen()
        await super().publish(name, record, lease_s)

    async def wait_for_change(self, timeout_s: float) -> None:
        await self._listen()
        await super().wait_for_change(timeout_s)


async def test_a_swallowed_cancellation_keeps_nobody_from_leaving() -> None:
    registry = DeafRegistry()
    publisher = Publisher(registry, TOKENS, "north")
    async with asyncio.timeout(60), publisher.running():
        publisher.tell((member("one"),))
        await registry.entered.wait()
    registry = DeafRegistry()
    async with asyncio.timeout(60), Follower(registry, TOKENS, lambda members: None).running():
        await registry.entered.wait()


def test_a_record_says_only_what_differs_from_defaults() -> None:
    """An earlier version refuses settings of engines that it does not know."""
    told = encode_record(HostRecord("north", (member("one"),)), TOKENS)
    body = msgspec.json.decode(told.partition(b"\n")[2])["record"]
    assert body["members"][0]["spec"]["engine"] == {
        "model": {"model": "echo", "max_model_len": 1 << 20},
        "cache": {"num_kv_blocks": 1 << 18},
    }


async def test_a_cancellation_that_the_client_swallows_still_ends_the_call(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `asyncio.wait_for` of Python 3.11 does if the cancellation comes at the wrong moment."""
    registry = RedisRegistry(redis.url, "swallowing")
    began = asyncio.Event()

    async def swallow(**_: object) -> list[bytes]:
        began.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return []

    monkeypatch.setattr(registry, "_records", swallow)
    task = asyncio.create_task(registry.records())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await registry.close()


async def test_a_connection_that_uvloop_has_just_closed_is_an_error_of_the_registry(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate whose task ended with such an error would never lead again."""
    registry = RedisRegistry(redis.url, "closing")

    async def closed(**_: object) -> int:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    with monkeypatch.context() as patch:
        patch.setattr(registry, "_lead", closed)
        with pytest.raises(RegistryError, match="handler is closed"):
            await registry.lead("first", 5.0, 0)
    assert await registry.lead("first", 5.0, 0) == 1
    await registry.close()
