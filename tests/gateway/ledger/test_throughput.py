"""Measured tokens per hour, and the price that follows."""

from __future__ import annotations

from decimal import Decimal

import pytest

from penstock.gateway.ledger.ledger import TokenMeter, TokensPerHour
from tests.gateway.ledger.samples import WallClock


def test_the_last_hour_counts() -> None:
    clock = WallClock(0.0)
    meter = TokenMeter(clock)
    for _ in range(120):
        meter.add(10, 5)
        clock.now += 60
    clock.now -= 1
    assert meter.rate() == TokensPerHour(600.0, 300.0)
    clock.now += 30 * 60
    assert meter.rate() == TokensPerHour(300.0, 150.0)
    clock.now += 3600
    assert meter.rate() == TokensPerHour(0.0, 0.0)


def test_the_first_minutes_are_scaled_up() -> None:
    clock = WallClock(0.0)
    meter = TokenMeter(clock)
    meter.add(100, 0)
    assert meter.rate() == TokensPerHour(6000.0, 0.0)
    clock.now += 360
    assert meter.rate() == TokensPerHour(1000.0, 0.0)


def test_dollars_per_million() -> None:
    assert TokensPerHour(900_000.0, 100_000.0).dollars_per_million(Decimal("2.5")) == pytest.approx(2.5)
    assert TokensPerHour(0.0, 0.0).dollars_per_million(Decimal("2.5")) is None
