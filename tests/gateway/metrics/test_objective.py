"""The scheduling objective on the metrics page."""

from __future__ import annotations

import pytest

from penstock.cluster.fleet import Fleet
from penstock.core.errors import EngineUnavailable, InvalidRequest
from penstock.core.messages import EngineStats
from penstock.core.objective import ObjectiveSettings, Weights
from penstock.core.plan import FinishReason
from penstock.core.request import Request, Tier
from penstock.dispatch import Attempt
from penstock.gateway.metrics.gateway import GatewayMetrics
from penstock.gateway.metrics.objective import ObjectiveMetrics
from tests.cluster.fake_replicas import FakeReplicas, make_request, member
from tests.gateway.metrics.test_replica_metrics import value


def attempt(request: Request, **changes: object) -> Attempt:
    values: dict[str, object] = {
        "ttft_s": 0.5,
        "itl_s": 0.05,
        "output_token_ids": (1, 2),
        "finish_reason": FinishReason.STOP,
        **changes,
    }
    return Attempt(request=request, replica_id="one", revision="", **values)  # type: ignore[arg-type]


async def test_the_objective_of_the_last_minute() -> None:
    now = 0.0
    fakes = FakeReplicas()
    fleet = Fleet(seed=0, connect=fakes.connect)
    fleet.update([member("one")])
    metrics = ObjectiveMetrics(fleet, lambda: now)
    metrics.apply(ObjectiveSettings(weights=Weights(ttft=1.0, itl=1.0, idle=1.0, drops=10.0)))
    model = next(iter(fleet.models))
    request = make_request("a")

    def page() -> bytes:
        whole = GatewayMetrics()
        whole.register(metrics)
        return whole.render()

    metrics.ended(attempt(request))
    metrics.ended(attempt(request, ttft_s=None, itl_s=None, error=EngineUnavailable("gone")))
    metrics.ended(attempt(request, error=InvalidRequest("no")))  # the caller's fault
    metrics.ended(attempt(request, finish_reason=FinishReason.ABORT))  # the client left
    tier = f'tier="{Tier.DEFAULT.value}"'
    shown = page()
    assert value(shown, "penstock_objective{", tier, 'term="ttft"') == 0.5
    assert value(shown, "penstock_objective{", tier, 'term="itl"') == 0.5
    assert value(shown, "penstock_objective{", tier, 'term="drops"') == 5.0
    assert value(shown, "penstock_objective{", 'tier="all"', 'term="total"') == 7.0
    assert value(shown, "penstock_objective_requests_total", tier) == 2
    assert value(shown, "penstock_objective_cost_total", tier, 'term="drops"') == 1

    now = 15.0
    page()  # a new slice begins
    stats = EngineStats(tokens_computed=100, busy_s=20.0)
    fakes["one"].stats = stats
    fakes["one"].tell_stats(stats)
    now = 55.0
    assert value(page(), "penstock_objective{", 'tier="all"', 'term="idle"', model) == 1.0
    now = 74.0
    assert value(page(), "penstock_objective{", 'tier="all"', 'term="idle"') == pytest.approx(1 - 20 / 59)
    now = 200.0
    shown = page()
    assert b'tier="default",term="total"' not in shown  # a minute without requests
    assert value(shown, "penstock_objective_requests_total", tier) == 2
    fleet.close()
