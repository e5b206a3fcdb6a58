"""Counts what passes through a gateway, and writes it out in the Prometheus text format.

Counting happens once per request and step, on one thread, in plain integers: a scrape, which is rare, does the
work of labels and names. Every metric appears under `penstock_` and under the `vllm:` name that dashboards know.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.core.messages import EngineStats
from penstock.core.request import FinishReason
from penstock.gateway.cache_metrics import CACHE_METRICS, cache_metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIXES = ("penstock_", "vllm:")
LABELS = ("model_name",)
# What every gateway repeats from the engine's reports instead of counting it.
ENGINE_METRICS = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "kv_fragmentation",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "iteration_tokens_total",
        *CACHE_METRICS,
    }
)


def is_of_engine(family_name: str) -> bool:
    return any(family_name.removeprefix(prefix) in ENGINE_METRICS for prefix in PREFIXES)


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


FIRST_TOKEN_BOUNDS_S = _bounds(
    ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
INTER_TOKEN_BOUNDS_S = _bounds(
    ".001 .0025 .005 .01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
)
REQUEST_BOUNDS_S = _bounds(".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
STEP_TOKENS_BOUNDS = tuple(float(1 << power) for power in (0, *range(3, 15)))
REQUEST_TOKENS_BOUNDS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class Histogram:
    """Counts per bucket; the last bucket is above every bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def mean(self) -> float:
        """0 when nothing was observed."""
        return self.total / count if (count := sum(self.counts)) else 0.0

    def cumulative(self) -> list[tuple[str, float]]:
        pairs: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            running += count
            pairs.append((bound, running))
        return pairs


class GatewayMetrics(Collector):
    """Written by output streams as things happen, read by `render`."""

    def __init__(self) -> None:
        self.model_name = ""  # until an engine has said what it serves
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        self.first_token_s = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.inter_token_s = Histogram(INTER_TOKEN_BOUNDS_S)
        self.end_to_end_s = Histogram(REQUEST_BOUNDS_S)
        self.queue_s = Histogram(REQUEST_BOUNDS_S)
        self.prefill_s = Histogram(REQUEST_BOUNDS_S)
        self.decode_s = Histogram(REQUEST_BOUNDS_S)
        self.request_prompt_tokens = Histogram(REQUEST_TOKENS_BOUNDS)
        self.request_generation_tokens = Histogram(REQUEST_TOKENS_BOUNDS)
        self.step_tokens = Histogram(STEP_TOKENS_BOUNDS)
        self._stats = EngineStats()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def observe_stats(self, stats: EngineStats) -> None:
        """Take over the engine's latest figures. Steps that were reported together count with their mean size."""
        if stats is self._stats:
            return
        before, self._stats = self._stats, stats
        num_steps = stats.num_steps - before.num_steps
        if num_steps > 0:
            mean_tokens = (stats.tokens_computed - before.tokens_computed) / num_steps
            self.step_tokens.counts[bisect_left(self.step_tokens.bounds, mean_tokens)] += num_steps
            self.step_tokens.total += mean_tokens * num_steps

    def register(self, collector: Collector) -> None:
        """Show another part's metrics beside these."""
        self._registry.register(collector)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for prefix in PREFIXES:
            yield from self._gauges(prefix)
            yield from self._counters(prefix)
            yield from self._histograms(prefix)
        fragmentation = GaugeMetricFamily(
            "penstock_kv_fragmentation",
            "Share of running requests' KV slots that hold nothing.",
            labels=LABELS,
        )
        fragmentation.add_metric([self.model_name], self._stats.kv_fragmentation)
        yield fragmentation
        yield from cache_metrics(self._stats, self.model_name)

    def _gauges(self, prefix: str) -> Iterator[Metric]:
        stats = self._stats
        usage = stats.num_kv_blocks_used / stats.num_kv_blocks if stats.num_kv_blocks else 0.0
        for name, help_text, value in (
            ("num_requests_running", "Requests in the running batch.", stats.num_running),
            ("num_requests_waiting", "Requests waiting to be scheduled.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all of them.", usage),
        ):
            gauge = GaugeMetricFamily(prefix + name, help_text, labels=LABELS)
            gauge.add_metric([self.model_name], value)
            yield gauge

    def _counters(self, prefix: str) -> Iterator[Metric]:
        stats = self._stats
        for name, help_text, value in (
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_cache_queries,
            ),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("num_preemptions", "Running requests sent back to the queue.", stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens of requests whose answer has begun.", self.prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.generation_tokens),
            ("spec_decode_num_draft_tokens", "Tokens drafted by speculation.", 0),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", 0),
        ):
            counter = CounterMetricFamily(prefix + name, help_text, labels=LABELS)
            counter.add_metric([self.model_name], value)
            yield counter
        success = CounterMetricFamily(
            prefix + "request_success", "Finished requests by reason.", labels=(*LABELS, "finished_reason")
        )
        for reason, count in self.finished.items():
            success.add_metric([self.model_name, reason.value], count)
        yield success

    def _histograms(self, prefix: str) -> Iterator[Metric]:
        for name, help_text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", self.first_token_s),
            ("inter_token_latency_seconds", "Between tokens of one answer.", self.inter_token_s),
            ("e2e_request_latency_seconds", "From arrival to the last token.", self.end_to_end_s),
            ("request_queue_time_seconds", "From arrival to the first computation.", self.queue_s),
            ("request_prefill_time_seconds", "From first computation to first token.", self.prefill_s),
            ("request_decode_time_seconds", "From the first token to the last.", self.decode_s),
            ("request_prompt_tokens", "Prompt tokens per request.", self.request_prompt_tokens),
            ("request_generation_tokens", "Tokens generated per request.", self.request_generation_tokens),
            ("iteration_tokens_total", "Tokens computed per engine step.", self.step_tokens),
        ):
            family = HistogramMetricFamily(prefix + name, help_text, labels=LABELS)
            family.add_metric([self.model_name], histogram.cumulative(), histogram.total)
            yield family
