"""Caches in a real Redis: shared, bounded, ending, private to workspaces, and no harm when Redis is away."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from penstock.core.gateway_config import GatewayConfig
from penstock.core.identity import Principal
from penstock.gateway.embeddings.service import EmbeddingRequest, Embeddings
from penstock.gateway.gateway import Gateway
from penstock.gateway.reuse import shared_cache
from penstock.gateway.reuse.idempotency import IdempotentAnswers
from penstock.gateway.reuse.replay import IdempotencySettings, ResponseCacheSettings
from penstock.gateway.reuse.reuse import AnswerReuse
from penstock.gateway.reuse.shared_cache import EmbeddingCacheSettings, SharedCaches, entry_name
from tests.api.test_embeddings import embedding_engine
from tests.gateway.fake_engine import FakeEngine, script_text
from tests.gateway.ratelimits.redis_server import RedisServer, running_redis
from tests.gateway.reuse.test_cache import request_for

pytest.importorskip("redis", reason="needs the extra redis")


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cache, "TIMEOUT_S", 10.0)


@pytest_asyncio.fixture
async def caches(redis_server: RedisServer) -> AsyncIterator[SharedCaches]:
    caches = SharedCaches.at(redis_server.url)
    await caches._client.flushall()
    yield caches
    await caches.close()


async def put(caches: SharedCaches, name: str, value: bytes, ttl_s: float = 60, most: int = 1 << 20) -> None:
    caches.put("k", name, value, ttl_s, most)
    await asyncio.gather(*caches._writes)


async def value(caches: SharedCaches, name: str, kind: str = "k") -> bytes | None:
    entry = await caches.get(kind, name)
    return None if entry is None else entry.value


async def test_entries_are_shared_and_kinds_are_apart(
    caches: SharedCaches, redis_server: RedisServer
) -> None:
    await put(caches, "a", b"one:two\0\xff")
    other = SharedCaches.at(redis_server.url)
    assert await value(other, "a") == b"one:two\0\xff"
    assert await value(other, "a", "other kind") is None
    await put(caches, "a", b"new")
    found = await other.get_many("k", ["a", "b", "a"])
    assert [entry and entry.value for entry in found] == [b"new", None, b"new"]
    assert found[0] is not None
    assert found[0].age_s >= 0
    await other.close()


async def test_the_least_recently_used_entries_go_first(caches: SharedCaches) -> None:
    size = 1000 + shared_cache._ENTRY_BYTES
    for name in "abc":
        await put(caches, name, bytes(1000), most=3 * size)
        await asyncio.sleep(0.002)  # Redis tells uses apart by milliseconds
    assert await value(caches, "a") is not None
    await asyncio.sleep(0.002)
    await put(caches, "d", bytes(1000), most=3 * size)
    assert [name for name in "abcd" if await value(caches, name) is not None] == ["a", "c", "d"]
    assert int(await caches._client.get("{penstock:cache:k}:bytes")) == 3 * size
    await put(caches, "e", bytes(5000), most=3 * size)
    assert await value(caches, "e") is None, "an entry that is larger than the cache is not kept"
    await put(caches, "f", b"x", most=size)  # the bound was lowered
    assert int(await caches._client.get("{penstock:cache:k}:bytes")) <= size


async def test_entries_end_and_give_back_their_bytes(caches: SharedCaches) -> None:
    await put(caches, "a", b"x", ttl_s=0.001)
    await put(caches, "b", b"x", ttl_s=0.001)
    while await value(caches, "a") is not None:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.005)
    await put(caches, "c", b"x")
    assert await caches._client.hkeys("{penstock:cache:k}:sizes") == [b"c"]
    assert int(await caches._client.get("{penstock:cache:k}:bytes")) == 1 + shared_cache._ENTRY_BYTES


async def test_names_hold_the_workspace() -> None:
    assert entry_name("w1", b"f") == entry_name("w1", b"f")
    assert entry_name("w1", b"f") != entry_name("w2", b"f")


class TestOutages:
    async def test_a_redis_that_is_away_is_an_empty_cache(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caches = SharedCaches.at("redis://:secret@127.0.0.1:1/0")
        assert await value(caches, "a") is None
        assert "the shared cache is not used for 2 s" in caplog.text
        assert "secret" not in caplog.text
        assert caches._is_paused
        caches.put("k", "a", b"x", 60, 1000)
        assert not caches._writes, "nothing is begun that cannot succeed"
        assert await caches.get_many("k", ["a", "b"]) == [None, None]
        await caches.close()

    async def test_a_redis_that_hangs_costs_one_short_wait(
        self, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shared_cache, "TIMEOUT_S", 0.05)
        caches = SharedCaches.at(redis_server.url)
        redis_server.pause()
        try:
            assert await value(caches, "a") is None
            assert caches._is_paused
        finally:
            redis_server.resume()
        caches._paused_until = 0.0
        monkeypatch.setattr(shared_cache, "TIMEOUT_S", 10.0)
        again = SharedCaches.at(redis_server.url)
        await put(again, "a", b"x")
        assert await value(again, "a") == b"x"
        await again.close()
        await caches.close()


def gateway_with(caches: SharedCaches | None, engine: FakeEngine, **settings: Any) -> Gateway:
    keys = IdempotentAnswers(IdempotencySettings())
    reuse = AnswerReuse(ResponseCacheSettings(**{"shared": True} | settings), keys, shared=caches)
    gateway = Gateway(engine, GatewayConfig(), reuse=reuse)
    gateway.shared_caches = caches
    gateway.embedding_cache = EmbeddingCacheSettings(shared=True)
    return gateway


class TestResponses:
    async def test_another_gateway_answers_from_the_same_cache(self, caches: SharedCaches) -> None:
        first, second = (FakeEngine(script_text("Grüße")) for _ in range(2))
        told = await (await gateway_with(caches, first).submit(request_for())).collect()
        await asyncio.gather(*caches._writes)
        gateway = gateway_with(caches, second)
        hit = await gateway.submit(request_for())
        assert hit.cache_status == "hit"
        assert await hit.collect() == told
        assert not second.added
        other = await gateway.submit(request_for(workspace="w2"))
        assert other.cache_status == "miss", "another workspace finds nothing"
        other.cancel()
        await caches._client.flushall()
        assert (await gateway.submit(request_for())).cache_status == "hit", "it is in memory now"

    async def test_only_where_it_is_asked_for(self, caches: SharedCaches) -> None:
        engine = FakeEngine(script_text("x"))
        gateway = gateway_with(caches, engine, shared=False)
        await (await gateway.submit(request_for())).collect()
        assert not caches._writes
        assert await caches._client.dbsize() == 0

    async def test_a_reader_decides_how_old_an_answer_may_be(self, caches: SharedCaches) -> None:
        engine = FakeEngine(script_text("x"))
        await (await gateway_with(caches, engine).submit(request_for())).collect()
        await asyncio.gather(*caches._writes)
        await asyncio.sleep(0.01)
        young = await gateway_with(caches, engine).submit(request_for(cache_response_s=0.001))
        assert young.cache_status == "miss"
        young.cancel()

    async def test_a_damaged_entry_is_a_miss(self, caches: SharedCaches) -> None:
        engine = FakeEngine(script_text("x"))
        await (await gateway_with(caches, engine).submit(request_for())).collect()
        await asyncio.gather(*caches._writes)
        (key,) = await caches._client.keys("*:entry:*")
        await caches._client.set(key, b"1:damaged")
        answer = await gateway_with(caches, engine).submit(request_for(cache_response_s=1e9))
        assert answer.cache_status == "miss"
        answer.cancel()


async def test_vectors_are_shared(caches: SharedCaches) -> None:
    first, second = embedding_engine(), embedding_engine()
    texts = tuple(f"text {number}" for number in range(5))

    async def ask(engine: FakeEngine, workspace: str, inputs: tuple[str, ...] = texts) -> list[bytes]:
        embeddings = Embeddings(gateway_with(caches, engine))
        request = EmbeddingRequest(inputs=inputs, principal=Principal(workspace_id=workspace))
        answer = await (await embeddings.open(request)).run()
        await asyncio.gather(*caches._writes)
        return answer.vectors

    made = await ask(first, "one")
    assert await ask(second, "one", ("new", *texts)) == [*await ask(first, "one", ("new",)), *made]
    assert len(second.added) == 1, "only the text that nobody had asked for"
    await ask(second, "two")
    assert len(second.added) == 6, "another workspace finds nothing"
    assert struct.unpack("f", made[0][:4])
