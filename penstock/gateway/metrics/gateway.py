"""Counts what passes through a gateway, and writes the counts in the Prometheus text format.

Counting happens once per request and step, on one thread, in plain integers: a scrape, which is rare, does the work
of labels and names. Every metric appears under `penstock_` and under the `vllm:` name that dashboards know. The
metrics of pools and replicas stand here too: the autoscaler's input and decisions, and the figures of each replica.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.cluster.fleet import Fleet
from penstock.cluster.replica import EngineClient
from penstock.core.cluster_view import FleetControl
from penstock.core.messages import EngineStats
from penstock.core.request import FinishReason, Tier
from penstock.dispatch.replicas import ReplicaRecord
from penstock.gateway.metrics.table import (
    ENGINE_METRICS,
    MODEL_METRICS,
    POOL_METRICS,
    REPLICA_METRICS,
    TIER,
    VLLM_PREFIX,
    Counted,
    Declared,
    Figures,
    add,
    metric,
)
from penstock.router import ReplicaState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class GatewayMetrics(Collector):
    """Counts by model, read by `render`."""

    def __init__(self) -> None:
        self._models: dict[str, ModelMetrics] = {}
        self._engine_models: tuple[str, ...] = ()  # those that engines report on
        self._stats: EngineStats | None = None  # of all engines, when they were last looked at
        self.refusals: Counter[tuple[str, str]] = Counter()  # answers without a success, by status and reason
        self._parts: list[Counted] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    @property
    def models(self) -> Mapping[str, ModelMetrics]:
        """Return the counters of every model and adapter that was asked for."""
        return self._models

    @property
    def engine_models(self) -> tuple[str, ...]:
        """Return the models that engines report on."""
        return self._engine_models

    def of(self, model_name: str) -> ModelMetrics:
        found = self._models.get(model_name)
        if found is None:
            found = self._models[model_name] = ModelMetrics()
        return found

    @property
    def mean_answer_tokens(self) -> float:
        """Return the mean number of tokens of an answer; 0 when nothing was answered."""
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

    def register(self, part: Counted) -> None:
        """Add the metrics of another part to the page."""
        self._parts.append(part)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield metric("http_refusals", self.refusals)
        for part in self._parts:
            for name, value in part.figures().items():
                yield metric(name, value)
        stats_of = {name: self.of(name).stats for name in self._engine_models}
        for declared in ENGINE_METRICS:
            yield from _families(
                declared,
                {
                    (model, *labels): value
                    for model, stats in stats_of.items()
                    for labels, value in _engine_values(declared, stats)
                },
            )
        for declared in MODEL_METRICS:
            yield from _families(declared, dict(self._model_values(declared)))

    def _model_values(self, declared: Declared) -> Iterator[tuple[tuple[str, ...], float | Histogram]]:
        for name, model in self._models.items():
            if declared.name == "request_success":
                for reason, count in model.finished.items():
                    yield (name, reason.value), count
            elif TIER in declared.labels:
                for tier, latencies in model.latencies_by_tier.items():
                    yield (name, tier.value), declared.of(latencies)
            else:
                yield (name,), declared.of(model)


def _engine_values(declared: Declared, stats: EngineStats) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the values of a metric, each with the labels that follow the model's name."""
    name = declared.name
    if name == "kv_cache_usage_perc":
        yield (), stats.num_kv_blocks_used / stats.num_kv_blocks if stats.num_kv_blocks else 0.0
    elif name == "spec_decode_num_accepted_tokens_per_pos":
        counts = zip_longest(*(drafter.accepted for drafter in stats.drafters), fillvalue=0)
        for position, at_position in enumerate(counts):
            yield (str(position),), sum(at_position)
    elif name in ("drafter_draft_tokens", "drafter_accepted_tokens"):
        for drafter in stats.drafters:
            by_position = drafter.drafted if name == "drafter_draft_tokens" else drafter.accepted
            for position, count in enumerate(by_position):
                yield (drafter.drafter, str(position)), count
    else:
        yield (), declared.of(stats)


def _families(declared: Declared, values: Mapping[tuple[str, ...], float | Histogram]) -> Iterator[Metric]:
    for prefix in declared.prefixes:
        family = declared.family(prefix)
        if prefix == VLLM_PREFIX and TIER in declared.labels:  # vLLM knows no tiers
            family = declared._replace(labels=declared.labels[:1]).family(prefix)
            values = _of_all_tiers(values)
        for labels, value in values.items():
            if isinstance(value, Histogram):
                family.add_metric(labels, value.cumulative(), value.total)  # type: ignore[attr-defined]
            else:
                add(family, labels, value)
        yield family


def _of_all_tiers(
    histograms: Mapping[tuple[str, ...], float | Histogram],
) -> dict[tuple[str, ...], float | Histogram]:
    by_model: dict[tuple[str, ...], list[Any]] = {}
    for (model, _), histogram in histograms.items():
        by_model.setdefault((model,), []).append(histogram)
    return {labels: added_up(found) for labels, found in by_model.items()}


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

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def mean(self) -> float:
        """Return the mean of the observations; 0 when nothing was observed."""
        return self.total / count if (count := sum(self.counts)) else 0.0

    def cumulative(self) -> list[tuple[str, float]]:
        pairs: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            running += count
            pairs.append((bound, running))
        return pairs


def added_up(histograms: Sequence[Histogram]) -> Histogram:
    """One histogram of the observations of several, which have the same bounds."""
    whole = Histogram(histograms[0].bounds)
    whole.counts = [sum(counts) for counts in zip(*(each.counts for each in histograms), strict=True)]
    whole.total = sum(each.total for each in histograms)
    return whole


