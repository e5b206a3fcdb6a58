"""Predicts how long a step takes, without running it. Knows plans and numbers; no hardware, no clock.

A step costs a constant (reading weights, launching kernels), and time per token (matrix products), per sequence
(records), per context token (reading KV), per pair of query and key (attention over long prompts) and per sample (a
row of logits). A step with samples costs another constant (reading the weights of the output layer). Adding these up
overrates a step in which memory traffic and arithmetic overlap, by at most a factor of two where both take equally
long; fitted coefficients absorb most of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from itertools import combinations
from math import log2
from statistics import median
from typing import Protocol

from penstock.core.errors import UsageError
from penstock.core.plan import StepPlan
from penstock.core.plan_log import CommitCall, PlanCall, SchedulerCall
from penstock.scheduler.counted_plan import CountedPlan

_NUM_COEFFICIENTS = 7
_SINGULAR = 1e-12
_NO_GAIN = 1e-12  # of a step: kinds of work that always come together are told apart by rounding alone
_MIN_RATIOS = 8
_MIN_SPREAD = 100  # observed steps of about one size, for a spread of their own
_FACTORS_PER_DOUBLING = 4  # of the tokens in a step


@dataclass(slots=True, init=False)
class StepWork:
    """The work of a step that determines its duration. The constructor is written out, because those of dataclasses
    stay slow when the simulator is compiled."""

    tokens: int  # computed
    sequences: int
    context_tokens: int  # KV entries read, counted once per sequence
    pairs: int  # of query and key
    samples: int  # rows of logits: the middle of a prompt needs none, and each drafted token another one

    def __init__(
        self, tokens: int, sequences: int, context_tokens: int, pairs: int = 0, samples: int = 0
    ) -> None:
        self.tokens = tokens
        self.sequences = sequences
        self.context_tokens = context_tokens
        self.pairs = pairs
        self.samples = samples

    @property
    def only_decodes(self) -> bool:
        return self.tokens == self.sequences

    @classmethod
    def decodes(cls, sequences: int, context_tokens: int) -> StepWork:
        """Return the work of a step in which each sequence gets one token."""
        return cls(sequences, sequences, context_tokens, context_tokens, sequences)

    @classmethod
    def prompt(cls, num_tokens: int, num_cached: int = 0) -> StepWork:
        """Return the work of a step that computes a prompt, except for the tokens in the cache."""
        computed = num_tokens - num_cached
        return cls(computed, 1, num_tokens, computed * num_cached + computed * (computed + 1) // 2, 1)

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            self.tokens + other.tokens,
            self.sequences + other.sequences,
            self.context_tokens + other.context_tokens,
            self.pairs + other.pairs,
            self.samples + other.samples,
        )

    @classmethod
    def of(cls, plan: StepPlan | CountedPlan) -> StepWork:
        tokens = context_tokens = pairs = sequences = samples = 0
        if isinstance(plan, CountedPlan):
            tokens = sequences = samples = plan.num_decodes
            context_tokens = pairs = plan.num_entries
        for chunk in plan.chunks:
            num_tokens = chunk.num_tokens
            tokens += num_tokens
            context_tokens += chunk.start + num_tokens
            pairs += num_tokens * chunk.start + num_tokens * (num_tokens + 1) // 2
            if chunk.samples:
                samples += 1 + len(chunk.drafts)
        return cls(tokens, sequences + len(plan.chunks), context_tokens, pairs, samples)


class StepCost(Protocol):
    """Predicts how long a step takes."""

    def step_s(self, work: StepWork) -> float: ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Predicts seconds as a constant per step, and a rate for each kind of work."""

    base_s: float
    per_token_s: float
    per_sequence_s: float
    per_context_token_s: float
    per_pair_s: float = 0.0
    per_sample_s: float = 0.0
    sampling_s: float = 0.0  # of a step that samples at all: the weights of the output layer are read

    def step_s(self, work: StepWork) -> float:
        return (
            self.base_s
            + self.per_token_s * work.tokens
            + self.per_sequence_s * work.sequences
            + self.per_context_token_s * work.context_tokens
            + self.per_pair_s * work.pairs
            + self.per_sample_s * work.samples
            + (self.sampling_s if work.samples else 0.0)
        )


