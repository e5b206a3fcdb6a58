"""Workloads: random token-id prompts of exact lengths, and their times of arrival.

Everything follows from a seed, so that two servers get the very same requests. Knows no server and no clock.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class IntRange:
    """A range of whole numbers, both ends included, from which lengths are drawn uniformly."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, *, minimum: int = 1) -> IntRange:
        """Read `128` or `100:1024`."""
        low, colon, high = text.partition(":")
        try:
            chosen = cls(int(low), int(high if colon else low))
        except ValueError:
            raise ConfigError(
                f"'{text}' is neither a whole number nor a range.", hint="Write 128, or 100:1024."
            ) from None
        if not minimum <= chosen.low <= chosen.high:
            raise ConfigError(
                f"The range {text} must begin at {minimum} or more and not end before it begins."
            )
        return chosen

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}–{self.high}"


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A fixed number of clients, each of which sends its next request when its last one is answered."""

    concurrency: int

    def __str__(self) -> str:
        return f"{self.concurrency} stream{'s' if self.concurrency != 1 else ''}"


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """Requests that arrive on their own schedule, whatever the server does."""

    requests_per_s: float

    def __str__(self) -> str:
        return f"{self.requests_per_s:g} requests/s"


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    arrivals: ClosedLoop | PoissonArrivals
    num_requests: int
    input_len: IntRange = IntRange(128, 128)  # tokens of each prompt, without the shared prefix
    output_len: IntRange = IntRange(64, 64)
    shared_prefix_len: int = 0  # tokens that all prompts begin with
    vocabulary: IntRange = IntRange(1000, 39_999)  # token ids to draw from; low ids are often control tokens
    seed: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)  # further ones of every request

    def __str__(self) -> str:
        shared = f"{self.shared_prefix_len:,} shared + " if self.shared_prefix_len else ""
        return f"{self.arrivals}, {shared}{self.input_len} in, {self.output_len} out"

    def prompts(self) -> list[Prompt]:
        rng = random.Random(self.seed)
        shared = self._tokens(rng, self.shared_prefix_len)
        return [
            Prompt(shared + self._tokens(rng, self.input_len.draw(rng)), self.output_len.draw(rng))
            for _ in range(self.num_requests)
        ]

    def arrival_times_s(self) -> list[float] | None:
        """Return the seconds from the start at which each request is sent, or None for a closed loop."""
        if not isinstance(self.arrivals, PoissonArrivals):
            return None
        rng = random.Random(f"arrivals {self.seed}")
        times, now = [], 0.0
        for _ in range(self.num_requests):
            times.append(now)
            now += rng.expovariate(self.arrivals.requests_per_s)
        return times

    def warm_up(self, num_requests: int) -> Workload:
        """Return requests of the same shape with other tokens and another shared prefix."""
        streams = self.arrivals.concurrency if isinstance(self.arrivals, ClosedLoop) else num_requests
        return replace(
            self,
            arrivals=ClosedLoop(max(1, min(streams, num_requests))),
            num_requests=num_requests,
            seed=self.seed + 1_000_003,
        )

    def _tokens(self, rng: random.Random, count: int) -> tuple[int, ...]:
        low, high = self.vocabulary.low, self.vocabulary.high
        return tuple(rng.randint(low, high) for _ in range(count))


def _streams(count: int, num_requests: int) -> Workload:
    return Workload(arrivals=ClosedLoop(count), num_requests=num_requests)


STANDARD_WORKLOADS: dict[str, Workload] = {
    "streams-1": _streams(1, 8),
    "streams-8": _streams(8, 32),
    "streams-32": _streams(32, 96),
    "shared-prefix": Workload(
        arrivals=ClosedLoop(16),
        num_requests=48,
        shared_prefix_len=1024,
        input_len=IntRange(32, 32),
        output_len=IntRange(32, 32),
    ),
}
