"""A sample describes one interval of time: counts of requests and tokens, latency histograms, engines.

Samples add up in two directions. Samples of one process that follow each other become one of a longer interval.
Samples of several processes for the same interval become one sample of the server. Counts of the processes are added.
The state of the engines is taken once, because all processes see the same state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
from msgspec.structs import astuple, replace

from penstock.core.messages import EngineStats
from penstock.gateway.metrics.gateway import FIRST_TOKEN_BOUNDS_S, INTER_TOKEN_BOUNDS_S, GatewayMetrics


class Traffic(msgspec.Struct, array_like=True):
    """The traffic of one model and tier. The lists count latencies by the buckets of the histograms."""

    requests: int = 0  # that ended, however they did
    failures: int = 0  # of these, ended by an error
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token: list[int] = []
    inter_token: list[int] = []

    @property
    def is_empty(self) -> bool:
        return not (self.requests or self.prompt_tokens or self.output_tokens)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(_sum, astuple(self), astuple(other)))

    def __sub__(self, earlier: Traffic) -> Traffic:
        return self + Traffic(*map(_negative, astuple(earlier)))


class EngineUse(msgspec.Struct, array_like=True):
    """The state of one model's engines, added up over `looks` looks at them, and what their prefix caches counted."""

    looks: int = 0
    running: float = 0
    waiting: float = 0
    kv_usage: float = 0.0
    cache_queries: int = 0  # prompt tokens
    cache_hits: int = 0

    def __add__(self, other: EngineUse) -> EngineUse:
        return EngineUse(*map(_sum, astuple(self), astuple(other)))

    def mean(self) -> EngineUse:
        """Return the mean over all looks, as one look."""
        looks = max(1, self.looks)
        means = (self.running / looks, self.waiting / looks, self.kv_usage / looks)
        return EngineUse(1, *means, self.cache_queries, self.cache_hits)

    def merged_with(self, other: EngineUse) -> EngineUse:
        """One look at two sets of engines. The fuller KV cache counts."""
        return replace(self + other, looks=1, kv_usage=max(self.kv_usage, other.kv_usage))


class Sample(msgspec.Struct, array_like=True):
    at: int  # Unix seconds: the end of the interval
    seconds: float = 0.0  # that the process watched of it
    traffic: dict[str, dict[str, Traffic]] = {}  # by model, then by tier
    engines: dict[str, EngineUse] = {}  # by model
    refusals: dict[str, int] = {}  # by status and reason, such as "429 rate_limit_exceeded"

    def then(self, later: Sample) -> Sample:
        """Join the next sample of the same process to this one. The result keeps the name of this interval."""
        engines = {
            model: self.engines.get(model, EngineUse()) + later.engines.get(model, EngineUse())
            for model in dict.fromkeys((*self.engines, *later.engines))
        }
        return replace(_joined((self, later), engines), seconds=self.seconds + later.seconds)


def together(samples: Sequence[Sample]) -> Sample:
    """Join the samples of several processes for the same interval. The process that looked most often at the engines
    speaks for them."""
    engines: dict[str, EngineUse] = {}
    for sample in samples:
        for model, use in sample.engines.items():
            if model not in engines or engines[model].looks < use.looks:
                engines[model] = use
    return _joined(samples, engines)


def side_by_side(samples: Sequence[Sample]) -> Sample:
    """Join the samples of several servers for the same interval, each of which has its own engines."""
    engines: dict[str, EngineUse] = {}
    for sample in samples:
        for model, use in sample.engines.items():
            mean = use.mean()
            known = engines.get(model)
            engines[model] = mean if known is None else known.merged_with(mean)
    return _joined(samples, engines)


def _joined(samples: Sequence[Sample], engines: dict[str, EngineUse]) -> Sample:
    seconds = max(sample.seconds for sample in samples)
    refusals = sum((Counter(sample.refusals) for sample in samples), Counter[str]())
    return Sample(samples[0].at, seconds, _joined_traffic(samples), engines, dict(refusals))


