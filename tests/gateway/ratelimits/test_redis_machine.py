"""The life of `machine.py` on two gateways that share a real Redis, each decision compared with a local limiter's."""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from redis import Redis as SyncRedis

from penstock.core.errors import RateLimited
from penstock.core.identity import Principal, RateLimits
from penstock.gateway.accounts import Claim, Lease, Limiter, Outcome
from penstock.gateway.ratelimits import shared
from penstock.gateway.ratelimits.local import LocalLimiter, RunningLimiter
from penstock.gateway.ratelimits.settings import LimitSettings
from penstock.gateway.ratelimits.shared import RedisLimiter
from tests.gateway.ratelimits.claims import outcome
from tests.gateway.ratelimits.machine import SETTINGS, LimiterMachine
from tests.gateway.ratelimits.redis_server import READ_TIME, RedisServer

CLOCK_KEY = "clock"
LEASE_TTL_S = 10**9  # nobody renews in virtual time


def scripts_with_a_clock_of_our_own() -> dict[str, str]:
    """The product's scripts, but for where the time comes from."""
    real = shared.read_scripts()
    assert all(READ_TIME in script for script in real.values())
    ours = f"{{redis.call('GET', '{CLOCK_KEY}'), 0}}"
    return {name: script.replace(READ_TIME, ours) for name, script in real.items()}


class RedisMachine(LimiterMachine):
    def __init__(self, server: RedisServer) -> None:
        super().__init__()
        self.server = server
        self.client = SyncRedis(port=server.port)
        self.client.flushall()

    def make_limiters(self) -> list[RunningLimiter]:
        self.pass_time(0.0)
        self.witness = LocalLimiter(SETTINGS[0], self.clock, spending=self.spending)
        return [Compared(self.redis_limiter(), self.witness) for _ in range(2)]

    def redis_limiter(self) -> RedisLimiter:
        local = LocalLimiter(SETTINGS[0], self.clock, spending=self.spending)
        limiter = RedisLimiter.at(self.server.url, SETTINGS[0], local)
        limiter._lease_ttl_s = LEASE_TTL_S
        return limiter

    def pass_time(self, seconds: float) -> None:
        super().pass_time(seconds)
        self.client.set(CLOCK_KEY, repr(self.clock.now()))

    def settled(self) -> None:
        for limiter in self.limiters:
            assert isinstance(limiter, Compared)
            self.do(limiter.redis._pipe.flushed())

    def before_change(self) -> None:
        """Redis resizes a bucket when it next looks at it, a process at once: full ones are the same in both."""
        while self.running:
            self.finish(self.running.pop(), outcome(0, 0))
        self.pass_time(5000.0)

    def check_that_all_is_whole(self) -> None:
        for key in self.client.scan_iter("{penstock:limits}:*"):
            if not key.startswith(b"{penstock:limits}:leases:"):
                assert float(self.client.hget(key, "reserved") or 0) == 0
        super().check_that_all_is_whole()

    def teardown(self) -> None:
        super().teardown()
        self.client.close()


class Compared(Limiter):
    """Asks a Redis limiter and a local one, and insists that they agree."""

    def __init__(self, redis: RedisLimiter, local: LocalLimiter) -> None:
        self.redis = redis
        self.local = local
        self.metrics = redis.metrics

    async def start(self) -> None:
        await self.redis.start()
        assert self.metrics.redis_is_up

    async def close(self) -> None:
        await self.redis.close()

    def apply(self, settings: LimitSettings) -> None:
        self.redis.apply(settings)
        self.local.apply(settings)

    async def peek(self, principal: Principal, model: str | None) -> RateLimits:
        ours, theirs = [await limiter.peek(principal, model) for limiter in (self.redis, self.local)]
        for kind in ("requests", "input_tokens", "output_tokens"):
            state, other = getattr(ours, kind), getattr(theirs, kind)
            assert (state is None) == (other is None)
            if state is not None:
                assert state.limit == other.limit
                assert abs(state.remaining - other.remaining) <= 1  # a fraction of one, rounded
        return ours

    async def admit(self, claim: Claim) -> Lease:
        leases = await both([limiter.admit(claim) for limiter in (self.redis, self.local)])
        assert self.metrics.redis_is_up
        return Both(leases)


async def both(calls: list[Coroutine[Any, Any, Lease]]) -> list[Lease]:
    """What the two limiters grant, or the refusal that both give."""
    leases: list[Lease] = []
    refusals: list[RateLimited] = []
    for call in calls:
        try:
            leases.append(await call)
        except RateLimited as refusal:
            refusals.append(refusal)
    assert not (leases and refusals), refusals
    if leases:
        assert_same(*(lease.rate_limits for lease in leases))
        return leases
    ours, expected = refusals
    assert type(ours) is type(expected)
    assert ours.message == expected.message
    if "at once" not in ours.message:
        assert ours.retry_after_s == pytest.approx(expected.retry_after_s, abs=0.01)
    assert ours.rate_limits is not None
    assert expected.rate_limits is not None
    assert_same(ours.rate_limits, expected.rate_limits)
    raise ours


class Both:
    def __init__(self, leases: list[Lease]) -> None:
        self._leases = leases
        self.rate_limits = leases[0].rate_limits

    async def reserve(self, claim: Claim) -> Lease:
        return Both(await both([lease.reserve(claim) for lease in self._leases]))

    def give_back_cached(self, num_tokens: int) -> None:
        for lease in self._leases:
            lease.give_back_cached(num_tokens)

    def settle(self, outcome: Outcome) -> None:
        for lease in self._leases:
            lease.settle(outcome)

    def undo(self) -> None:
        for lease in self._leases:
            lease.undo()


def assert_same(ours: RateLimits, expected: RateLimits) -> None:
    for kind in RateLimits.__struct_fields__:
        one, other = getattr(ours, kind), getattr(expected, kind)
        assert (one is None) == (other is None)
        if one is not None:
            assert one.limit == other.limit
            assert abs(one.remaining - other.remaining) <= 1  # rounding
            assert one.reset_s == pytest.approx(other.reset_s, abs=0.01)


def test_redis_machine(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = scripts_with_a_clock_of_our_own()
    monkeypatch.setattr(shared, "read_scripts", lambda: scripts)
    monkeypatch.setattr(shared, "REDIS_TIMEOUT_S", 20.0)  # a busy machine is not an outage
    run_state_machine_as_test(
        partial(RedisMachine, redis_server),
        settings=settings(max_examples=20, stateful_step_count=25, deadline=None),
    )
