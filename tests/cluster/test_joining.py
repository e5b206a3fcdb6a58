"""What a process finds out about a fleet before it joins, and what it says of a registry that is none."""

from __future__ import annotations

import asyncio
import http.server
import logging
import threading
from collections.abc import Iterator

import msgspec
import pytest

from penstock.cluster import joining
from penstock.cluster.host_record import HostRecord, JoinTokens, encode_record
from penstock.cluster.joining import check_neighbours
from penstock.cluster.redis_registry import KEY_PREFIX, RedisRegistry
from penstock.cluster.registry import RegistryError
from penstock.core.errors import ConfigError
from penstock.core.messages import WIRE_VERSION
from penstock.gateway.store.database import Database
from penstock.serve.database_registry import DatabaseRegistry
from tests.cluster.memory_registry import MemoryRegistry
from tests.gateway.ratelimits.redis_server import RedisServer, running_redis
from tests.gateway.store.postgres_server import running_postgres

OLD, NEW = "the old token of this fleet", "the new token of this fleet"
OURS, THEIRS = JoinTokens.parse(OLD), JoinTokens.parse("the token of another fleet")


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "LOOK_AGAIN_S", 0.01)


async def registry_of(*records: tuple[str, JoinTokens]) -> MemoryRegistry:
    registry = MemoryRegistry()
    for name, tokens in records:
        await registry.publish(name, encode_record(HostRecord(name, ()), tokens), 60.0)
    return registry


async def test_a_token_that_no_host_has_ends_the_start(caplog: pytest.LogCaptureFixture) -> None:
    registry = await registry_of(("north", THEIRS), ("south", THEIRS))
    with pytest.raises(ConfigError, match="belongs to another fleet: there are 2 hosts in the registry"):
        await check_neighbours(registry, OURS, patience_s=0.1)
    assert caplog.text.count("joins nothing, and gives up") == 1
    assert set(await registry.records()) == {"north", "south"}, "nothing was written"


async def test_records_of_hosts_that_ended_are_waited_for() -> None:
    registry = await registry_of(("north", THEIRS))
    checking = asyncio.create_task(check_neighbours(registry, OURS, patience_s=60.0))
    await asyncio.sleep(0.05)
    assert not checking.done()
    await registry.publish("south", encode_record(HostRecord("south", ()), OURS), 60.0)
    await asyncio.wait_for(checking, 30)


async def test_one_stranger_among_hosts_is_only_told(caplog: pytest.LogCaptureFixture) -> None:
    registry = await registry_of(("north", OURS), ("south", THEIRS))
    await check_neighbours(registry, OURS, patience_s=0.0)
    assert "1 of the 2 hosts in the registry have another join token" in caplog.text


async def test_a_fleet_may_be_empty_and_what_was_never_signed_does_not_count() -> None:
    registry = await registry_of()
    await check_neighbours(registry, OURS, patience_s=0.0)
    await registry.publish("garbage", b"\xff\x00 of another program\n", 60.0)
    await check_neighbours(registry, OURS, patience_s=0.0)


@pytest.mark.parametrize("there", [OLD, f"{OLD},{NEW}", f"{NEW},{OLD}", NEW])
@pytest.mark.parametrize("step", [-1, 0, 1])
async def test_nobody_is_sent_away_while_tokens_are_changed(there: str, step: int) -> None:
    """A machine that starts is at most one step ahead of the others, or behind them."""
    steps = [OLD, f"{OLD},{NEW}", f"{NEW},{OLD}", NEW]
    ours = steps[min(3, max(0, steps.index(there) + step))]
    registry = await registry_of(("north", JoinTokens.parse(there)))
    await check_neighbours(registry, JoinTokens.parse(ours), patience_s=0.0)


async def test_hosts_with_another_version_of_the_messages_are_told(caplog: pytest.LogCaptureFixture) -> None:
    registry = MemoryRegistry()
    envelope = {"wire_version": WIRE_VERSION + 1, "record": {"a shape": "of the future"}}
    await registry.publish("north", OURS.sign(msgspec.json.encode(envelope)), 60.0)
    with caplog.at_level(logging.WARNING):
        await check_neighbours(registry, OURS, patience_s=0.0)
    assert f"with version {WIRE_VERSION + 1} of the messages, and this machine speaks" in caplog.text


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


async def put(server: RedisServer, *command: str | bytes) -> None:
    registry = RedisRegistry(server.url)
    await registry._client.execute_command(*command)  # type: ignore[no-untyped-call]
    await registry.close()


@pytest.mark.parametrize("key", ["hosts", "leader", "documents"])
async def test_a_key_of_another_program_is_named(redis: RedisServer, key: str) -> None:
    await put(redis, "SET", f"{KEY_PREFIX}:default:{key}", "theirs")
    registry = RedisRegistry(redis.url)
    try:
        asking = {"hosts": registry.records, "documents": registry.documents}.get(key)
        with pytest.raises(RegistryError, match=r"hold something else than a fleet \(WRONGTYPE") as raised:
            await (asking() if asking else registry.lead("us", 5.0, 0))
        assert "user_script" not in str(raised.value)
    finally:
        await registry.close()
        await put(redis, "FLUSHALL")


async def test_values_that_no_fleet_wrote_are_left_out_or_named(redis: RedisServer) -> None:
    registry = RedisRegistry(redis.url)
    try:
        key, lasting = f"{KEY_PREFIX}:default:hosts", b"99999999999999:a record"
        await put(redis, "HSET", key, "north", "no lease", "south", "9:\xff", b"\xff\xfe", lasting)
        await put(redis, "HSET", f"{KEY_PREFIX}:default:documents", b"\xff", b"\xff\x00", "leader", "us")
        await check_neighbours(registry, OURS, patience_s=0.0)
        assert len(await registry.documents()) == 2
        await put(redis, "HSET", f"{KEY_PREFIX}:default:leader", "epoch", "many", "ends", "soon")
        with pytest.raises(RegistryError, match="hold something else than a fleet"):
            await registry.lead("us", 5.0, 0)
    finally:
        await registry.close()
        await put(redis, "FLUSHALL")


@pytest.mark.slow
async def test_a_table_of_another_program_is_named() -> None:
    psycopg = pytest.importorskip("psycopg", reason="needs the extra postgres")
    with running_postgres() as server:
        url = server.new_database("theirs")
        with psycopg.connect(url.replace("+psycopg", "")) as theirs:
            theirs.execute("create table fleet_hosts (id int primary key, drinks text)")
        registry = DatabaseRegistry(Database(url))
        try:
            with pytest.raises(
                ConfigError, match=r"not the tables of Penstock: column fleet_hosts.name does not"
            ):
                await check_neighbours(registry, OURS)
        finally:
            await registry.close()


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


async def test_a_web_server_is_no_redis() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        registry = RedisRegistry(f"redis://127.0.0.1:{server.server_address[1]}/0")
        try:
            with pytest.raises(ConfigError, match="what answers at that address is no Redis"):
                await check_neighbours(registry, OURS)
        finally:
            await registry.close()
            server.shutdown()
