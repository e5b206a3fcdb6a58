"""Turns outcomes into the figures people compare. Knows no scheduler and no heap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from penstock.core.request import FinishReason
from penstock.simulator.outcome import Outcome
from penstock.simulator.replica import SimulatedReplica

_ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)


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


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least this share does not exceed: always one that was observed."""
    return ordered[max(0, ceil(len(ordered) * percent / 100.0) - 1)]


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds, over requests that were answered in full."""

    ttft_s: Summary  # arrival to first token
    itl_s: Summary  # between tokens
    e2e_s: Summary  # arrival to last token
    queue_s: Summary  # arrival to first planned chunk

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Latency:
        answered = [outcome for outcome in outcomes if outcome.finish_reason in _ANSWERED]
        return cls(
            ttft_s=Summary.of(o.token_times_s[0] - o.arrival.time_s for o in answered if o.token_times_s),
            itl_s=Summary.of(
                later - earlier
                for o in answered
                for earlier, later in zip(o.token_times_s, o.token_times_s[1:], strict=False)
            ),
            e2e_s=Summary.of(o.end_s - o.arrival.time_s for o in answered if o.end_s is not None),
            queue_s=Summary.of(o.queue_s for o in answered if o.queue_s is not None),
        )


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    num_requests: int
    num_steps: int
    num_tokens_computed: int
    num_preemptions: int
    busy_share: float  # of the time from start to the end of the last request


@dataclass(frozen=True, slots=True)
class Report:
    duration_s: float
    num_requests: int
    finished: dict[str, int]  # by finish reason
    rejected: dict[str, int]  # by error code
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were reused
    output_tokens: int
    latency: Latency
    latency_by_tier: dict[str, Latency]
    replicas: tuple[ReplicaReport, ...]

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def num_preemptions(self) -> int:
        return sum(replica.num_preemptions for replica in self.replicas)

    def __str__(self) -> str:
        ended = ", ".join(
            f"{count} {name}" for name, count in (*self.finished.items(), *self.rejected.items())
        )
        lines = [
            f"{self.num_requests} requests in {self.duration_s:.1f} s on {len(self.replicas)} replicas: {ended}",
            f"{self.output_tokens_per_s:.0f} output tokens/s, {self.num_preemptions} preemptions, "
            f"{self.cached_tokens / max(1, self.prompt_tokens):.0%} of prompt tokens from the cache",
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
        return "\n".join(lines)


def summarize(outcomes: Sequence[Outcome], replicas: Sequence[SimulatedReplica]) -> Report:
    duration_s = max((outcome.end_s or 0.0 for outcome in outcomes), default=0.0)
    taken = Counter(outcome.replica for outcome in outcomes if outcome.rejection is None)
    return Report(
        duration_s=duration_s,
        num_requests=len(outcomes),
        finished=_count(outcome.finish_reason for outcome in outcomes),
        rejected=_count(outcome.rejection for outcome in outcomes),
        prompt_tokens=sum(len(o.arrival.request.prompt_token_ids) for o in outcomes if o.queue_s is not None),
        cached_tokens=sum(outcome.num_cached_tokens for outcome in outcomes),
        output_tokens=sum(len(outcome.token_ids) for outcome in outcomes),
        latency=Latency.of(outcomes),
        latency_by_tier={
            tier.value: Latency.of([outcome for outcome in outcomes if outcome.arrival.request.tier is tier])
            for tier in sorted({outcome.arrival.request.tier for outcome in outcomes})
        },
        replicas=tuple(
            ReplicaReport(
                num_requests=taken[index],
                num_steps=replica.num_steps,
                num_tokens_computed=replica.num_tokens_computed,
                num_preemptions=replica.scheduler.stats().num_preemptions,
                busy_share=replica.busy_s / duration_s if duration_s else 0.0,
            )
            for index, replica in enumerate(replicas)
        ),
    )


def _count(names: Iterable[str | None]) -> dict[str, int]:
    return dict(sorted(Counter(str(name) for name in names if name is not None).items()))
