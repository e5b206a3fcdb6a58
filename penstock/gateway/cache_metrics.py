"""What prompt caching does in the engine, as Prometheus metrics. Reads figures that the engine reports; counts
nothing itself."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.core.messages import EngineStats

_LABELS = ("model_name",)


CACHE_METRICS = (
    "kv_pinned_blocks",
    "kv_host_blocks",
    "kv_host_blocks_used",
    "cache_read_tokens",
    "cache_write_tokens",
    "kv_pins_demoted",
    "kv_blocks_to_host",
    "kv_blocks_from_host",
    "kv_kept_blocks_lost",
)


def cache_metrics(stats: EngineStats, model_name: str) -> Iterator[Metric]:
    for name, help_text, value in (
        ("kv_pinned_blocks", "KV blocks held for cache breakpoints.", stats.num_pinned_blocks),
        ("kv_host_blocks", "Slots for KV blocks in host memory.", stats.num_host_blocks),
        ("kv_host_blocks_used", "Slots in host memory that hold a block.", stats.num_host_blocks_used),
    ):
        gauge = GaugeMetricFamily(f"penstock_{name}", help_text, labels=_LABELS)
        gauge.add_metric([model_name], value)
        yield gauge
    for name, help_text, value in (
        (
            "cache_read_tokens",
            "Prompt tokens read from prefixes kept at breakpoints.",
            stats.cache_read_tokens,
        ),
        ("cache_write_tokens", "Prompt tokens newly kept at breakpoints.", stats.cache_write_tokens),
        ("kv_pins_demoted", "Pins given up before their time, to make room.", stats.num_pins_demoted),
        ("kv_blocks_to_host", "KV blocks copied to host memory.", stats.num_blocks_to_host),
        ("kv_blocks_from_host", "KV blocks copied back from host memory.", stats.num_blocks_from_host),
        ("kv_kept_blocks_lost", "Kept KV blocks dropped before their time.", stats.num_kept_blocks_lost),
    ):
        counter = CounterMetricFamily(f"penstock_{name}", help_text, labels=_LABELS)
        counter.add_metric([model_name], value)
        yield counter
