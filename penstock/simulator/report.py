"""Computes figures from the outcomes of single requests. Knows no scheduler and no heap."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import sub

from penstock.core.figures import percentile
from penstock.core.objective import (
    Objective,
    ObjectiveSettings,
    Targets,
    TierSums,
    objective_of,
    utilisation_of,
)
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Tier
from penstock.simulator.workload import Arrival

_ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)
_MAX_SAMPLES = 1_000_000


@dataclass(slots=True, init=False)
class Outcome:
    """The outcome of one request. Exactly one of `finish_reason` and `rejection` is set in the end. The constructor
    is written out, because those of dataclasses stay slow when the simulator is compiled."""

    arrival: Arrival
    gateway: int
    replica_id: str | None  # that had the request last
    token_ids: list[int]
    token_times_s: list[float]
    end_s: float | None
    finish_reason: FinishReason | None
    rejection: str | None  # the code of the error that the client got instead
    num_cached_tokens: int
    queue_s: float | None  # from arrival to the first planned chunk; None if nothing was ever planned
    num_failures: int  # attempts that a replica failed
    is_mirrored: bool  # a copy for the candidate of a release, which no client waits for
    earlier_s: Sequence[float]  # when the first tokens of the event came that is delivered now

    def __init__(self, arrival: Arrival, gateway: int, *, is_mirrored: bool = False) -> None:
        self.arrival = arrival
        self.gateway = gateway
        self.replica_id = None
        self.token_ids = []
        self.token_times_s = []
        self.end_s = None
        self.finish_reason = None
        self.rejection = None
        self.num_cached_tokens = 0
        self.queue_s = None
        self.num_failures = 0
        self.is_mirrored = is_mirrored
        self.earlier_s = ()

    def note(self, event: TokenEvent, now: float) -> None:
        self.token_ids += event.token_ids
        self.token_times_s += self.earlier_s
        self.token_times_s += [now] * (len(event.token_ids) - len(self.earlier_s))
        if event.num_cached_tokens is not None:
            self.num_cached_tokens = event.num_cached_tokens
        if event.queue_s is not None:
            self.queue_s = event.queue_s

    @property
    def waits_s(self) -> tuple[float, float] | None:
        """Return the time to the first token and the mean time between tokens; None without a token."""
        times_s = self.token_times_s
        if not times_s:
            return None
        return times_s[0] - self.arrival.time_s, (times_s[-1] - times_s[0]) / max(1, len(times_s) - 1)


@dataclass(frozen=True, slots=True)
class Summary:
    """A distribution in five numbers; all zero when there was nothing to measure."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    maximum: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary:
        ordered = sorted(values)
        if not ordered:
            return cls()
        return cls(
            count=len(ordered),
            mean=sum(ordered) / len(ordered),
            p50=percentile(ordered, 50),
            p90=percentile(ordered, 90),
            p99=percentile(ordered, 99),
            maximum=ordered[-1],
        )


