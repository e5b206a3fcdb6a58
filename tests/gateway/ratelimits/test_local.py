from __future__ import annotations

import pytest

from penstock.core.clock import VirtualClock
from penstock.core.errors import QuotaExceeded, RateLimited, RequestExceedsLimit
from penstock.gateway.accounts import Lease, Outcome
from penstock.gateway.prompts import Usage
from penstock.gateway.ratelimits.local import LocalLimiter
from penstock.gateway.ratelimits.settings import Limits, LimitScope, LimitSettings, ScopeLimits, Subject
from tests.gateway.ratelimits.claims import SettableSpend, claim, outcome, reserve


def limiter(**scopes: ScopeLimits) -> LocalLimiter:
    return LocalLimiter(LimitSettings(**scopes), VirtualClock())


def remaining(lease: Lease, kind: str) -> int:
    return int(getattr(lease.rate_limits, kind).remaining)


async def left(limits: LocalLimiter, kind: str) -> int:
    """What a request that needs next to nothing is shown."""
    lease = await reserve(limits, claim(input_tokens=0, max_output_tokens=0))
    lease.settle(outcome(0, 0))
    return remaining(lease, kind)


async def test_requests_are_limited_and_come_back_with_time() -> None:
    clock = VirtualClock()
    limits = LocalLimiter(LimitSettings(key=ScopeLimits(requests_per_minute=2)), clock)
    for expected in (1, 0):
        assert remaining(await reserve(limits, claim()), "requests") == expected
    with pytest.raises(RateLimited, match="limit of 2 requests per minute for this key") as refused:
        await reserve(limits, claim())
    assert refused.value.retry_after_s == pytest.approx(30.0)
    await reserve(limits, claim(key="another"))
    clock.advance(30.0)
    await reserve(limits, claim())


async def test_a_refused_request_takes_nothing_from_any_limit() -> None:
    limits = limiter(
        key=ScopeLimits(requests_per_minute=100, input_tokens_per_minute=1000, output_tokens_per_minute=1000),
        workspace=ScopeLimits(concurrent_requests=1),
    )
    running = await reserve(limits, claim(input_tokens=0, max_output_tokens=0))
    for _ in range(5):
        with pytest.raises(RateLimited, match="1 requests at once"):
            await reserve(limits, claim(input_tokens=100))
    running.settle(outcome(0, 0))
    assert await left(limits, "input_tokens") == 1000
    assert await left(limits, "requests") == 100 - 3


@pytest.mark.parametrize(
    ("ended", "input_used", "output_used"),
    [
        (outcome(100, 7), 100, 7),
        (outcome(100, 7, cached_tokens=96), 4, 7),
        (outcome(100, 7, status="cancelled"), 100, 7),
        (outcome(100, 0, status="cancelled", has_begun=False), 100, 0),
        (outcome(100, 0, status="failed", error_code="overloaded", has_begun=False), 0, 0),
        (outcome(100, 3, status="failed", error_code="internal_error"), 100, 3),
        (outcome(100, 0, status="failed", error_code="deadline_exceeded", has_begun=False), 100, 0),
        (Outcome(usage=Usage(100, 7, 0), status="completed", is_cached=True), 0, 0),
    ],
)
async def test_settling_charges_what_was_used(ended: Outcome, input_used: int, output_used: int) -> None:
    limits = limiter(key=ScopeLimits(input_tokens_per_minute=1000, output_tokens_per_minute=1000))
    lease = await reserve(limits, claim(input_tokens=100, max_output_tokens=50))
    assert remaining(lease, "input_tokens") == 900
    assert remaining(lease, "output_tokens") == 950
    lease.settle(ended)
    assert await left(limits, "input_tokens") == 1000 - input_used
    assert await left(limits, "output_tokens") == 1000 - output_used


async def test_cached_input_comes_back_while_the_answer_is_still_written() -> None:
    limits = limiter(key=ScopeLimits(input_tokens_per_minute=1000))
    first = await reserve(limits, claim(input_tokens=900))
    with pytest.raises(RateLimited):
        await reserve(limits, claim(input_tokens=900))
    first.give_back_cached(880)
    second = await reserve(limits, claim(input_tokens=900))
    assert remaining(second, "input_tokens") == 80
    first.settle(outcome(900, 1, cached_tokens=880))
    second.settle(outcome(900, 1, cached_tokens=880))
    assert await left(limits, "input_tokens") == 960


async def test_a_huge_max_tokens_does_not_lock_the_caller_out() -> None:
    limits = limiter(key=ScopeLimits(output_tokens_per_minute=1000))
    leases = [await reserve(limits, claim(max_output_tokens=100_000)) for _ in range(4)]
    with pytest.raises(RateLimited, match="output tokens"):
        await reserve(limits, claim(max_output_tokens=100_000))
    for lease in leases:
        lease.settle(outcome(0, 10))
    assert await left(limits, "output_tokens") == 960


