"""What is counted for each model. Knows no names of metrics, and nobody who reads them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from penstock.core.messages import EngineStats
from penstock.core.request import FinishReason


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


class ModelMetrics:
    """Of one model, or of an adapter under the name that it is asked for by. Written by output streams as things
    happen."""

    def __init__(self) -> None:
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
        self.stats = EngineStats()  # of the model's engines; an adapter has none of its own

    def observe_stats(self, stats: EngineStats) -> None:
        """Take over the engines' latest figures. Steps that were reported together count with their mean size."""
        if stats is self.stats:
            return
        before, self.stats = self.stats, stats
        num_steps = stats.num_steps - before.num_steps
        if num_steps > 0:
            mean_tokens = (stats.tokens_computed - before.tokens_computed) / num_steps
            self.step_tokens.counts[bisect_left(self.step_tokens.bounds, mean_tokens)] += num_steps
            self.step_tokens.total += mean_tokens * num_steps
