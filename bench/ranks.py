"""Compares ways to choose the rank of a request with data-parallel attention, in virtual time.

    python bench/ranks.py [--ranks 4] [--requests 500] [--rate 40]

Tenants with a long prefix each send requests to one engine whose ranks have KV of their own. A step lasts as long as
that of its busiest rank. The schedulers are those that serve; times of steps come from the simulator's cost model of
Llama 3.1 8B on an H200, as if each rank were one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from random import Random
from typing import Any
from unittest.mock import patch

from penstock.core.engine_config import SchedulerConfig
from penstock.core.plan import SampledToken, StepPlan, StepResult
from penstock.core.plan_log import LogHeader
from penstock.core.request import Request, SamplingParams
from penstock.scheduler.build import build_scheduler
from penstock.scheduler.rank_choice import ranks_by_cost
from penstock.scheduler.ranks import RankSchedulers
from penstock.simulator.cost import LLAMA_8B_ON_H200, StepWork

NUM_TENANTS = 16
PREFIX_TOKENS = 3_000
Choice = Callable[..., list[int]]


def arrivals(count: int, rate: float, seed: int = 0) -> list[tuple[float, Request]]:
    rng, now, made = Random(seed), 0.0, []
    for index in range(count):
        now += rng.expovariate(rate)
        tenant = min(int(rng.expovariate(0.25)), NUM_TENANTS - 1)  # some send far more than others
        prefix = tuple(range(tenant * 10_000, tenant * 10_000 + PREFIX_TOKENS))
        own = tuple(rng.randrange(1_000_000, 2_000_000) for _ in range(rng.randint(50, 600)))
        sampling = SamplingParams(max_tokens=rng.randint(20, 400))
        made.append((now, Request(id=str(index), prompt_token_ids=prefix + own, sampling=sampling)))
    return made


def choices(num_ranks: int) -> dict[str, Choice]:
    turn = [0]

    def in_turns(*_: Any) -> list[int]:
        turn[0] += 1
        return [(turn[0] + rank) % num_ranks for rank in range(num_ranks)]

    def by_load(num_tokens: int, cached: Sequence[int], *rest: Any) -> list[int]:
        return ranks_by_cost(num_tokens, [0] * num_ranks, *rest)

    def by_prefix(num_tokens: int, cached: Sequence[int], *rest: Any) -> list[int]:
        return sorted(range(num_ranks), key=lambda rank: -cached[rank])

    return {"prefix and load": ranks_by_cost, "load": by_load, "prefix": by_prefix, "in turns": in_turns}


def run(work: list[tuple[float, Request]], num_ranks: int, choice: Choice) -> str:
    config = SchedulerConfig(max_num_seqs=128, max_queue_requests=1 << 20, max_queue_tokens=1 << 40)
    header = LogHeader(
        config=config,
        num_blocks=3_000,
        block_size=16,
        enable_prefix_caching=True,
        max_pinned_fraction=0.5,
        max_model_len=8192,
        eos_token_ids=(),
        num_ranks=num_ranks,
    )
    ranks = build_scheduler(header)
    assert isinstance(ranks, RankSchedulers)
    waiting, now = list(reversed(work)), 0.0
    arrived: dict[str, float] = {}
    first_s: list[float] = []
    busiest = total = 0.0
    with patch("penstock.scheduler.ranks.ranks_by_cost", choice):
        while waiting or ranks.has_work:
            while waiting and waiting[-1][0] <= now:
                at_s, request = waiting.pop()
                arrived[request.id] = at_s
                ranks.add(request, now)
            plan = ranks.plan(now)
            ranks.take_events()
            if plan is None:
                now = waiting[-1][0] if waiting else now + 0.01
                continue
            costs_s = [LLAMA_8B_ON_H200.step_s(StepWork.of(part)) for part in plan.ranks if part is not None]
            busiest, total = busiest + max(costs_s), total + sum(costs_s)
            now += max(costs_s)
            for event in ranks.commit(plan, StepResult(plan.step_id, samples(plan), max(costs_s)), now):
                if event.token_ids and event.request_id in arrived:
                    first_s.append(now - arrived.pop(event.request_id))
    first_s.sort()
    p50, p90 = (1e3 * first_s[int(share * len(first_s))] for share in (0.5, 0.9))
    stats = ranks.stats()
    cached = stats.prefix_cache_hits / stats.prefix_cache_queries
    busy = total / (busiest * num_ranks)
    return f"| {p50:.0f} | {p90:.0f} | {100 * cached:.0f} % | {100 * busy:.0f} % | {now:.1f} |"


def samples(plan: StepPlan) -> tuple[SampledToken, ...]:
    chunks = (chunk for part in plan.ranks if part is not None for chunk in part.chunks)
    return tuple(SampledToken(chunk.request_id, 7) for chunk in chunks if chunk.samples)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rate", type=float, default=40.0, help="requests per second")
    options = parser.parse_args()
    work = arrivals(options.requests, options.rate)
    print("| rank by | TTFT p50 ms | p90 | cached | ranks busy | seconds |\n|---|---|---|---|---|---|")
    for name, choice in choices(options.ranks).items():
        print(f"| {name} {run(work, options.ranks, choice)}", flush=True)


if __name__ == "__main__":
    main()