@dataclass(frozen=True, slots=True)
class SlowerCost:
    """Multiplies another cost by a factor."""

    cost: StepCost
    factor: float

    def step_s(self, work: StepWork) -> float:
        return self.factor * self.cost.step_s(work)


def llama_8b(device_bytes_per_s: float, device_flops_per_s: float) -> LinearCost:
    """Compute the costs of Llama 3.1 8B in bfloat16 from the data sheet of a device: weights are read once per step,
    KV once per sequence, and each token takes two operations per parameter. `planner.roofline` knows more devices and
    models, and more parts of a step."""
    bytes_per_s, flops_per_s = (
        0.8 * device_bytes_per_s,
        0.6 * device_flops_per_s,
    )  # the shares that programs reach
    kv_bytes_per_token = 2 * 32 * 8 * 128 * 2  # keys and values, layers, KV heads, head size, bytes
    return LinearCost(
        base_s=5e-4
        + 16.06e9 / bytes_per_s,  # the launch of a graph and the host's part that nothing hides; weights
        per_token_s=2.0 * 8.03e9 / flops_per_s,
        per_sequence_s=5e-6,  # sampling, and a row in every list of the host
        per_context_token_s=kv_bytes_per_token / bytes_per_s,
    )


LLAMA_8B_ON_H200 = llama_8b(4.8e12, 989e12)  # 4.7 ms per step, 27 µs per token, 34 ns per KV entry
LLAMA_8B_ON_L40S = llama_8b(864e9, 362e12)


def observations(calls: Iterable[SchedulerCall]) -> Iterator[tuple[StepWork, float]]:
    """Yield the work of each recorded step, and its seconds."""
    planned: dict[int, StepWork] = {}
    for call in calls:
        if isinstance(call, PlanCall) and call.plan is not None:
            planned[call.plan.step_id] = StepWork.of(call.plan)
        elif isinstance(call, CommitCall):
            work = planned.pop(call.result.step_id, None)
            if work is not None and work.tokens and call.result.elapsed_s > 0.0:
                yield work, call.result.elapsed_s


def fit(observed: Iterable[tuple[StepWork, float]]) -> LinearCost:
    """Fit the costs, none of them negative, with the least squared relative error: relative, so that a decode of 5 ms
    counts as much as a prefill of 2 s.

    The best non-negative fit is the best ordinary fit of some subset of the coefficients, the others being zero.
    There are 127 subsets: all are tried. If kinds of work always came together, the first kind gets their costs.
    """
    rows = [[feature / elapsed_s for feature in _features(work)] for work, elapsed_s in observed]
    if not rows:
        raise UsageError(
            "There are no steps to fit a cost model to.", hint="Record a run that serves requests."
        )
    gram = [
        [sum([row[i] * row[j] for row in rows]) for j in range(_NUM_COEFFICIENTS)]
        for i in range(_NUM_COEFFICIENTS)
    ]
    target = [sum([row[i] for row in rows]) for i in range(_NUM_COEFFICIENTS)]
    best: list[float] | None = None
    best_gain = 0.0
    for size in range(1, _NUM_COEFFICIENTS + 1):
        for chosen in combinations(range(_NUM_COEFFICIENTS), size):
            solution = _solve([[gram[i][j] for j in chosen] for i in chosen], [target[i] for i in chosen])
            if solution is None or min(solution) < 0.0:
                continue
            # The squared error is len(rows) - gain for every least-squares solution of a subset.
            gain = sum([value * target[i] for i, value in zip(chosen, solution, strict=True)])
            if best is None or gain > best_gain + _NO_GAIN * len(rows):
                best_gain = gain
                best = [0.0] * _NUM_COEFFICIENTS
                for i, value in zip(chosen, solution, strict=True):
                    best[i] = value
    assert best is not None, "the constant alone always fits"
    return LinearCost(*best)


@dataclass(frozen=True, slots=True)
class CorrectedCost:
    """A linear cost times a factor that depends on the tokens of a step: matrix products are more efficient for some
    numbers of rows than for others."""

    linear: LinearCost
    factors: tuple[
        float, ...
    ]  # at 1, 1.2, 1.4, 1.7, 2, … tokens; between them, by the logarithm of the tokens

    def step_s(self, work: StepWork) -> float:
        place = min(_place(work), len(self.factors) - 1.0)
        low = int(place)
        high = min(low + 1, len(self.factors) - 1)
        factor = self.factors[low] + (place - low) * (self.factors[high] - self.factors[low])
        return factor * self.linear.step_s(work)


