"""Limits shared through a real Redis: what two gateways see of each other, and what happens when Redis goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from redis.asyncio import Redis

from penstock.core.clock import VirtualClock
from penstock.core.errors import (
    ConfigError,
    LimitsUnavailable,
    QuotaExceeded,
    RateLimited,
    RequestExceedsLimit,
)
from penstock.core.gateway_config import GatewayConfig
from penstock.gateway.accounts import Lease
from penstock.gateway.ratelimits import script_pipe, shared
from penstock.gateway.ratelimits.local import LocalLimiter
from penstock.gateway.ratelimits.script_pipe import read_scripts
from penstock.gateway.ratelimits.settings import LimitSettings, ScopeLimits
from penstock.gateway.ratelimits.shared import RedisLimiter
from penstock.serve.gateway_state import build_limiter
from tests.gateway.ratelimits.claims import SettableSpend, claim, outcome, reserve
from tests.gateway.ratelimits.redis_server import READ_TIME, RedisServer

Make = Callable[..., "RedisLimiter"]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "REDIS_TIMEOUT_S", 60.0)  # a busy machine is not an outage
    monkeypatch.setattr(script_pipe, "PROBE_INTERVAL_S", 0.02)


def scripts_without_time() -> dict[str, str]:
    """The product's scripts, in a Redis whose clock stands still: nothing refills while a busy machine stops."""
    return {name: script.replace(READ_TIME, "{1000000000, 0}") for name, script in read_scripts().items()}


