"""Each replica by itself, and how requests are shared out among them, as metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.cluster.fleet import Fleet
from penstock.core.messages import EngineStats
from penstock.dispatch.replicas import ReplicaRecord
from penstock.router import ReplicaState

LABELS = ("model_name", "replica", "revision", "region")
# What every gateway repeats from the replicas' heartbeats, by name without `penstock_`; the rest each counts itself.
REPLICA_METRICS = frozenset(
    {
        "replica_ready",
        "replica_requests_running",
        "replica_requests_waiting",
        "replica_kv_cache_usage_perc",
        "replica_prefix_cache_queries",
        "replica_prefix_cache_hits",
    }
)


class ReplicaMetrics(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        connections = list(self._fleet.connections.by_id.values())
        for name, help_text, kind in (
            ("ready", "1 while a replica takes new requests, else 0.", GaugeMetricFamily),
            ("requests_running", "Requests in a replica's running batch.", GaugeMetricFamily),
            ("requests_waiting", "Requests that wait in a replica's queue.", GaugeMetricFamily),
            ("kv_cache_usage_perc", "Share of a replica's KV blocks in use.", GaugeMetricFamily),
            ("prefix_cache_queries", "Prompt tokens that a replica looked up.", CounterMetricFamily),
            ("prefix_cache_hits", "Prompt tokens that a replica had cached.", CounterMetricFamily),
            ("requests", "Requests sent to a replica, retries included.", CounterMetricFamily),
            ("failures", "Requests that a replica lost or could not take.", CounterMetricFamily),
            ("kv_event_resyncs", "How often KV events were missing.", CounterMetricFamily),
        ):
            family = kind(f"penstock_replica_{name}", help_text, labels=LABELS)
            for connection in connections:
                replica = connection.member.replica
                labels = (connection.member.spec.model, replica.id, replica.revision, replica.region)
                record = self._fleet.replicas.get(replica.id)
                if record is not None:
                    family.add_metric(labels, _values(record, connection.client.stats)[name])
            yield family
        yield from self._routing()

    def _routing(self) -> Iterator[Metric]:
        fleet = self._fleet
        reasons = CounterMetricFamily(
            "penstock_routing_decisions", "Requests by what decided where they went.", labels=("reason",)
        )
        for reason, count in fleet.reasons.items():
            reasons.add_metric((reason,), count)
        verdicts = CounterMetricFamily(
            "penstock_failed_attempts",
            "Attempts that a replica failed, by what followed.",
            labels=("verdict",),
        )
        for verdict, count in fleet.verdicts.items():
            verdicts.add_metric((verdict,), count)
        yield reasons
        yield verdicts
        for name, help_text, value in (
            (
                "replica_ejections",
                "Times that a replica was left out for being slow.",
                fleet.dispatcher.table.num_ejections,
            ),
            ("routed_prompt_tokens", "Prompt tokens of requests that were routed.", fleet.routed_tokens),
            ("matched_prompt_tokens", "Of those, thought to be cached there.", fleet.matched_tokens),
        ):
            yield CounterMetricFamily(f"penstock_{name}", help_text, value)


def _values(record: ReplicaRecord, stats: EngineStats) -> dict[str, float]:
    return {
        "ready": float(record.state is ReplicaState.READY),
        "requests_running": stats.num_running,
        "requests_waiting": stats.num_waiting,
        "kv_cache_usage_perc": stats.num_kv_blocks_used / stats.num_kv_blocks if stats.num_kv_blocks else 0.0,
        "prefix_cache_queries": stats.prefix_cache_queries,
        "prefix_cache_hits": stats.prefix_cache_hits,
        "requests": record.num_sent,
        "failures": record.num_failed,
        "kv_event_resyncs": record.num_resyncs,
    }
