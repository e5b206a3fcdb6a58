"""What the autoscaler sees and decides, as metrics: for dashboards, and for others who scale by the same signals,
such as KEDA. Every gateway of a server tells the same; `metrics_exchange` takes it once."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.core.cluster_view import PoolView
from penstock.gateway.control_desk import ControlDesk

LABELS = ("model_name", "role")
# Names without `penstock_` and, for counters, without `_total`.
POOL_METRICS = frozenset(
    {
        "replicas",
        "replicas_wanted",
        "pool_queued_prefill_tokens",
        "pool_drain_seconds",
        "pool_load",
        "held_requests",
        "autoscaler_decisions",
    }
)


class PoolMetrics(Collector):
    def __init__(self, desk: ControlDesk) -> None:
        self._desk = desk

    def collect(self) -> Iterator[Metric]:
        replicas = GaugeMetricFamily(
            "penstock_replicas", "Replicas of a pool by state.", labels=(*LABELS, "state")
        )
        decisions = CounterMetricFamily(
            "penstock_autoscaler_decisions", "Decisions to change a pool.", labels=(*LABELS, "direction")
        )
        gauges = {
            name: GaugeMetricFamily(f"penstock_{name}", help_text, labels=LABELS)
            for name, help_text in (
                ("replicas_wanted", "Replicas of a pool that serve or are being started."),
                ("pool_queued_prefill_tokens", "Prompt tokens that wait, those of held requests included."),
                ("pool_drain_seconds", "How long the ready replicas take for the queued prefill tokens."),
                ("pool_load", "The largest of the autoscaler's signals, as a share of its target."),
                ("held_requests", "Requests that wait for a first replica."),
            )
        }
        for pool in self._desk.pools:
            labels = (pool.model, pool.role)
            for state, count in (
                ("ready", pool.num_ready),
                ("starting", pool.num_starting),
                ("draining", pool.num_draining),
            ):
                replicas.add_metric([*labels, state], count)
            for direction, count in (("up", pool.num_scale_ups), ("down", pool.num_scale_downs)):
                decisions.add_metric([*labels, direction], count)
            for name, value in _values(pool).items():
                gauges[name].add_metric(labels, value)
        yield from (replicas, decisions, *gauges.values())


def _values(pool: PoolView) -> dict[str, float]:
    return {
        "replicas_wanted": pool.num_wanted,
        "pool_queued_prefill_tokens": pool.queued_prefill_tokens,
        "pool_drain_seconds": pool.drain_s,
        "pool_load": pool.load,
        "held_requests": pool.held_requests,
    }