def fit_corrected(observed: Iterable[tuple[StepWork, float]]) -> CorrectedCost:
    """Fit linear costs, and then the factors: the median ratio of steps with about this many tokens. Sizes with few
    observations get the factor of the next smaller one."""
    observed = list(observed)
    linear = fit(observed)
    ratios: dict[int, list[float]] = {}
    for work, elapsed_s in observed:
        ratios.setdefault(round(_place(work)), []).append(elapsed_s / linear.step_s(work))
    factors = [1.0]
    for place in range(max(ratios) + 1):
        here = ratios.get(place, [])
        factors.append(median(here) if len(here) >= _MIN_RATIOS else factors[-1])
    return CorrectedCost(linear, tuple(factors[1:]))


@dataclass(frozen=True, slots=True)
class SpreadCost:
    """Another cost times a ratio that differs from step to step: steps with equal work take unequal times, and the
    slow ones make the high percentiles. The work and a seed select the ratio, so that the same seed gives the same
    figures."""

    cost: StepCost
    decode_ratios: tuple[float, ...]  # of observed steps to the cost; of steps that only decode
    other_ratios: tuple[float, ...]
    of_size: dict[tuple[bool, int], tuple[float, ...]]  # those of one kind, where enough were observed
    seed: int = 0

    def step_s(self, work: StepWork) -> float:
        ratios = self.of_size.get(_kind(work))
        if ratios is None:
            ratios = self.decode_ratios if work.only_decodes else self.other_ratios
        number = hash((work.tokens, work.sequences, work.context_tokens, work.pairs, self.seed))
        return ratios[number % len(ratios)] * self.cost.step_s(work)


def with_spread(cost: StepCost, observed: Iterable[tuple[StepWork, float]]) -> SpreadCost:
    """Return a cost whose steps are spread around `cost` as the observed steps of about the same size are. Their mean
    is then right, too."""
    kinds: dict[tuple[bool, int], list[float]] = {}
    for work, elapsed_s in observed:
        kinds.setdefault(_kind(work), []).append(elapsed_s / cost.step_s(work))
    decodes = [ratio for kind, ratios in kinds.items() if kind[0] for ratio in ratios]
    others = [ratio for kind, ratios in kinds.items() if not kind[0] for ratio in ratios]
    of_size = {kind: tuple(ratios) for kind, ratios in kinds.items() if len(ratios) >= _MIN_SPREAD}
    return SpreadCost(cost, tuple(decodes or others or (1.0,)), tuple(others or decodes or (1.0,)), of_size)


def _kind(work: StepWork) -> tuple[bool, int]:
    """Return whether a step only decodes, and its tokens rounded up to a power of two."""
    return work.only_decodes, (work.tokens - 1).bit_length()


def _place(work: StepWork) -> float:
    return _FACTORS_PER_DOUBLING * log2(max(1, work.tokens))


def mean_relative_error(cost: StepCost, observed: Iterable[tuple[StepWork, float]]) -> float:
    """Return the mean error of predictions, as a share of the observations."""
    errors = [abs(cost.step_s(work) / elapsed_s - 1.0) for work, elapsed_s in observed]
    return sum(errors) / len(errors) if errors else 0.0


def _features(work: StepWork) -> tuple[float, ...]:
    return 1.0, *map(float, astuple(work)), 1.0 if work.samples else 0.0


def _solve(matrix: list[list[float]], target: list[float]) -> list[float] | None:
    """Solve a symmetric positive system by Gauss-Jordan elimination, scaled to a unit diagonal; None if singular."""
    size = len(target)
    scales = [matrix[i][i] ** 0.5 for i in range(size)]
    if min(scales) == 0.0:
        return None
    rows = [
        [matrix[i][j] / (scales[i] * scales[j]) for j in range(size)] + [target[i] / scales[i]]
        for i in range(size)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        if abs(rows[pivot][column]) < _SINGULAR:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for i in range(size):
            if i != column:
                factor = rows[i][column] / rows[column][column]
                rows[i] = [value - factor * above for value, above in zip(rows[i], rows[column], strict=True)]
    return [rows[i][size] / rows[i][i] / scales[i] for i in range(size)]
