"""Counts what passes through a gateway, and writes it out in the Prometheus text format.

Counting happens once per request and step, on one thread, in plain integers: a scrape, which is rare, does the
work of labels and names. Every metric appears under `penstock_` and under the `vllm:` name that dashboards know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.cluster.client import EngineClient
from penstock.core.messages import EngineStats
from penstock.gateway.metric_table import ENGINE_METRICS, MODEL_METRICS, Declared, add
from penstock.gateway.model_metrics import Histogram, ModelMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Which attribute of EngineStats or ModelMetrics has the value, where it has another name than the metric.
_ATTRIBUTES = {
    "num_requests_running": "num_running",
    "num_requests_waiting": "num_waiting",
    "nan_logits": "num_nan_logits",
    "out_of_memory": "num_out_of_memory",
    "kv_pinned_blocks": "num_pinned_blocks",
    "kv_host_blocks": "num_host_blocks",
    "kv_host_blocks_used": "num_host_blocks_used",
    "kv_pins_demoted": "num_pins_demoted",
    "kv_blocks_to_host": "num_blocks_to_host",
    "kv_blocks_from_host": "num_blocks_from_host",
    "kv_kept_blocks_lost": "num_kept_blocks_lost",
    "time_to_first_token_seconds": "first_token_s",
    "inter_token_latency_seconds": "inter_token_s",
    "e2e_request_latency_seconds": "end_to_end_s",
    "request_queue_time_seconds": "queue_s",
    "request_prefill_time_seconds": "prefill_s",
    "request_decode_time_seconds": "decode_s",
    "iteration_tokens_total": "step_tokens",
}


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
        for declared in ENGINE_METRICS:
            values = {model: _engine_value(declared.name, stats) for model, stats in stats_of.items()}
            yield from _families(declared, values)
        for declared in MODEL_METRICS:
            attribute = _ATTRIBUTES.get(declared.name, declared.name)
            if declared.name == "request_success":
                yield from self._successes(declared)
            elif declared.kind == "histogram":
                yield from self._histograms(declared, attribute)
            else:
                values = {name: getattr(model, attribute) for name, model in self._models.items()}
                yield from _families(declared, values)

    def _successes(self, declared: Declared) -> Iterator[Metric]:
        for prefix in declared.prefixes:
            family = declared.family(prefix)
            for model_name, model in self._models.items():
                for reason, count in model.finished.items():
                    add(family, (model_name, reason.value), count)
            yield family

    def _histograms(self, declared: Declared, attribute: str) -> Iterator[Metric]:
        for prefix in declared.prefixes:
            family = HistogramMetricFamily(prefix + declared.name, declared.help, labels=declared.labels)
            for model_name, model in self._models.items():
                histogram: Histogram = getattr(model, attribute)
                family.add_metric([model_name], histogram.cumulative(), histogram.total)
            yield family


def _engine_value(name: str, stats: EngineStats) -> float:
    if name == "kv_cache_usage_perc":
        return stats.num_kv_blocks_used / stats.num_kv_blocks if stats.num_kv_blocks else 0.0
    if name.startswith("spec_decode_"):  # engines do not speculate yet, and dashboards expect the metrics
        return 0.0
    value: float = getattr(stats, _ATTRIBUTES.get(name, name))
    return value


def _families(declared: Declared, values: Mapping[str, float]) -> Iterator[Metric]:
    for prefix in declared.prefixes:
        family = declared.family(prefix)
        for model_name, value in values.items():
            add(family, (model_name,), value)
        yield family
