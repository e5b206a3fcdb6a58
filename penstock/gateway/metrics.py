"""Counts what passes through a gateway, and writes it out in the Prometheus text format.

Counting happens once per request and step, on one thread, in plain integers: a scrape, which is rare, does the
work of labels and names. Every metric appears under `penstock_` and under the `vllm:` name that dashboards know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.cluster.client import EngineClient
from penstock.core.messages import EngineStats
from penstock.gateway.cache_metrics import CACHE_METRICS, cache_metrics
from penstock.gateway.external.models import EXTERNAL_METRICS
from penstock.gateway.model_metrics import Histogram, ModelMetrics
from penstock.gateway.pool_metrics import POOL_METRICS
from penstock.gateway.replica_metrics import REPLICA_METRICS

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
        "num_swapped",
        "nan_logits",
        "out_of_memory",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "iteration_tokens_total",
        *CACHE_METRICS,
        *POOL_METRICS,
        *EXTERNAL_METRICS,
        *REPLICA_METRICS,
    }
)


def is_of_engine(family_name: str) -> bool:
    return any(family_name.removeprefix(prefix) in ENGINE_METRICS for prefix in PREFIXES)


# Name, help, and the attribute that has the value: first of EngineStats, then of ModelMetrics.
_ENGINE_GAUGES = (
    ("num_requests_running", "Requests in the running batch.", "num_running"),
    ("num_requests_waiting", "Requests waiting to be scheduled.", "num_waiting"),
)
_ENGINE_COUNTERS = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_cache_hits"),
    ("num_preemptions", "Running requests sent back to the queue.", "num_preemptions"),
    ("num_swapped", "Preempted requests whose KV may go to host memory.", "num_swapped"),
    ("nan_logits", "Requests ended because the model produced no numbers.", "num_nan_logits"),
    ("out_of_memory", "Requests ended because a step had no memory for them.", "num_out_of_memory"),
)
_COUNTERS = (
    ("prompt_tokens", "Prompt tokens of requests whose answer has begun.", "prompt_tokens"),
    ("generation_tokens", "Tokens generated.", "generation_tokens"),
)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From arrival to the first token.", "first_token_s"),
    ("inter_token_latency_seconds", "Between tokens of one answer.", "inter_token_s"),
    ("e2e_request_latency_seconds", "From arrival to the last token.", "end_to_end_s"),
    ("request_queue_time_seconds", "From arrival to the first computation.", "queue_s"),
    ("request_prefill_time_seconds", "From first computation to first token.", "prefill_s"),
    ("request_decode_time_seconds", "From the first token to the last.", "decode_s"),
    ("request_prompt_tokens", "Prompt tokens per request.", "request_prompt_tokens"),
    ("request_generation_tokens", "Tokens generated per request.", "request_generation_tokens"),
    ("iteration_tokens_total", "Tokens computed per engine step.", "step_tokens"),
)
# There is no speculation yet, and dashboards expect them.
_ALWAYS_ZERO = (
    ("spec_decode_num_draft_tokens", "Tokens drafted by speculation."),
    ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted."),
)


class GatewayMetrics(Collector):
    """Counts by model, read by `render`."""

    def __init__(self) -> None:
        self._models: dict[str, ModelMetrics] = {}
        self._engine_models: tuple[str, ...] = ()  # those that engines report on
        self._stats: EngineStats | None = None  # of all engines, when they were last looked at
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def of(self, model_name: str) -> ModelMetrics:
        found = self._models.get(model_name)
        if found is None:
            found = self._models[model_name] = ModelMetrics()
        return found

    @property
    def mean_answer_tokens(self) -> float:
        """0 when nothing was answered."""
        answers = [model.request_generation_tokens for model in self._models.values()]
        count = sum(sum(histogram.counts) for histogram in answers)
        return sum(histogram.total for histogram in answers) / count if count else 0.0

    def observe_engines(self, engine: EngineClient) -> None:
        """Take over the engines' latest figures. Cheap when there are none."""
        stats = engine.stats
        if stats is self._stats:
            return
        self._stats = stats
        names = self._engine_models = tuple(engine.models) or self._engine_models
        for name in names:
            self.of(name).observe_stats(stats if len(names) == 1 else engine.stats_of(name))

    def register(self, collector: Collector) -> None:
        """Show another part's metrics beside these."""
        self._registry.register(collector)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        stats_of = {name: self.of(name).stats for name in self._engine_models}
        for prefix in PREFIXES:
            yield from _gauges(prefix, stats_of)
            yield from self._counters(prefix, stats_of)
            yield from self._histograms(prefix)
        fragmentation = {name: stats.kv_fragmentation for name, stats in stats_of.items()}
        help_text = "Share of running requests' KV slots that hold nothing."
        yield _labelled(
            GaugeMetricFamily("penstock_kv_fragmentation", help_text, labels=LABELS), fragmentation
        )
        yield from cache_metrics(stats_of)

    def _counters(self, prefix: str, stats_of: Mapping[str, EngineStats]) -> Iterator[Metric]:
        for (name, help_text, attribute), sources in (
            *((row, stats_of) for row in _ENGINE_COUNTERS),
            *((row, self._models) for row in _COUNTERS),
        ):
            values = {model: getattr(source, attribute) for model, source in sources.items()}
            yield _labelled(CounterMetricFamily(prefix + name, help_text, labels=LABELS), values)
        for name, help_text in _ALWAYS_ZERO:
            family = CounterMetricFamily(prefix + name, help_text, labels=LABELS)
            yield _labelled(family, dict.fromkeys(stats_of, 0))
        success = CounterMetricFamily(
            prefix + "request_success", "Finished requests by reason.", labels=(*LABELS, "finished_reason")
        )
        for model_name, model in self._models.items():
            for reason, count in model.finished.items():
                success.add_metric([model_name, reason.value], count)
        yield success

    def _histograms(self, prefix: str) -> Iterator[Metric]:
        for name, help_text, attribute in _HISTOGRAMS:
            family = HistogramMetricFamily(prefix + name, help_text, labels=LABELS)
            for model_name, model in self._models.items():
                histogram: Histogram = getattr(model, attribute)
                family.add_metric([model_name], histogram.cumulative(), histogram.total)
            yield family


def _gauges(prefix: str, stats_of: Mapping[str, EngineStats]) -> Iterator[Metric]:
    for name, help_text, attribute in _ENGINE_GAUGES:
        values = {model: getattr(stats, attribute) for model, stats in stats_of.items()}
        yield _labelled(GaugeMetricFamily(prefix + name, help_text, labels=LABELS), values)
    usage = {
        model: stats.num_kv_blocks_used / stats.num_kv_blocks if stats.num_kv_blocks else 0.0
        for model, stats in stats_of.items()
    }
    help_text = "Share of KV blocks in use; 1 is all of them."
    yield _labelled(GaugeMetricFamily(prefix + "kv_cache_usage_perc", help_text, labels=LABELS), usage)


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for model_name, value in values.items():
        family.add_metric([model_name], value)
    return family
