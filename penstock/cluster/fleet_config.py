"""The settings of a fleet: those of the pure policies that it carries out, and their defaults for serving."""

from __future__ import annotations

import msgspec

from penstock.control.breaker import BreakerConfig
from penstock.control.holding import HoldingConfig
from penstock.control.outliers import OutlierConfig
from penstock.control.retries import RetryConfig
from penstock.core.config import RoutingPolicy


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True):
    routing_policy: RoutingPolicy = "prefix-aware"
    # One replica's death must not use up the budget: all that it ran and much of what waited there goes on elsewhere.
    # And several that die at once, which gateways hear of one by one, must not use up a request's attempts.
    retries: RetryConfig = RetryConfig(max_attempts=4, max_budget=2_000.0)
    breaker: BreakerConfig = BreakerConfig()
    outliers: OutlierConfig = OutlierConfig(max_ejected_share=0.34)  # one of three, at least
    holding: HoldingConfig = HoldingConfig()