@pytest.fixture
async def gateway(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Makes limiters of gateways that share an empty Redis. For them, time passes only if they are told so."""
    async with Redis.from_url(redis_server.url) as client:
        await client.flushall()
    made: list[RedisLimiter] = []

    async def make(settings: LimitSettings, *, time_passes: bool = False, **options: Any) -> RedisLimiter:
        url = options.pop("url", redis_server.url)
        monkeypatch.setattr(shared, "read_scripts", read_scripts if time_passes else scripts_without_time)
        local = LocalLimiter(settings, VirtualClock(), spending=options.pop("spending", None))
        limiter = RedisLimiter(Redis.from_url(url), settings, local, **options)
        made.append(limiter)
        await limiter.start()
        return limiter

    yield make  # type: ignore[misc]
    for limiter in made:
        await limiter.close()


@pytest.fixture
def own_server(redis_server: RedisServer) -> Iterator[RedisServer]:
    """One that a test may stop."""
    server = RedisServer(redis_server.binary)
    server.start()
    yield server
    server.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def remaining(lease: Lease, kind: str) -> int:
    return int(getattr(lease.rate_limits, kind).remaining)


async def test_two_gateways_share_every_limit(gateway: Make) -> None:
    settings = LimitSettings(key=ScopeLimits(requests_per_minute=3, concurrent_requests=2))
    one, other = await gateway(settings), await gateway(settings)
    first = await reserve(one, claim())
    await reserve(other, claim())
    with pytest.raises(RateLimited, match="at once"):
        await reserve(one, claim())
    first.settle(outcome())
    await one._pipe.flushed()
    await reserve(other, claim())
    with pytest.raises(RateLimited, match="3 requests per minute") as refused:
        await reserve(one, claim())
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s == pytest.approx(20.0)
    assert refused.value.rate_limits is not None
    assert refused.value.rate_limits.requests is not None
    assert refused.value.rate_limits.requests.remaining == 0


async def test_looking_at_limits_uses_none_of_them(gateway: Make) -> None:
    settings = LimitSettings(
        key=ScopeLimits(requests_per_minute=3), model=ScopeLimits(input_tokens_per_minute=60_000_000)
    )
    one, other = await gateway(settings), await gateway(settings)
    asked = claim(input_tokens=1_000_000)
    lease = await reserve(one, asked)
    for limiter in (one, other, one):
        shown = await limiter.peek(asked.principal, asked.model)
        assert shown.requests is not None
        assert (shown.requests.limit, shown.requests.remaining) == (3, remaining(lease, "requests"))
        assert shown.input_tokens is not None
        assert remaining(lease, "input_tokens") <= shown.input_tokens.remaining < 60_000_000
    without_model = await one.peek(asked.principal, None)
    assert without_model.requests is not None
    assert without_model.input_tokens is None


@pytest.mark.parametrize("policy", ["open", "closed"])
async def test_without_redis_one_sees_what_local_limits_say(
    gateway: Make, own_server: RedisServer, policy: str
) -> None:
    settings = LimitSettings(key=ScopeLimits(requests_per_minute=3))
    limiter = await gateway(settings, url=own_server.url, policy=policy)
    own_server.stop()
    shown = await limiter.peek(claim().principal, None)
    assert (shown.requests is not None) == (policy == "open")


async def test_many_at_once_are_never_admitted_beyond_the_limit(gateway: Make) -> None:
    settings = LimitSettings(workspace=ScopeLimits(requests_per_minute=50, concurrent_requests=20))
    limiters = [await gateway(settings) for _ in range(2)]
    tries = [reserve(limiters[number % 2], claim(key=f"key-{number}")) for number in range(100)]
    answers = await asyncio.gather(*tries, return_exceptions=True)
    admitted = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert len(admitted) == 20
    assert all(isinstance(answer, RateLimited) for answer in answers if isinstance(answer, BaseException))


async def test_unused_tokens_come_back_and_overuse_becomes_debt(gateway: Make) -> None:
    settings = LimitSettings(
        key=ScopeLimits(input_tokens_per_minute=1_000, output_tokens_per_minute=1_000_000)
    )
    limiter = await gateway(settings)
    lease = await reserve(limiter, claim(input_tokens=1_000, max_output_tokens=500))
    lease.settle(outcome(1_000, 900_000, cached_tokens=600))
    lease = await reserve(limiter, claim(input_tokens=500, max_output_tokens=1))
    assert remaining(lease, "input_tokens") == 100
    assert remaining(lease, "output_tokens") == 99_999


async def test_a_request_beyond_the_limit_is_told_so(gateway: Make) -> None:
    limiter = await gateway(LimitSettings(key=ScopeLimits(input_tokens_per_minute=10)))
    with pytest.raises(RequestExceedsLimit):
        await reserve(limiter, claim(input_tokens=11))


async def test_a_budget_is_shared_before_the_ledger_knows(gateway: Make) -> None:
    settings = LimitSettings(workspace=ScopeLimits(dollars_per_day=100e-6, dollars_per_month=0.5))
    one = await gateway(settings, spending=SettableSpend())
    other = await gateway(settings, spending=SettableSpend())
    lease = await reserve(one, claim(input_tokens=10, max_output_tokens=60))
    with pytest.raises(QuotaExceeded, match=r"daily budget of \$0\.0001 ") as refused:
        await reserve(other, claim(input_tokens=10, max_output_tokens=60))
    assert refused.value.retry_after_s is not None
    assert 0 < refused.value.retry_after_s <= 86_400
    lease.settle(outcome(10, 60))
    await one._pipe.flushed()
    with pytest.raises(QuotaExceeded):  # spent now, though the other's ledger has not heard of it
        await reserve(other, claim(input_tokens=10, max_output_tokens=60))
    await reserve(other, claim(input_tokens=10, max_output_tokens=20))


async def test_new_limits_keep_what_was_used(gateway: Make) -> None:
    limiter = await gateway(LimitSettings(key=ScopeLimits(requests_per_minute=10)))
    for _ in range(5):
        await reserve(limiter, claim())
    limiter.apply(LimitSettings(key=ScopeLimits(requests_per_minute=1000)))
    assert remaining(await reserve(limiter, claim()), "requests") == 499


async def test_leases_of_a_dead_gateway_expire_and_those_of_a_live_one_do_not(gateway: Make) -> None:
    settings = LimitSettings(key=ScopeLimits(concurrent_requests=2))
    dying = await gateway(settings, time_passes=True, lease_ttl_s=0.2)
    living = await gateway(settings, time_passes=True, lease_ttl_s=600.0)
    await reserve(dying, claim())
    kept = await reserve(living, claim())
    assert dying._renewing is not None
    dying._renewing.cancel()

    async def admitted() -> Lease:
        async with asyncio.timeout(60):
            while True:
                try:
                    return await reserve(living, claim())
                except RateLimited:
                    await asyncio.sleep(0.05)

    replacement = await admitted()
    with pytest.raises(RateLimited):
        await reserve(living, claim())
    kept.settle(outcome())
    replacement.settle(outcome())


async def test_a_live_gateway_renews_its_leases(gateway: Make, redis_server: RedisServer) -> None:
    settings = LimitSettings(key=ScopeLimits(concurrent_requests=2))
    limiter = await gateway(settings, time_passes=True, lease_ttl_s=600.0)
    lease = await reserve(limiter, claim())
    ((_, leases_key),) = (live.keys for live in limiter._live.values())
    async with Redis.from_url(redis_server.url) as client, asyncio.timeout(60):
        ((name, end),) = await client.zrange(leases_key, 0, -1, withscores=True)
        await limiter.renew()
        renewed = await client.zscore(leases_key, name)
        assert renewed > end
        limiter._pipe.came_back.set()
        while await client.zscore(leases_key, name) <= renewed:
            await asyncio.sleep(0.01)
    lease.settle(outcome())


async def test_running_requests_count_again_in_a_redis_that_lost_its_data(
    gateway: Make, redis_server: RedisServer
) -> None:
    limits = ScopeLimits(
        concurrent_requests=2, input_tokens_per_minute=1_000, output_tokens_per_minute=10_000
    )
    settings = LimitSettings(key=limits, workspace=ScopeLimits(requests_per_minute=100))
    one, other = await gateway(settings, lease_ttl_s=600.0), await gateway(settings, lease_ttl_s=600.0)
    first = await reserve(one, claim(input_tokens=900))
    second = await one.admit(claim())
    async with Redis.from_url(redis_server.url) as client:
        await client.flushall()
    await one.renew()
    await one.renew()  # as after a timeout
    with pytest.raises(RateLimited, match="at once"):
        await other.admit(claim())
    second.settle(outcome(0, 0, has_begun=False))
    await one._pipe.flushed()
    third = await other.admit(claim())
    with pytest.raises(RateLimited, match="input tokens"):
        await third.reserve(claim(input_tokens=500))
    third.settle(outcome(0, 0, has_begun=False))
    first.settle(outcome(900, 5, cached_tokens=800))
    for limiter in (one, other):
        await limiter._pipe.flushed()
    fourth = await reserve(other, claim(input_tokens=0))
    assert remaining(fourth, "input_tokens") == 900, "what was not used came back once"


async def test_a_lease_that_changes_its_name_is_not_made_twice(gateway: Make) -> None:
    settings = LimitSettings(key=ScopeLimits(concurrent_requests=2, input_tokens_per_minute=1_000))
    limiter = await gateway(settings, lease_ttl_s=600.0, spending=SettableSpend())
    admitted = await limiter.admit(claim())
    reserving = asyncio.create_task(admitted.reserve(claim()))
    await asyncio.sleep(0)  # Redis is asked to give the lease its other name,
    await limiter.renew()  # and then about all leases
    await reserving
    await limiter.admit(claim())
    with pytest.raises(RateLimited, match="at once"):
        await limiter.admit(claim())


async def test_a_clock_that_was_set_back_locks_nobody_out(gateway: Make, redis_server: RedisServer) -> None:
    """Times that are an hour ahead of the clock of Redis are from before it was set back by an hour."""
    settings = LimitSettings(key=ScopeLimits(requests_per_minute=6, concurrent_requests=1))
    limiter = await gateway(settings, time_passes=True, lease_ttl_s=600.0)
    lease = await limiter.admit(claim())
    ((hash_key, leases_key),) = (live.keys for live in limiter._live.values())
    lease.settle(outcome(0, 0, has_begun=False))
    await limiter._pipe.flushed()
    async with Redis.from_url(redis_server.url) as client:
        ahead_s = (await client.time())[0] + 3600
        await client.hset(hash_key, mapping={"requests": "0", "requests:at": str(ahead_s)})
        await client.zadd(leases_key, {"of-a-dead-gateway:0.0": ahead_s})
        with pytest.raises(RateLimited):
            await limiter.admit(claim())
        assert float(await client.hget(hash_key, "requests:at")) <= ahead_s - 2000, "refills from now on"
        assert await client.zscore(leases_key, "of-a-dead-gateway:0.0") <= ahead_s - 2000


async def test_a_cancelled_reservation_is_released(gateway: Make) -> None:
    limiter = await gateway(LimitSettings(key=ScopeLimits(concurrent_requests=1)))
    task = asyncio.create_task(reserve(limiter, claim()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await limiter._pipe.flushed()
    await reserve(limiter, claim())


async def test_settling_twice_changes_nothing(gateway: Make) -> None:
    limiter = await gateway(
        LimitSettings(key=ScopeLimits(input_tokens_per_minute=1_000, concurrent_requests=1))
    )
    lease = await reserve(limiter, claim(input_tokens=900))
    for _ in range(2):  # as after a timeout, when nobody knows whether the first was carried out
        lease.settle(outcome(900, 0, cached_tokens=400))
    lease = await reserve(limiter, claim(input_tokens=0))
    assert remaining(lease, "input_tokens") == 500


async def test_scripts_that_redis_forgot_are_loaded_again(gateway: Make, redis_server: RedisServer) -> None:
    limiter = await gateway(LimitSettings(key=ScopeLimits(requests_per_minute=5)))
    async with Redis.from_url(redis_server.url) as client:
        await client.script_flush()
    assert remaining(await reserve(limiter, claim()), "requests") == 4
    assert limiter.metrics.redis_errors == 0


async def test_a_key_that_somebody_else_wrote_stops_neither_its_caller_nor_others(
    gateway: Make, redis_server: RedisServer
) -> None:
    limiter = await gateway(LimitSettings(key=ScopeLimits(requests_per_minute=5)))
    lease = await reserve(limiter, claim())
    async with Redis.from_url(redis_server.url) as client:
        await client.set("{penstock:limits}:key:key-1", "not ours")
    lease.settle(outcome())
    assert remaining(await reserve(limiter, claim()), "requests") == 4  # decided locally
    assert remaining(await reserve(limiter, claim(key="another")), "requests") == 4
    assert limiter.metrics.redis_is_up is True
    assert limiter.metrics.settlements_lost >= 1
    assert limiter.metrics.local_decisions == 1


async def test_open_policy_decides_locally_while_redis_is_gone(
    gateway: Make, own_server: RedisServer
) -> None:
    settings = LimitSettings(key=ScopeLimits(requests_per_minute=3, concurrent_requests=2))
    limiter = await gateway(settings, url=own_server.url)
    before = await reserve(limiter, claim())
    own_server.stop()
    during = [await reserve(limiter, claim()) for _ in range(2)]
    assert limiter.metrics.redis_is_up is False
    assert limiter.metrics.redis_errors == 1
    assert limiter.metrics.local_decisions == 2
    with pytest.raises(RateLimited, match="at once"):
        await reserve(limiter, claim())
    before.settle(outcome())
    assert limiter.metrics.settlements_pending >= 1
    for lease in during:
        lease.settle(outcome())
    own_server.start()
    await until(lambda: limiter.metrics.redis_is_up is True)
    await limiter._pipe.flushed()
    assert limiter.metrics.settlements_pending == 0
    assert limiter.metrics.settlements_lost == 0
    num_local = limiter.metrics.local_decisions
    assert remaining(await reserve(limiter, claim()), "requests") == 2  # this Redis kept nothing
    assert limiter.metrics.local_decisions == num_local


@pytest.mark.parametrize(
    ("refuses", "takes"),
    [(("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
     (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"))],
    ids=["full", "replica"],
)  # fmt: skip
async def test_a_redis_that_takes_no_writes_counts_as_gone_until_it_does(
    gateway: Make,
    own_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    refuses: tuple[str, ...],
    takes: tuple[str, ...],
) -> None:
    """It answers all the while, so each probe would otherwise find it, and the next request lose it again."""
    settings = LimitSettings(key=ScopeLimits(requests_per_minute=3, concurrent_requests=2))
    limiter = await gateway(settings, url=own_server.url)
    before = await reserve(limiter, claim())
    num_probes = 0
    comes_up = limiter._pipe._comes_up

    async def counted() -> bool:
        nonlocal num_probes
        num_probes += 1
        return await comes_up()

    monkeypatch.setattr(limiter._pipe, "_comes_up", counted)
    async with Redis.from_url(own_server.url) as client:
        await client.execute_command(*refuses)
        await reserve(limiter, claim())
        await until(lambda: num_probes > 3)
        assert limiter.metrics.redis_is_up is False
        before.settle(outcome())
        await reserve(limiter, claim())
        assert limiter.metrics.local_decisions == 2
        assert limiter.metrics.redis_errors == 1
        await client.execute_command(*takes)
    await until(lambda: limiter.metrics.redis_is_up is True)
    await limiter._pipe.flushed()
    assert limiter.metrics.settlements_lost == 0


async def test_a_short_outage_loses_no_settlement(gateway: Make, own_server: RedisServer) -> None:
    settings = LimitSettings(key=ScopeLimits(concurrent_requests=1))
    limiter = await gateway(settings, url=own_server.url)
    lease = await reserve(limiter, claim())
    own_server.pause()
    limiter._pipe._timeout_s = 0.05
    await reserve(limiter, claim())  # decided locally, after one timeout
    lease.settle(outcome())
    limiter._pipe._timeout_s = 20.0
    own_server.resume()
    await until(lambda: limiter.metrics.redis_is_up is True)
    await limiter._pipe.flushed()
    await reserve(limiter, claim())  # the place is free again
    with pytest.raises(RateLimited):
        await reserve(limiter, claim())


async def test_closed_policy_answers_503_while_redis_is_gone(gateway: Make, own_server: RedisServer) -> None:
    settings = LimitSettings(key=ScopeLimits(requests_per_minute=3))
    limiter = await gateway(settings, url=own_server.url, policy="closed")
    await reserve(limiter, claim())
    own_server.stop()
    for _ in range(2):
        with pytest.raises(LimitsUnavailable) as refused:
            await reserve(limiter, claim())
        assert refused.value.status == 503
        assert refused.value.retry_after_s is not None
    assert limiter.metrics.closed_refusals == 2


async def test_a_gateway_starts_without_redis_and_finds_it_later(
    gateway: Make, own_server: RedisServer
) -> None:
    own_server.stop()
    limiter = await gateway(LimitSettings(key=ScopeLimits(requests_per_minute=3)), url=own_server.url)
    assert limiter.metrics.redis_is_up is False
    await reserve(limiter, claim())
    own_server.start()
    await until(lambda: limiter.metrics.redis_is_up is True)


async def test_callers_without_limits_never_ask_redis(gateway: Make) -> None:
    limiter = await gateway(LimitSettings(key=ScopeLimits(requests_per_minute=3)))
    limiter.apply(LimitSettings())
    async with asyncio.timeout(60):
        await limiter._pipe.close(1.0)
        (await reserve(limiter, claim())).settle(outcome())


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="Redis URL"):
        build_limiter(GatewayConfig(redis_url="not-a-url"))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed"),
        KeyError("what the client of Redis did not foresee"),
    ],
)
async def test_an_error_of_the_client_is_an_outage(
    gateway: Make, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Without it, the task that talks to Redis ended, and every request waited for ever."""
    limiter = await gateway(LimitSettings(key=ScopeLimits(requests_per_minute=3)))

    async def closed(batch: object) -> list[object]:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(limiter._pipe, "_pipelined", closed)
        patch.setattr(limiter._pipe._client.connection_pool, "disconnect", lambda: closed(None))
        async with asyncio.timeout(60):
            await reserve(limiter, claim())  # by the limits of this gateway alone
        assert not limiter._pipe._is_up
    await until(lambda: limiter._pipe._is_up)
