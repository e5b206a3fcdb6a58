"""Each replica by itself, and how requests are shared out among them, as metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.cluster.fleet import Fleet
from penstock.core.messages import EngineStats
from penstock.dispatch.replicas import ReplicaRecord
from penstock.gateway.metric_table import metric, metric_by
from penstock.router import ReplicaState


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
