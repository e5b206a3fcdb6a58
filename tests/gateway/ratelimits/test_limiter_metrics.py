from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.clock import VirtualClock
from penstock.core.errors import RateLimited
from penstock.core.gateway_config import GatewayConfig
from penstock.gateway.metrics.gateway import GatewayMetrics
from penstock.gateway.ratelimits.local import LocalLimiter, MeterTable
from penstock.gateway.ratelimits.settings import LimiterMetrics, LimitSettings, ScopeLimits
from penstock.serve.gateway_state import build_limiter
from tests.gateway.ratelimits.claims import claim, reserve


def rendered(metrics: LimiterMetrics) -> str:
    whole = GatewayMetrics()
    whole.register(metrics)
    return whole.render().decode()


async def test_decisions_are_counted_by_the_limit_to_blame() -> None:
    limiter = LocalLimiter(LimitSettings(key=ScopeLimits(requests_per_minute=1)), VirtualClock())
    await reserve(limiter, claim())
    for _ in range(2):
        with pytest.raises(RateLimited):
            await reserve(limiter, claim())
    text = rendered(limiter.metrics)
    assert "penstock_limits_admitted_total 1.0" in text
    assert 'penstock_limits_refused_total{limit="requests_per_minute",scope="key"} 2.0' in text
    assert "penstock_limits_subjects 1.0" in text
    assert "redis" not in text


async def test_redis_appears_when_it_is_used() -> None:
    limiter = build_limiter(GatewayConfig(redis_url="redis://127.0.0.1:1/0"))
    await limiter.start()
    assert "penstock_limits_redis_up 0.0" in rendered(limiter.metrics)
    await limiter.close()


async def test_processes_with_a_table_share_their_limits(tmp_path: Path) -> None:
    settings = LimitSettings(key=ScopeLimits(concurrent_requests=1))
    first, second = (
        build_limiter(GatewayConfig(), settings, table=MeterTable(tmp_path / "limits", 2, number))
        for number in range(2)
    )
    await reserve(first, claim())
    with pytest.raises(RateLimited):
        await reserve(second, claim())
