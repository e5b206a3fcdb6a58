"""The settings of a dispatcher. A file without code, so that the dispatcher can be compiled."""

from __future__ import annotations

import msgspec

from penstock.core.objective import RoutingPolicy, RoutingWeights
from penstock.dispatch.health import BreakerConfig, OutlierConfig
from penstock.dispatch.requests import RetryConfig, WaitingConfig
from penstock.dispatch.suspects import SuspectConfig


class DispatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of each policy, with the defaults for serving."""

    routing_policy: RoutingPolicy = "prefix-aware"
    routing: RoutingWeights = RoutingWeights()  # of that policy
    # The death of one replica must not use up the budget: all its running requests, and most of its waiting ones,
    # continue on other replicas. Several replicas that fail at once are reported one by one, and must not use up the
    # attempts of one request.
    retries: RetryConfig = RetryConfig(max_attempts=4, max_budget=2_000.0)
    breaker: BreakerConfig = BreakerConfig()
    outliers: OutlierConfig = OutlierConfig(max_ejected_share=0.34)  # at least one of three
    waiting: WaitingConfig = WaitingConfig()
    suspects: SuspectConfig = SuspectConfig()