async def test_an_answer_longer_than_its_reservation_leaves_a_debt() -> None:
    clock = VirtualClock()
    limits = LocalLimiter(LimitSettings(key=ScopeLimits(output_tokens_per_minute=60)), clock)
    lease = await reserve(limits, claim(max_output_tokens=1000))
    lease.settle(outcome(0, 180))
    with pytest.raises(RateLimited) as refused:
        await reserve(limits, claim(max_output_tokens=1))
    assert refused.value.retry_after_s == pytest.approx(120.0)  # until the debt is paid


async def test_a_prompt_beyond_the_limit_is_told_that_waiting_is_useless() -> None:
    limits = limiter(workspace=ScopeLimits(input_tokens_per_minute=50))
    with pytest.raises(RequestExceedsLimit, match="needs 51 input tokens, more than the 50") as refused:
        await reserve(limits, claim(input_tokens=51))
    assert refused.value.retry_after_s is None


async def test_the_wait_for_a_place_follows_how_long_requests_take() -> None:
    limits = limiter(key=ScopeLimits(concurrent_requests=2))
    (await reserve(limits, claim())).settle(outcome(duration_s=12.0))
    for _ in range(2):
        await reserve(limits, claim())
    with pytest.raises(RateLimited) as refused:
        await reserve(limits, claim())
    assert refused.value.retry_after_s == pytest.approx(6.0)


async def test_the_longest_wait_is_the_one_that_is_told() -> None:
    limits = limiter(key=ScopeLimits(requests_per_minute=60), workspace=ScopeLimits(requests_per_minute=1))
    lease = await reserve(limits, claim())
    assert remaining(lease, "requests") == 0  # the workspace's, which is the tightest
    with pytest.raises(RateLimited, match="this workspace") as refused:
        await reserve(limits, claim())
    assert refused.value.retry_after_s == pytest.approx(60.0)
    assert limits.metrics.refusals == {("workspace", "requests_per_minute"): 1}


async def test_a_budget_counts_what_was_spent_and_what_is_running() -> None:
    spending = SettableSpend()
    subject = Subject(LimitScope.WORKSPACE, "ws-1")
    limits = LocalLimiter(
        LimitSettings(workspace=ScopeLimits(dollars_per_day=100e-6, dollars_per_month=1.0)),
        VirtualClock(),
        spending=spending,
        wall_clock=lambda: 86_400.0 * 20_000 + 82_800.0,
    )
    first = await reserve(limits, claim(input_tokens=10, max_output_tokens=30))
    await reserve(limits, claim(input_tokens=10, max_output_tokens=30))
    with pytest.raises(QuotaExceeded, match="daily budget") as refused:
        await reserve(limits, claim(input_tokens=10, max_output_tokens=30))
    assert refused.value.retry_after_s == pytest.approx(3600.0)
    first.settle(outcome(10, 1))
    spending.spend(subject, 11)
    await reserve(limits, claim(input_tokens=10, max_output_tokens=30))
    with pytest.raises(QuotaExceeded):
        await reserve(limits, claim(input_tokens=10, max_output_tokens=0))


async def test_new_limits_keep_what_was_used_and_what_runs() -> None:
    limits = limiter(key=ScopeLimits(requests_per_minute=10, concurrent_requests=5))
    leases = [await reserve(limits, claim()) for _ in range(5)]
    limits.apply(LimitSettings(key=ScopeLimits(requests_per_minute=100, concurrent_requests=6)))
    sixth = await reserve(limits, claim())
    assert remaining(sixth, "requests") == 49
    with pytest.raises(RateLimited, match="at once"):
        await reserve(limits, claim())
    for lease in leases:
        lease.settle(outcome())
    limits.apply(LimitSettings())
    for _ in range(10):
        await reserve(limits, claim())


async def test_idle_callers_are_forgotten_and_busy_ones_are_not() -> None:
    clock = VirtualClock()
    limits = LocalLimiter(LimitSettings(key=ScopeLimits(requests_per_minute=60)), clock)
    busy = await reserve(limits, claim(key="busy"))
    for number in range(5000):
        (await reserve(limits, claim(key=f"key-{number}"))).settle(outcome())
        clock.advance(1.0)
    assert len(limits.metrics.subjects) <= 1024 + 64
    assert any(subject.name == "busy" for subject in limits._meters._meters)
    busy.settle(outcome())


async def test_a_model_can_be_limited_for_everybody() -> None:
    limits = limiter(model=ScopeLimits(overrides={"big-*": Limits(requests_per_minute=1)}))
    await reserve(limits, claim(key="a", model="big-70b"))
    with pytest.raises(RateLimited, match="this model"):
        await reserve(limits, claim(key="b", model="big-70b"))
    await reserve(limits, claim(key="b", model="small"))