class Samples:
    """Keeps the values of a long run in bounded memory. Up to a million values the summary is exact; of more values,
    every second, fourth, … value is kept for the percentiles."""

    def __init__(self, max_kept: int = _MAX_SAMPLES) -> None:
        self._max_kept = max_kept
        self._kept = array("d")
        self._stride = 1
        self._count = 0
        self._sum = 0.0
        self._maximum = 0.0

    def add(self, value: float) -> None:
        if self._count % self._stride == 0:
            self._kept.append(value)
            if len(self._kept) > self._max_kept:
                self._kept = self._kept[::2]
                self._stride *= 2
        self._count += 1
        self._sum += value
        self._maximum = max(self._maximum, value)

    def extend(self, values: Sequence[float]) -> None:
        """Add values in order. The result is that of `add` for each."""
        if not values:
            return
        begin = -self._count % self._stride  # the place of the next value that is kept
        while begin < len(values):
            kept = values[begin :: self._stride][: self._max_kept + 1 - len(self._kept)]
            self._kept.extend(kept)
            begin += len(kept) * self._stride
            if len(self._kept) > self._max_kept:
                self._kept = self._kept[::2]
                self._stride *= 2
                begin += -(self._count + begin) % self._stride
        self._count += len(values)
        (self._sum,) = deque(accumulate(values, initial=self._sum), maxlen=1)  # as `add`, to the last bit
        self._maximum = max(self._maximum, max(values))

    def summary(self) -> Summary:
        if not self._count:
            return Summary()
        ordered = sorted(self._kept)
        p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
        return Summary(self._count, self._sum / self._count, p50, p90, p99, self._maximum)


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds, over requests that were answered in full."""

    ttft_s: Summary  # arrival to first token
    itl_s: Summary  # between tokens; tokens that come together share the time since the last ones
    tpot_s: Summary  # mean time between tokens of each request that has several
    e2e_s: Summary  # arrival to last token
    queue_s: Summary  # arrival to first planned chunk


class _Times:
    def __init__(self) -> None:
        self.ttft_s, self.itl_s, self.tpot_s, self.e2e_s, self.queue_s = (Samples() for _ in range(5))

    def add(self, outcome: Outcome, itl_s: Sequence[float]) -> None:
        """`itl_s`: the times between the tokens of this answer."""
        arrived_s, times_s = outcome.arrival.time_s, outcome.token_times_s
        assert outcome.end_s is not None
        self.e2e_s.add(outcome.end_s - arrived_s)
        if outcome.queue_s is not None:
            self.queue_s.add(outcome.queue_s)
        if times_s:
            self.ttft_s.add(times_s[0] - arrived_s)
        if len(times_s) > 1:
            self.tpot_s.add((times_s[-1] - times_s[0]) / (len(times_s) - 1))
            self.itl_s.extend(itl_s)

    def latency(self) -> Latency:
        return Latency(
            self.ttft_s.summary(),
            self.itl_s.summary(),
            self.tpot_s.summary(),
            self.e2e_s.summary(),
            self.queue_s.summary(),
        )


def times_between(times_s: Sequence[float]) -> list[float]:
    """Return the times between tokens. Tokens that come together share the time since the last ones before."""
    between = list(map(sub, times_s[1:], times_s))
    if 0.0 not in between:
        return between
    between = []
    last_s = times_s[0]
    for time_s, together in groupby(times_s):
        num_tokens = sum(1 for _ in together)
        if time_s > times_s[0]:
            between += [(time_s - last_s) / num_tokens] * num_tokens
        last_s = time_s
    return between


class Tally:
    """Figures that are added up while a simulation runs, so that outcomes need not be kept."""

    def __init__(self, ttft_window_s: float = 20.0, targets: Targets | None = None) -> None:
        self._targets = targets or Targets()
        self.sums: dict[Tier, TierSums] = {}
        self.num_requests = 0
        self.finished: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.num_retries = 0
        self.last_end_s = 0.0
        self._times = _Times()
        self._times_by_tier: dict[str, _Times] = {}
        self._window_s = ttft_window_s
        self._recent: deque[tuple[float, float]] = deque()  # ends of requests, and their times to first token

    def add(self, outcome: Outcome, now: float) -> None:
        self.num_requests += 1
        self.last_end_s = now
        if outcome.rejection is not None:
            self.rejected[outcome.rejection] += 1
        elif outcome.finish_reason is not None:
            self.finished[outcome.finish_reason.value] += 1
        if outcome.queue_s is not None:
            self.prompt_tokens += len(outcome.arrival.request.prompt_token_ids)
        self.cached_tokens += outcome.num_cached_tokens
        self.output_tokens += len(outcome.token_ids)
        self.num_retries += outcome.num_failures - (
            outcome.rejection is not None and outcome.num_failures > 0
        )
        times = self._times_of(outcome.arrival.request.tier.value)
        if outcome.finish_reason in _ANSWERED:
            itl_s = times_between(outcome.token_times_s)
            times.add(outcome, itl_s)
            if times is not self._times:
                self._times.add(outcome, itl_s)
        if outcome.token_times_s:
            self._recent.append((now, outcome.token_times_s[0] - outcome.arrival.time_s))
        if outcome.finish_reason is not FinishReason.ABORT:  # else the client has left
            self._add_to_sums(outcome)

    def _times_of(self, tier: str) -> _Times:
        """Return the times of a tier. While there is one tier, they are the times of all requests, too."""
        times = self._times_by_tier.get(tier)
        if times is None:
            if len(self._times_by_tier) == 1:
                self._times = deepcopy(self._times)
            times = _Times() if self._times_by_tier else self._times
            self._times_by_tier[tier] = times
        return times

    def _add_to_sums(self, outcome: Outcome) -> None:
        tier, times_s = outcome.arrival.request.tier, outcome.token_times_s
        self.sums.setdefault(tier, TierSums()).add(
            self._targets.of(tier),
            times_s[0] - outcome.arrival.time_s if times_s else None,
            (times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else None,
            is_dropped=outcome.finish_reason not in _ANSWERED,
        )

    def latency(self) -> Latency:
        return self._times.latency()

    def latency_by_tier(self) -> dict[str, Latency]:
        return {tier: times.latency() for tier, times in sorted(self._times_by_tier.items())}

    def recent_ttft_p95_s(self, now: float) -> float | None:
        while self._recent and self._recent[0][0] < now - self._window_s:
            self._recent.popleft()
        return percentile(sorted(ttft_s for _, ttft_s in self._recent), 95) if self._recent else None


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    num_requests: int
    num_steps: int
    num_tokens_computed: int  # prompts as far as they were not cached, and answers
    num_preemptions: int
    busy_share: float  # of the time from start to the end of the last request


@dataclass(frozen=True, slots=True)
class ReleaseChange:
    """A stage of a release, or a step of its canary, that began."""

    at_s: float
    stage: str
    candidate_share: float  # of requests
    reason: str

    def __str__(self) -> str:
        reason = f": {self.reason.replace('_', ' ')}" if self.reason else ""
        return f"{self.at_s:.1f} s {self.stage.replace('_', ' ')}, {self.candidate_share:.0%} of requests{reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    policy: str
    duration_s: float  # from the start to the end of the last request
    num_requests: int
    finished: dict[str, int]  # by finish reason
    rejected: dict[str, int]  # by error code
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were reused
    output_tokens: int
    latency: Latency
    latency_by_tier: dict[str, Latency]
    replicas: tuple[ReplicaReport, ...]  # also those that are gone, in order of starting
    num_retries: int
    num_waits: int  # how often a request waited for a replica that started
    num_resyncs: int  # how often KV events were asked for again
    num_moved_tokens: int  # whose KV went from one replica to another
    num_ejections: int  # how often a replica was left out for being slow
    reasons: dict[str, int]  # of routing decisions
    sizes: tuple[tuple[float, int], ...]  # when the number of serving replicas changed, and to what
    sums: dict[Tier, TierSums]  # what the objective is computed from
    objective: Objective
    release: tuple[ReleaseChange, ...] = ()

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def num_preemptions(self) -> int:
        return sum(replica.num_preemptions for replica in self.replicas)

    @property
    def num_answered(self) -> int:
        return sum(self.finished.get(reason.value, 0) for reason in _ANSWERED)

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def max_over_mean_requests(self) -> float:
        return _max_over_mean([replica.num_requests for replica in self.replicas])

    @property
    def max_over_mean_tokens(self) -> float:
        return _max_over_mean([replica.num_tokens_computed for replica in self.replicas])

    @property
    def mean_busy_share(self) -> float:
        return sum([replica.busy_share for replica in self.replicas]) / max(1, len(self.replicas))

    @property
    def tokens_per_busy_s(self) -> float:
        """Return what a replica computes in a second of its steps."""
        busy_s = sum([replica.busy_share for replica in self.replicas]) * self.duration_s
        return sum(replica.num_tokens_computed for replica in self.replicas) / busy_s if busy_s else 0.0

    def objective_by(
        self, settings: ObjectiveSettings, capacity_tokens_per_s: float | None = None
    ) -> Objective:
        """Compute the objective with other weights or another capacity. The targets stay those of the run."""
        capacity = capacity_tokens_per_s or settings.capacity_tokens_per_s or self.tokens_per_busy_s
        num_tokens = self.prompt_tokens - self.cached_tokens + self.output_tokens
        replica_s = self.duration_s * max(1, len(self.replicas))
        used = utilisation_of(num_tokens / replica_s if replica_s else 0.0, capacity)
        return objective_of(self.sums, settings, used)

    def __str__(self) -> str:
        ended = ", ".join(
            f"{count} {name}" for name, count in (*self.finished.items(), *self.rejected.items())
        )
        lines = [
            f"{self.num_requests} request{'s' if self.num_requests != 1 else ''} in {self.duration_s:.1f} s on "
            f"{len(self.replicas)} replica{'s' if len(self.replicas) != 1 else ''}: {ended}",
            f"{self.output_tokens_per_s:.0f} output tokens/s, {self.num_preemptions} preemptions, "
            f"{self.cached_share:.0%} of prompt tokens from the cache",
            f"{'seconds':<22}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
        ]
        for name, summary in (
            ("time to first token", self.latency.ttft_s),
            ("between tokens", self.latency.itl_s),
            ("end to end", self.latency.e2e_s),
            ("in the queue", self.latency.queue_s),
        ):
            figures = (summary.mean, summary.p50, summary.p90, summary.p99, summary.maximum)
            lines.append(f"{name:<22}" + "".join(f"{figure:>10.4f}" for figure in figures))
        terms = self.objective.overall
        lines.append(
            f"objective {terms.total:.3f}: first token {terms.ttft:.3f}, between tokens {terms.itl:.3f}, "
            f"idle {terms.idle:.3f}, drops {terms.drops:.3f}"
        )
        lines += [f"release at {change}" for change in self.release]
        return "\n".join(lines)


def _max_over_mean(values: Sequence[int]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0
