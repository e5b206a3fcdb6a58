"""How long `plan` and `commit` take: `python bench/scheduler.py`. No model, only the scheduler's own time.

Prints the median microseconds per call, by number of running decodes, pipeline depth and queue length.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque

from penstock.core.engine_config import SchedulerConfig
from penstock.core.plan import SampledToken, StepPlan, StepResult
from penstock.core.request import Request, SamplingParams
from penstock.kvcache.cache import KVCache
from penstock.scheduler import Scheduler

BLOCK_SIZE = 16
PROMPT_TOKENS = 512
NUM_TENANTS = 8


def build(num_running: int, num_waiting: int, num_steps: int) -> Scheduler:
    """A scheduler whose requests all decode, and whose queue cannot drain: every seat is taken."""
    blocks_per_request = -(-(PROMPT_TOKENS + num_steps + 8) // BLOCK_SIZE)
    config = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * PROMPT_TOKENS,  # the first step computes every prompt
        max_queue_requests=1_000_000,
        max_queue_tokens=1_000_000_000,
        queue_timeout_s=None,
    )
    scheduler = Scheduler(
        config,
        KVCache(num_running * blocks_per_request),
        max_model_len=PROMPT_TOKENS + num_steps + 8,
        eos_token_ids=frozenset({2}),
    )
    for number in range(num_running + num_waiting):
        scheduler.add(make_request(number, num_steps + 8), now=0.0)
    return scheduler


def make_request(number: int, max_tokens: int) -> Request:
    return Request(
        id=f"request-{number}",
        prompt_token_ids=tuple((number * 7919 + index * 31) % 30_000 + 10 for index in range(PROMPT_TOKENS)),
        sampling=SamplingParams(max_tokens=max_tokens),
        tenant=f"tenant-{number % NUM_TENANTS}",
    )


def execute(plan: StepPlan) -> StepResult:
    sampled = tuple(
        SampledToken(chunk.request_id, 100 + plan.step_id % 1000) for chunk in plan.chunks if chunk.samples
    )
    return StepResult(plan.step_id, sampled, 0.02)


def measure(num_running: int, depth: int, num_waiting: int, num_steps: int) -> tuple[float, float]:
    """Median microseconds of `plan` and of `commit` while all running requests decode."""
    scheduler = build(num_running, num_waiting, num_steps)
    in_flight: deque[StepPlan] = deque()
    plan_us, commit_us = [], []
    now = 0.0
    while len(commit_us) < num_steps // 2:
        now += 0.02
        started = time.perf_counter()
        plan = scheduler.plan(now)
        planned = time.perf_counter()
        if plan is not None:
            in_flight.append(plan)
        if len(in_flight) < depth:
            continue
        plan_to_commit = in_flight.popleft()
        result = execute(plan_to_commit)
        committing = time.perf_counter()
        scheduler.commit(plan_to_commit, result, now)
        if len(plan_to_commit.chunks) == len(result.sampled) == num_running:
            plan_us.append((planned - started) * 1e6)
            commit_us.append((time.perf_counter() - committing) * 1e6)
    return statistics.median(plan_us), statistics.median(commit_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="steps per measurement")
    num_steps = parser.parse_args().steps
    print(f"{'running':>8} {'depth':>6} {'waiting':>8} {'plan µs':>9} {'commit µs':>10} {'sum µs':>8}")
    for num_waiting in (0, 10_000):
        for num_running in (1, 32, 256, 1024):
            for depth in (1, 2):
                plan_us, commit_us = measure(num_running, depth, num_waiting, num_steps)
                print(
                    f"{num_running:>8} {depth:>6} {num_waiting:>8} {plan_us:>9.0f} {commit_us:>10.0f}"
                    f" {plan_us + commit_us:>8.0f}"
                )


if __name__ == "__main__":
    main()