def _joined_traffic(samples: Iterable[Sample]) -> dict[str, dict[str, Traffic]]:
    joined: dict[str, dict[str, Traffic]] = {}
    for sample in samples:
        for model, tiers in sample.traffic.items():
            of_model = joined.setdefault(model, {})
            for tier, traffic in tiers.items():
                known = of_model.get(tier)
                of_model[tier] = traffic if known is None else known + traffic
    return joined


def _sum(left: Any, right: Any) -> Any:
    """Return the sum of two counts, or of two lists of counts by bucket, which end with their last count."""
    if not isinstance(left, list):
        return left + right
    return _without_end([one + other for one, other in zip_longest(left, right, fillvalue=0)])


def _negative(figure: Any) -> Any:
    return [-count for count in figure] if isinstance(figure, list) else -figure


def _without_end(counts: Sequence[int]) -> list[int]:
    counts = list(counts)
    while counts and not counts[-1]:
        counts.pop()
    return counts


class Sampler:
    """Reads the counters of a gateway process, and says what was added to them since the last reading."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._traffic = read_traffic(metrics)
        self._refusals = metrics.refusals.copy()
        self._engines = {name: model.stats for name, model in metrics.models.items()}

    def take(self, at: int, seconds: float) -> Sample:
        traffic = read_traffic(self._metrics)
        changes: dict[str, dict[str, Traffic]] = {}
        for (model, tier), counted in traffic.items():
            change = counted - self._traffic.get((model, tier), Traffic())
            if not change.is_empty:
                changes.setdefault(model, {})[tier] = change
        self._traffic = traffic
        engines = {}
        for model in self._metrics.engine_models:
            stats = self._metrics.of(model).stats
            engines[model] = _engine_use(stats, self._engines.get(model))
            self._engines[model] = stats
        refusals = self._metrics.refusals.copy()
        refused = {" ".join(kind): count for kind, count in (refusals - self._refusals).items()}
        self._refusals = refusals
        return Sample(at, seconds, changes, engines, refused)


def read_traffic(metrics: GatewayMetrics) -> dict[tuple[str, str], Traffic]:
    """Return all that was counted since the process began, by model and tier."""
    return {
        (name, tier.value): Traffic(
            of_tier.num_ended,
            of_tier.num_failed,
            of_tier.prompt_tokens,
            of_tier.output_tokens,
            _without_end(of_tier.first_token_s.counts),
            _without_end(of_tier.inter_token_s.counts),
        )
        for name, model in metrics.models.items()
        for tier, of_tier in model.latencies_by_tier.items()
    }


def _engine_use(stats: EngineStats, before: EngineStats | None) -> EngineUse:
    # A replica that ended takes its counts with it: less than before means that nothing is known.
    queries = stats.prefix_cache_queries - (before.prefix_cache_queries if before else 0)
    hits = stats.prefix_cache_hits - (before.prefix_cache_hits if before else 0)
    is_known = queries >= 0 <= hits
    return EngineUse(
        1,
        stats.num_running,
        stats.num_waiting,
        stats.num_kv_blocks_used / stats.num_kv_blocks if stats.num_kv_blocks else 0.0,
        queries if is_known else 0,
        hits if is_known else 0,
    )


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Estimate a quantile from a histogram: the values of a bucket are taken to lie evenly between its bounds. None
    without values. A value above every bound counts as the last bound."""
    total = sum(counts)
    if not total:
        return None
    wanted, below = share * total, 0
    for index, count in enumerate(counts):
        if count and below + count >= wanted:
            if index >= len(bounds):
                return bounds[-1]
            low = bounds[index - 1] if index else 0.0
            return low + (bounds[index] - low) * (wanted - below) / count
        below += count
    return bounds[-1]


def first_token_s(traffic: Traffic, share: float) -> float | None:
    return quantile(FIRST_TOKEN_BOUNDS_S, traffic.first_token, share)


def inter_token_s(traffic: Traffic, share: float) -> float | None:
    return quantile(INTER_TOKEN_BOUNDS_S, traffic.inter_token, share)