class Latencies:
    """Latencies of the requests of one tier and their parts, and counts for the history."""

    # fmt: off
    __slots__ = (
        "decode_s", "end_to_end_s", "first_token_s", "inter_token_s", "num_ended", "num_failed",
        "output_tokens", "prefill_s", "prompt_tokens", "queue_s",
    )
    # fmt: on

    def __init__(self) -> None:
        self.num_ended = self.num_failed = self.prompt_tokens = self.output_tokens = 0
        self.first_token_s = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.inter_token_s = Histogram(INTER_TOKEN_BOUNDS_S)
        self.end_to_end_s = Histogram(REQUEST_BOUNDS_S)
        self.queue_s = Histogram(REQUEST_BOUNDS_S)
        self.prefill_s = Histogram(REQUEST_BOUNDS_S)
        self.decode_s = Histogram(REQUEST_BOUNDS_S)


class ModelMetrics:
    """The counters of one model, or of an adapter under its own name. Output streams write them as things happen."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        # Other tiers come with their first request: three times as many lines for every adapter would be too many.
        self.latencies_by_tier = {Tier.DEFAULT: Latencies()}
        self.request_prompt_tokens = Histogram(REQUEST_TOKENS_BOUNDS)
        self.request_generation_tokens = Histogram(REQUEST_TOKENS_BOUNDS)
        self.step_tokens = Histogram(STEP_TOKENS_BOUNDS)
        self.stats = EngineStats()  # of the model's engines; an adapter has none of its own

    @property
    def first_token_s(self) -> Histogram:
        """Return the times to the first token of all tiers, as they stand now."""
        return added_up([each.first_token_s for each in self.latencies_by_tier.values()])

    @property
    def inter_token_s(self) -> Histogram:
        """Return the times between tokens of all tiers, as they stand now."""
        return added_up([each.inter_token_s for each in self.latencies_by_tier.values()])

    def latencies(self, tier: Tier) -> Latencies:
        found = self.latencies_by_tier.get(tier)
        if found is None:
            found = self.latencies_by_tier[tier] = Latencies()
        return found

    def observe_stats(self, stats: EngineStats) -> None:
        """Take over the engines' latest figures. Steps that were reported together count with their mean size."""
        if stats is self.stats:
            return
        before, self.stats = self.stats, stats
        num_steps = stats.num_steps - before.num_steps
        if num_steps > 0:
            mean_tokens = (stats.tokens_computed - before.tokens_computed) / num_steps
            self.step_tokens.observe(mean_tokens, num_steps)


class PoolMetrics:
    def __init__(self, control: FleetControl) -> None:
        self._control = control

    def figures(self) -> Figures:
        pools = {(pool.model, pool.role): pool for pool in self._control.pools}
        states = {
            (*labels, state): getattr(pool, f"num_{state}")
            for labels, pool in pools.items()
            for state in ("ready", "starting", "draining")
        }
        decisions = {
            (*labels, direction): getattr(pool, f"num_scale_{direction}s")
            for labels, pool in pools.items()
            for direction in ("up", "down")
        }
        others = {
            declared.name: {labels: declared.of(pool) for labels, pool in pools.items()}
            for declared in POOL_METRICS
        }
        return {"replicas": states, "autoscaler_decisions": decisions, **others}


class ReplicaMetrics:
    """`server` tells the replicas of servers apart that each count their own from 1; in a shared fleet, the ids of
    replicas differ already."""

    def __init__(self, fleet: Fleet, server: str | None = None) -> None:
        self._fleet = fleet
        self._prefix = "" if server is None else f"{server}/"

    def figures(self) -> Figures:
        fleet = self._fleet
        values: dict[str, dict[tuple[str, ...], float]] = {}
        for connection in list(fleet.connections.by_id.values()):
            replica = connection.member.replica
            labels = (
                connection.member.spec.model,
                self._prefix + replica.id,
                replica.revision,
                replica.region,
            )
            record = fleet.replicas.get(replica.id)
            if record is not None:
                for name, value in _replica_values(record, connection.client.stats).items():
                    values.setdefault(name, {})[labels] = value
        return {
            **{name: values.get(name, {}) for name in REPLICA_METRICS},
            "routing_decisions": fleet.reasons,
            "failed_attempts": fleet.verdicts,
            "replica_ejections": fleet.dispatcher.table.num_ejections,
            "routed_prompt_tokens": fleet.routed_tokens,
            "matched_prompt_tokens": fleet.matched_tokens,
        }


def _replica_values(record: ReplicaRecord, stats: EngineStats) -> dict[str, float]:
    memory = {
        "replica_gpu_memory_bytes": stats.gpu_memory_bytes,
        "replica_gpu_memory_used_bytes": stats.gpu_memory_used_bytes,
    }
    return (memory if stats.gpu_memory_bytes else {}) | {
        "replica_ready": float(record.state is ReplicaState.READY),
        "replica_requests_running": stats.num_running,
        "replica_requests_waiting": stats.num_waiting,
        "replica_kv_cache_usage_perc": stats.num_kv_blocks_used / stats.num_kv_blocks
        if stats.num_kv_blocks
        else 0.0,
        "replica_prefix_cache_queries": stats.prefix_cache_queries,
        "replica_prefix_cache_hits": stats.prefix_cache_hits,
        "replica_drafts": stats.num_drafts,
        "replica_draft_tokens": stats.num_draft_tokens,
        "replica_accepted_tokens": stats.num_accepted_tokens,
        "replica_requests": record.num_sent,
        "replica_failures": record.num_failed,
        "replica_kv_event_resyncs": record.num_resyncs,
    }
