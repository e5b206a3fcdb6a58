"""Requests of many tenants that share prefixes, hold conversations and come in bursts. Knows no replica or router.

`workload` makes independent requests; here they have to do with each other, which is what routing is about. Prefixes
(system prompts, documents, tools) are drawn by Zipf's law: a few are in most requests. A session's next prompt is the
last one, the answer to it and something new. Bursts are siblings: one prefix, all at once. All chance comes from the
generator passed in.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from math import log
from random import Random

from penstock.core.hashing import chain_hashes, root_hash
from penstock.core.request import Request, SamplingParams
from penstock.simulator.workload import Arrival, Lengths, LogNormal

_BLOCK_SIZE = 16
_NUM_START_IDS = 1 << 30
_PREFIX_TOKENS = LogNormal(median=1500, sigma=0.5, maximum=6000)
_PROMPT_TOKENS = LogNormal(median=120, sigma=0.8, maximum=2000)
_OUTPUT_TOKENS = LogNormal(median=40, sigma=0.8, maximum=400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    num_requests: int
    requests_per_s: float
    num_tenants: int = 64
    prefixes_per_tenant: int = 16
    zipf_exponent: float = 1.0  # over all prefixes of all tenants; 0 makes all equally popular
    prefix_tokens: Lengths = _PREFIX_TOKENS
    prompt_tokens: Lengths = _PROMPT_TOKENS  # after prefix or conversation
    output_tokens: Lengths = _OUTPUT_TOKENS
    session_share: float = 0.3  # of arrivals from outside that begin a conversation
    mean_turns: float = 4.0  # of a conversation; above 1
    mean_think_s: float = 10.0  # from one turn to the next
    burst_share: float = 0.02  # of arrivals from outside that bring siblings
    burst_size: int = 16
    max_prompt_tokens: int = 16_000  # a conversation ends before it gets longer
    timeout_s: float | None = None


class _Prompt:
    """Tokens, and the hashes of their full blocks; extended without hashing anything twice."""

    __slots__ = ("hashes", "parent", "tokens")

    def __init__(self, tokens: tuple[int, ...], hashes: tuple[bytes, ...], parent: bytes) -> None:
        self.tokens = tokens
        self.hashes = hashes
        self.parent = parent  # the root of the tenant's chains

    def extended(self, tokens: tuple[int, ...]) -> _Prompt:
        hashed = len(self.hashes) * _BLOCK_SIZE
        all_tokens = self.tokens + tokens
        parent = self.hashes[-1] if self.hashes else self.parent
        return _Prompt(
            all_tokens,
            self.hashes + tuple(chain_hashes(parent, all_tokens[hashed:], _BLOCK_SIZE)),
            self.parent,
        )


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request that will be made, on behalf of whom, and what follows it."""

    tenant: str
    prompt: _Prompt
    session: str | None
    turns_left: int


class _Generator:
    def __init__(self, traffic: Traffic, rng: Random) -> None:
        self._traffic = traffic
        self._rng = rng
        self._numbers = count()
        self._due: list[tuple[float, int, _Turn]] = []  # turns of conversations that go on, by time
        prefixes = [
            (f"tenant-{tenant}", self._prefix(f"tenant-{tenant}"))
            for _ in range(traffic.prefixes_per_tenant)
            for tenant in range(traffic.num_tenants)
        ]
        rng.shuffle(prefixes)
        self._prefixes = prefixes
        self._weights = list(
            accumulate((rank + 1) ** -traffic.zipf_exponent for rank in range(len(prefixes)))
        )

    def arrivals(self) -> Iterator[Arrival]:
        traffic, rng = self._traffic, self._rng
        # Conversations and bursts multiply what comes from outside.
        followers = traffic.session_share * (traffic.mean_turns - 1.0)
        followers += traffic.burst_share * (traffic.burst_size - 1)
        outside_per_s = traffic.requests_per_s / (1.0 + followers)
        next_s = rng.expovariate(outside_per_s)
        for _ in range(traffic.num_requests):
            if self._due and self._due[0][0] <= next_s:
                time_s, _, turn = heapq.heappop(self._due)
            else:
                time_s, turn = next_s, self._first_turn(next_s)
                next_s += rng.expovariate(outside_per_s)
            yield self._arrive(time_s, turn)

    def _first_turn(self, time_s: float) -> _Turn:
        traffic, rng = self._traffic, self._rng
        ((tenant, prefix),) = rng.choices(self._prefixes, cum_weights=self._weights)
        if rng.random() < traffic.burst_share:
            for _ in range(traffic.burst_size - 1):
                self._put(time_s, _Turn(tenant, self._asked(prefix), None, 0))
        if rng.random() >= traffic.session_share:
            return _Turn(tenant, self._asked(prefix), None, 0)
        # Of a geometric distribution: every turn is as likely to be the last one.
        turns_left = int(rng.expovariate(log(traffic.mean_turns / (traffic.mean_turns - 1.0))))
        return _Turn(tenant, self._asked(prefix), f"session-{next(self._numbers)}", turns_left)

    def _arrive(self, time_s: float, turn: _Turn) -> Arrival:
        traffic, rng = self._traffic, self._rng
        tokens = turn.prompt.tokens
        num_output_tokens = traffic.output_tokens.draw(rng)
        arrival = Arrival(
            time_s,
            Request(
                id=f"r{next(self._numbers)}",
                prompt_token_ids=tokens,
                sampling=SamplingParams(max_tokens=num_output_tokens),
                tenant=turn.tenant,
                deadline_s=None if traffic.timeout_s is None else time_s + traffic.timeout_s,
            ),
            num_output_tokens,
            block_hashes=turn.prompt.hashes[: (len(tokens) - 1) // _BLOCK_SIZE],
            session=turn.session,
        )
        if turn.turns_left and len(tokens) < traffic.max_prompt_tokens:
            answer = tuple(arrival.output_token(index) for index in range(num_output_tokens))
            prompt = self._asked(turn.prompt.extended(answer))
            then_s = time_s + rng.expovariate(1.0 / traffic.mean_think_s)
            self._put(then_s, _Turn(turn.tenant, prompt, turn.session, turn.turns_left - 1))
        return arrival

    def _put(self, time_s: float, turn: _Turn) -> None:
        heapq.heappush(self._due, (time_s, next(self._numbers), turn))

    def _asked(self, prompt: _Prompt) -> _Prompt:
        return prompt.extended(self._tokens(self._traffic.prompt_tokens.draw(self._rng)))

    def _prefix(self, tenant: str) -> _Prompt:
        empty = _Prompt((), (), root_hash(tenant))
        return empty.extended(self._tokens(self._traffic.prefix_tokens.draw(self._rng)))

    def _tokens(self, count: int) -> tuple[int, ...]:
        start = self._rng.randrange(1, _NUM_START_IDS)
        return tuple(range(start, start + count))


def generate_traffic(traffic: Traffic, rng: Random) -> Iterator[Arrival]:
    """Arrivals in order of time. A conversation goes on whether or not its last turn was answered by then."""
    return _Generator(traffic, rng).arrivals()
