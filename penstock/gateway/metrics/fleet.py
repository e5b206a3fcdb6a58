"""Metrics of the fleet: what the autoscaler sees and decides, each replica by itself, and how requests are routed.

Dashboards read them, and so do other autoscalers, such as KEDA."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.cluster.fleet import Fleet
from penstock.core.messages import EngineStats
from penstock.dispatch.replicas import ReplicaRecord
from penstock.gateway.fleet_control import FleetControl
from penstock.gateway.metrics.table import metric, metric_by
from penstock.router import ReplicaState


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


class ReplicaMetrics(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        fleet = self._fleet
        values: dict[str, dict[tuple[str, ...], float]] = {}
        for connection in list(fleet.connections.by_id.values()):
            replica = connection.member.replica
            labels = (connection.member.spec.model, replica.id, replica.revision, replica.region)
            record = fleet.replicas.get(replica.id)
            if record is not None:
                for name, value in _values(record, connection.client.stats).items():
                    values.setdefault(name, {})[labels] = value
        for name in _NAMES:
            yield metric_by(name, values.get(name, {}))
        yield metric_by("routing_decisions", fleet.reasons)
        yield metric_by("failed_attempts", fleet.verdicts)
        yield metric("replica_ejections", fleet.dispatcher.table.num_ejections)
        yield metric("routed_prompt_tokens", fleet.routed_tokens)
        yield metric("matched_prompt_tokens", fleet.matched_tokens)


_NAMES = (
    "replica_ready",
    "replica_requests_running",
    "replica_requests_waiting",
    "replica_kv_cache_usage_perc",
    "replica_prefix_cache_queries",
    "replica_prefix_cache_hits",
    "replica_requests",
    "replica_failures",
    "replica_kv_event_resyncs",
)


def _values(record: ReplicaRecord, stats: EngineStats) -> dict[str, float]:
    return {
        "replica_ready": float(record.state is ReplicaState.READY),
        "replica_requests_running": stats.num_running,
        "replica_requests_waiting": stats.num_waiting,
        "replica_kv_cache_usage_perc": stats.num_kv_blocks_used / stats.num_kv_blocks
        if stats.num_kv_blocks
        else 0.0,
        "replica_prefix_cache_queries": stats.prefix_cache_queries,
        "replica_prefix_cache_hits": stats.prefix_cache_hits,
        "replica_requests": record.num_sent,
        "replica_failures": record.num_failed,
        "replica_kv_event_resyncs": record.num_resyncs,
    }
