"""What the autoscaler sees and decides, as metrics: for dashboards, and for others who scale by the same signals,
such as KEDA. Every gateway of a server tells the same; `metrics_exchange` takes it once."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.gateway.fleet_control import FleetControl
from penstock.gateway.metric_table import metric_by


class PoolMetrics(Collector):
    def __init__(self, control: FleetControl) -> None:
        self._control = control

    def collect(self) -> Iterator[Metric]:
        pools = {(pool.model, pool.role): pool for pool in self._control.pools}
        yield metric_by(
            "replicas",
            {
                (*labels, state): getattr(pool, f"num_{state}")
                for labels, pool in pools.items()
                for state in ("ready", "starting", "draining")
            },
        )
        yield metric_by(
            "autoscaler_decisions",
            {
                (*labels, direction): getattr(pool, f"num_scale_{direction}s")
                for labels, pool in pools.items()
                for direction in ("up", "down")
            },
        )
        for name, attribute in _ATTRIBUTES.items():
            yield metric_by(name, {labels: getattr(pool, attribute) for labels, pool in pools.items()})


_ATTRIBUTES = {
    "replicas_wanted": "num_wanted",
    "pool_queued_prefill_tokens": "queued_prefill_tokens",
    "pool_drain_seconds": "drain_s",
    "pool_load": "load",
    "held_requests": "held_requests",
}
