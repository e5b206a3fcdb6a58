"""The input of a simulation: when requests arrive, how long they are, which tenants send them, and which faults
happen. Knows no replica or clock.

Tenants share prefixes (system prompts, documents, tools), hold conversations and send bursts. All chance comes from
the generator passed in, so a seed is a workload. Tokens have no meaning here: a prompt is a shared prefix, if any,
and then consecutive ids from a random start, so that no two prompts continue alike.
"""

from __future__ import annotations

import heapq
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from math import log
from random import Random
from typing import NamedTuple, Protocol, TypeAlias

from penstock.core.hashing import chain_hashes, root_hash
from penstock.core.request import Request, SamplingParams, Tier

END_TOKEN_ID = 0
_FIRST_TOKEN_ID = 1
_NUM_START_IDS = 1 << 30  # leaves room for any length below the largest 32-bit id


class Lengths(Protocol):
    def draw(self, rng: Random) -> int:
        """Draw a number of tokens, at least 1."""
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
    """Many short lengths and a long tail, as prompts and answers of chat services have."""

    median: int
    sigma: float  # of the logarithm: 1.0 puts a sixth of all draws beyond 2.7 medians
    maximum: int

    def draw(self, rng: Random) -> int:
        return max(1, min(self.maximum, round(self.median * rng.lognormvariate(0.0, self.sigma))))


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    weight: float = 1.0  # share of requests, relative to the weights of other tenants
    tier: Tier = Tier.DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Poisson arrivals from tenants. Without the settings after `tenants`, requests have nothing in common."""

    num_requests: int
    requests_per_s: float
    prompt_tokens: Lengths  # after the shared prefix or the conversation so far
    output_tokens: Lengths
    tenants: tuple[Tenant, ...] = (Tenant("default"),)
    prefix_tokens: Lengths | None = None  # of prefixes that requests of one tenant share
    prefixes_per_tenant: int = 1
    zipf_exponent: float = 0.0  # how much more popular some prefixes are; 0 makes all equally popular
    session_share: float = 0.0  # of first requests that begin a conversation
    mean_turns: float = 4.0  # of a conversation; above 1
    mean_think_s: float = 10.0  # from one turn to the next
    max_prompt_tokens: int = 16_000  # a conversation ends before its prompt gets longer
    burst_share: float = 0.0  # of first requests that come with others of the same prefix, all at once
    burst_size: int = 16
    max_tokens: int | None = None  # that clients ask for; None: the length of the answer
    timeout_s: float | None = None  # deadline, counted from arrival
    mean_patience_s: float | None = None  # clients leave after a time with this mean; None: never


def shared_prefix_workload(
    num_requests: int, requests_per_s: float, *, num_tenants: int = 64, prefixes_per_tenant: int = 16
) -> Workload:
    """Return a workload of many tenants whose requests have much in common, so that routing matters: a few prefixes
    are in most requests, conversations grow, and bursts share one prefix."""
    return Workload(
        num_requests=num_requests,
        requests_per_s=requests_per_s,
        prompt_tokens=LogNormal(median=120, sigma=0.8, maximum=2000),
        output_tokens=LogNormal(median=40, sigma=0.8, maximum=400),
        tenants=tuple(Tenant(f"tenant-{number}") for number in range(num_tenants)),
        prefix_tokens=LogNormal(median=1500, sigma=0.5, maximum=6000),
        prefixes_per_tenant=prefixes_per_tenant,
        zipf_exponent=1.0,
        session_share=0.3,
        burst_share=0.02,
    )


class Arrival(NamedTuple):
    """One request, with the facts that only the simulator knows."""

    time_s: float
    request: Request
    # The simulated model then ends its answer with END_TOKEN_ID, unless max_tokens does.
    num_output_tokens: int
    departs_s: float | None = None  # when the client loses patience
    block_hashes: tuple[bytes, ...] = ()  # of the full blocks of the prompt, its last token left out

    def output_token(self, index: int) -> int:
        """Return the token of the simulated model at this position of the answer."""
        if index + 1 >= self.num_output_tokens:
            return END_TOKEN_ID
        return self.request.prompt_token_ids[0] + index

    def output_tokens(self, start: int, stop: int) -> list[int]:
        """Return the tokens of the simulated model at these positions of the answer."""
        first, end = self.request.prompt_token_ids[0], self.num_output_tokens - 1
        if stop <= end:
            return list(range(first + start, first + stop))
        return [self.output_token(index) for index in range(start, stop)]


def generate(workload: Workload, rng: Random, *, block_size: int | None = 16) -> Iterator[Arrival]:
    """Yield arrivals in order of time. A conversation continues whether or not its last turn was answered by then.
    With the block size None, prompts are not hashed."""
    return _Generator(workload, rng, block_size).arrivals()


class _Prompt(NamedTuple):
    """Tokens and the hashes of their full blocks. An extended prompt keeps the hashes that it has."""

    tokens: tuple[int, ...]
    hashes: tuple[bytes, ...]
    root: bytes  # of the tenant's chains
    block_size: int | None

    def extended(self, tokens: tuple[int, ...]) -> _Prompt:
        all_tokens = self.tokens + tokens
        if self.block_size is None:
            return self._replace(tokens=all_tokens)
        parent = self.hashes[-1] if self.hashes else self.root
        unhashed = all_tokens[len(self.hashes) * self.block_size :]
        hashes = self.hashes + tuple(chain_hashes(parent, unhashed, self.block_size))
        return _Prompt(all_tokens, hashes, self.root, self.block_size)


class _Turn(NamedTuple):
    """A request that will be made, and how many turns of its conversation follow."""

    tenant: Tenant
    prompt: _Prompt
    session: str = ""
    turns_left: int = 0


class _Generator:
    def __init__(self, workload: Workload, rng: Random, block_size: int | None) -> None:
        self._workload = workload
        self._rng = rng
        self._block_size = block_size
        self._numbers = count()
        self._due: list[tuple[float, int, _Turn]] = []  # heap of turns that are still to come, by time
        self._prefixes = [
            (tenant, self._prefix(tenant))
            for _ in range(workload.prefixes_per_tenant)
            for tenant in workload.tenants
        ]
        rng.shuffle(self._prefixes)
        self._weights = list(
            accumulate(
                tenant.weight * (rank + 1) ** -workload.zipf_exponent
                for rank, (tenant, _) in enumerate(self._prefixes)
            )
        )

    def arrivals(self) -> Iterator[Arrival]:
        workload, rng = self._workload, self._rng
        # Conversations and bursts multiply the first requests.
        followers = workload.session_share * (workload.mean_turns - 1.0)
        followers += workload.burst_share * (workload.burst_size - 1)
        first_per_s = workload.requests_per_s / (1.0 + followers)
        next_s = rng.expovariate(first_per_s)
        for _ in range(workload.num_requests):
            if self._due and self._due[0][0] <= next_s:
                time_s, _, turn = heapq.heappop(self._due)
            else:
                time_s, turn = next_s, self._first_turn(next_s)
                next_s += rng.expovariate(first_per_s)
            yield self._arrive(time_s, turn)

    def _first_turn(self, time_s: float) -> _Turn:
        workload, rng = self._workload, self._rng
        weights = self._weights
        # As `rng.choices` does, and quicker.
        place = bisect(weights, rng.random() * weights[-1], 0, len(weights) - 1)
        tenant, prefix = self._prefixes[place]
        if rng.random() < workload.burst_share:
            for _ in range(workload.burst_size - 1):
                self._put(time_s, _Turn(tenant, self._asked(prefix)))
        if rng.random() >= workload.session_share:
            return _Turn(tenant, self._asked(prefix))
        # A geometric distribution: every turn is as likely to be the last one.
        turns_left = int(rng.expovariate(log(workload.mean_turns / (workload.mean_turns - 1.0))))
        return _Turn(tenant, self._asked(prefix), f"session-{next(self._numbers)}", turns_left)

    def _arrive(self, time_s: float, turn: _Turn) -> Arrival:
        workload, rng = self._workload, self._rng
        tokens = turn.prompt.tokens
        num_output_tokens = workload.output_tokens.draw(rng)
        request = Request(
            id=f"r{next(self._numbers)}",
            prompt_token_ids=tokens,
            sampling=SamplingParams(max_tokens=workload.max_tokens or num_output_tokens),
            tenant=turn.tenant.name,
            tier=turn.tenant.tier,
            deadline_s=None if workload.timeout_s is None else time_s + workload.timeout_s,
            affinity_key=turn.session,
        )
        patience_s = workload.mean_patience_s
        departs_s = None if patience_s is None else time_s + rng.expovariate(1.0 / patience_s)
        hashes = turn.prompt.hashes
        if self._block_size is not None:
            hashes = hashes[: (len(tokens) - 1) // self._block_size]
        arrival = Arrival(time_s, request, num_output_tokens, departs_s, hashes)
        if turn.turns_left and len(tokens) < workload.max_prompt_tokens:
            answer = tuple(arrival.output_token(index) for index in range(num_output_tokens))
            prompt = self._asked(turn.prompt.extended(answer))
            then_s = time_s + rng.expovariate(1.0 / workload.mean_think_s)
            self._put(then_s, _Turn(turn.tenant, prompt, turn.session, turn.turns_left - 1))
        return arrival

    def _put(self, time_s: float, turn: _Turn) -> None:
        heapq.heappush(self._due, (time_s, next(self._numbers), turn))

    def _asked(self, prompt: _Prompt) -> _Prompt:
        return prompt.extended(self._tokens(self._workload.prompt_tokens.draw(self._rng)))

    def _prefix(self, tenant: Tenant) -> _Prompt:
        empty = _Prompt((), (), root_hash(tenant.name), self._block_size)
        lengths = self._workload.prefix_tokens
        return empty if lengths is None else empty.extended(self._tokens(lengths.draw(self._rng)))

    def _tokens(self, count: int) -> tuple[int, ...]:
        start = self._rng.randrange(_FIRST_TOKEN_ID, _NUM_START_IDS)
        if self._block_size is None:  # nothing compares prompts; distinct tokens take ten times as long
            return (start,) * count
        return tuple(range(start, start + count))


@dataclass(frozen=True, slots=True)
class Kill:
    """A replica's process dies. The supervisor notices after a while, and starts another one."""

    at_s: float
    replica: int
    noticed_after_s: float = 0.5
    restarts_after_s: float | None = 10.0  # None: never


@dataclass(frozen=True, slots=True)
class SlowDown:
    """A replica takes longer for everything: a hot accelerator, a noisy neighbour."""

    at_s: float
    replica: int
    factor: float
    until_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoseKVEvents:
    """Batches of KV events are lost, each with this chance, for a while."""

    at_s: float
    until_s: float
    share: float


@dataclass(frozen=True, slots=True)
class RestartGateway:
    """A gateway's process is replaced. The requests of the old process end, and the new process knows no replica."""

    at_s: float
    gateway: int


@dataclass(frozen=True, slots=True)
class StepClock:
    """The clock of a replica jumps ahead, as after a pause of its machine. Only for replicas that do not count
    decodes."""

    at_s: float
    replica: int
    seconds: float


Fault: TypeAlias = Kill | SlowDown | LoseKVEvents | RestartGateway | StepClock
