"""What prompt caching does in the engine, as Prometheus metrics. Reads figures that the engine reports; counts
nothing itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.core.messages import EngineStats

_LABELS = ("model_name",)
_GAUGES = (
    ("kv_pinned_blocks", "KV blocks held for cache breakpoints.", "num_pinned_blocks"),
    ("kv_host_blocks", "Slots for KV blocks in host memory.", "num_host_blocks"),
    ("kv_host_blocks_used", "Slots in host memory that hold a block.", "num_host_blocks_used"),
)
_COUNTERS = (
    ("cache_read_tokens", "Prompt tokens read from prefixes kept at breakpoints.", "cache_read_tokens"),
    ("cache_write_tokens", "Prompt tokens newly kept at breakpoints.", "cache_write_tokens"),
    ("kv_pins_demoted", "Pins given up before their time, to make room.", "num_pins_demoted"),
    ("kv_blocks_to_host", "KV blocks copied to host memory.", "num_blocks_to_host"),
    ("kv_blocks_from_host", "KV blocks copied back from host memory.", "num_blocks_from_host"),
    ("kv_fetches", "Requests whose KV was to come from another replica.", "kv_fetches"),
    ("kv_fetches_failed", "Requests whose KV did not all come from another replica.", "kv_fetches_failed"),
    ("kv_fetched_tokens", "Tokens whose KV came from another replica.", "kv_fetched_tokens"),
    ("kv_kept_blocks_lost", "Kept KV blocks dropped before their time.", "num_kept_blocks_lost"),
)
CACHE_METRICS = tuple(name for name, _, _ in (*_GAUGES, *_COUNTERS))


def cache_metrics(stats_of: Mapping[str, EngineStats]) -> Iterator[Metric]:
    """`stats_of` has the figures of each model's engines."""
    for rows, kind in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
        for name, help_text, attribute in rows:
            family = kind(f"penstock_{name}", help_text, labels=_LABELS)
            for model_name, stats in stats_of.items():
                family.add_metric([model_name], getattr(stats, attribute))
            yield family
