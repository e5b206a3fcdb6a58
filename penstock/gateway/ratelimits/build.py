"""Chooses the limiter that a gateway was configured for. The only place that knows Redis may not be installed."""

from __future__ import annotations

from typing import Protocol

from penstock.core.errors import ConfigError
from penstock.core.gateway_config import GatewayConfig
from penstock.core.installation import install_command
from penstock.gateway.accounts import Limiter
from penstock.gateway.ratelimits.local import LocalLimiter
from penstock.gateway.ratelimits.refusals import LimiterMetrics
from penstock.gateway.ratelimits.settings import LimitSettings
from penstock.gateway.ratelimits.spend import SpendTracker


class RunningLimiter(Limiter, Protocol):
    """A limiter as the composition root sees it."""

    metrics: LimiterMetrics

    async def start(self) -> None: ...
    async def close(self) -> None: ...

    def apply(self, settings: LimitSettings) -> None:
        """Take over new limits. What callers have used, run and owe stays."""
        ...


def build_limiter(
    config: GatewayConfig,
    settings: LimitSettings | None = None,
    *,
    spending: SpendTracker | None = None,
    num_processes: int = 1,
) -> RunningLimiter:
    """Build the limiter. With Redis, all processes share every limit. Without Redis, or while Redis is away, each of
    `num_processes` grants an equal part of every limit."""
    settings = settings or LimitSettings()
    local = LocalLimiter(settings, spending=spending, share=1 / num_processes)
    if config.redis_url is None:
        return local
    try:
        from penstock.gateway.ratelimits.shared import RedisLimiter
    except ImportError as error:
        raise ConfigError(
            "Limits shared through Redis need the redis package.", hint=f"Run: {install_command('redis')}"
        ) from error
    return RedisLimiter.at(config.redis_url, settings, local, policy=config.redis_policy)
