"""The settings of a dispatcher: one section for each of its policies, with their defaults for serving."""

from __future__ import annotations

import msgspec

from penstock.core.config import RoutingPolicy
from penstock.dispatch.health import BreakerConfig, OutlierConfig
from penstock.dispatch.requests import RetryConfig, WaitingConfig


class DispatchConfig(msgspec.Struct, frozen=True, kw_only=True):
    routing_policy: RoutingPolicy = "prefix-aware"
    # The death of one replica must not use up the budget: everything that it ran, and much of what waited there,
    # continues on other replicas. Several replicas that die at once, of which gateways hear one by one, must not use
    # up the attempts of one request.
    retries: RetryConfig = RetryConfig(max_attempts=4, max_budget=2_000.0)
    breaker: BreakerConfig = BreakerConfig()
    outliers: OutlierConfig = OutlierConfig(max_ejected_share=0.34)  # at least one of three
    waiting: WaitingConfig = WaitingConfig()
