from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.ratelimits.meters import TOLERANCE, TokenBucket


def test_a_new_bucket_holds_a_minute() -> None:
    bucket = TokenBucket(60, now=0.0)
    assert bucket.fits(60, 0.0)
    assert not bucket.fits(61, 0.0)


def test_it_refills_steadily_and_stops_when_full() -> None:
    bucket = TokenBucket(60, now=0.0)
    bucket.take(60, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert not bucket.fits(2, 1.5)
    assert bucket.fits(2, 2.0)
    bucket.refill(1000.0)
    assert bucket.level == bucket.limit


def test_what_was_not_used_comes_back_but_never_above_full() -> None:
    bucket = TokenBucket(60, now=0.0)
    bucket.take(50, 0.0)
    bucket.take(-20, 0.0)
    assert bucket.state.remaining == 30
    bucket.take(-50, 0.0)
    assert bucket.state.remaining == 60


def test_a_debt_is_paid_before_anything_else() -> None:
    bucket = TokenBucket(60, now=0.0)
    bucket.take(90, 0.0)
    assert bucket.state.remaining == 0
    assert bucket.wait_s(1, 0.0) == pytest.approx(31.0)
    assert bucket.state.reset_s == pytest.approx(90.0)


def test_more_than_the_limit_never_fits() -> None:
    assert TokenBucket(60, now=0.0).wait_s(61, 0.0) == math.inf


def test_a_clock_that_steps_back_refills_nothing() -> None:
    bucket = TokenBucket(60, now=100.0)
    bucket.take(60, 100.0)
    assert not bucket.fits(1, 50.0)
    assert bucket.fits(1, 101.0)


def test_half_full_stays_half_full_under_another_limit() -> None:
    bucket = TokenBucket(60, now=0.0)
    bucket.take(30, 0.0)
    bucket.resize(600, 0.0)
    assert bucket.state.remaining == 300
    bucket.resize(6, 0.0)
    assert bucket.state.remaining == 3


@given(
    limit=st.integers(1, 10**6),
    taken=st.floats(0, 10**6),
    amount=st.integers(1, 10**6),
)
def test_the_wait_it_names_is_long_enough_and_not_too_long(limit: int, taken: float, amount: int) -> None:
    bucket = TokenBucket(limit, 0.0)
    bucket.take(taken, 0.0)
    wait_s = bucket.wait_s(amount, 0.0)
    if wait_s == math.inf:
        assert amount > limit
        return
    if wait_s > 0.01 and wait_s * limit / 60 > 10 * TOLERANCE:
        assert not bucket.fits(amount, wait_s * 0.99 - 0.001)
    assert bucket.fits(amount, wait_s)
