"""Requests as users would send them: when, how long, on whose behalf. Knows no replica, scheduler or clock.

All chance comes from the generator passed in, so a seed is a workload. Tokens have no meaning here: a prompt is a
shared prefix, if any, and then consecutive ids from a random start, so that no two prompts continue alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol

from penstock.core.request import Request, SamplingParams, Tier

END_TOKEN_ID = 0
_FIRST_TOKEN_ID = 1
_NUM_START_IDS = 1 << 30  # leaves room for any length below the largest 32-bit id


class Lengths(Protocol):
    def draw(self, rng: Random) -> int:
        """A number of tokens, at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    tokens: int

    def draw(self, rng: Random) -> int:
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    low: int
    high: int  # included

    def draw(self, rng: Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Many short ones and a long tail, as prompts and answers of chat services are."""

    median: int
    sigma: float  # of the logarithm: 1.0 puts a sixth of all draws beyond 2.7 medians
    maximum: int

    def draw(self, rng: Random) -> int:
        return max(1, min(self.maximum, round(self.median * rng.lognormvariate(0.0, self.sigma))))


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    weight: float = 1.0  # its part of all requests, in proportion
    tier: Tier = Tier.DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Poisson arrivals from tenants, each with prefixes of its own that its requests share."""

    num_requests: int
    requests_per_s: float
    prompt_tokens: Lengths  # after the shared prefix
    output_tokens: Lengths
    tenants: tuple[Tenant, ...] = (Tenant("default"),)
    prefixes_per_tenant: int = 1
    prefix_tokens: int = 0
    max_tokens: int | None = None  # what clients ask for; None: exactly what the answer will have
    timeout_s: float | None = None  # deadline, counted from arrival
    mean_patience_s: float | None = None  # clients leave after a time with this mean; None: never


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, and what only the simulator knows about it."""

    time_s: float
    request: Request
    num_output_tokens: (
        int  # the simulated model ends its answer here, with END_TOKEN_ID, unless max_tokens does
    )
    departs_s: float | None = None  # when the client loses patience
    block_hashes: tuple[bytes, ...] = ()  # of the prompt, for a router that goes by prefixes
    session: str | None = None
    num_answered: int = (
        0  # tokens of the answer that are in the prompt already: another replica computed them
    )

    def output_token(self, index: int) -> int:
        """What the simulated model says at this position of the answer."""
        index += self.num_answered
        if index + 1 >= self.num_output_tokens:
            return END_TOKEN_ID
        return self.request.prompt_token_ids[0] + index


def generate(workload: Workload, rng: Random) -> Iterator[Arrival]:
    """Arrivals in order of time."""
    prefixes = {
        tenant.name: [_tokens(rng, workload.prefix_tokens) for _ in range(workload.prefixes_per_tenant)]
        for tenant in workload.tenants
    }
    weights = [tenant.weight for tenant in workload.tenants]
    time_s = 0.0
    for number in range(workload.num_requests):
        time_s += rng.expovariate(workload.requests_per_s)
        (tenant,) = rng.choices(workload.tenants, weights)
        prefix = rng.choice(prefixes[tenant.name])
        num_output_tokens = workload.output_tokens.draw(rng)
        request = Request(
            id=f"r{number}",
            prompt_token_ids=prefix + _tokens(rng, workload.prompt_tokens.draw(rng)),
            sampling=SamplingParams(max_tokens=workload.max_tokens or num_output_tokens),
            tenant=tenant.name,
            tier=tenant.tier,
            deadline_s=None if workload.timeout_s is None else time_s + workload.timeout_s,
        )
        patience_s = workload.mean_patience_s
        departs_s = None if patience_s is None else time_s + rng.expovariate(1.0 / patience_s)
        yield Arrival(time_s, request, num_output_tokens, departs_s)


def _tokens(rng: Random, count: int) -> tuple[int, ...]:
    start = rng.randrange(_FIRST_TOKEN_ID, _NUM_START_IDS)
    return tuple(range(start, start + count))
