"""How long `plan` and `commit` take, and how full KV blocks are: `python bench/scheduler.py`. No model, only the
scheduler's own time.

Prints the median microseconds per call, by number of running decodes, pipeline depth, queue length, and tokens
drafted for each request, of which half are accepted. Then the share of KV slots that hold nothing while requests of
100 to 156 tokens get 32 to 96 more: of the slots that they hold, and of all slots in the blocks that are in use, with
whole last blocks and with halves.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque

from penstock.core.engine_config import SchedulerConfig
from penstock.core.plan import Draft, SampledToken, StepPlan, StepResult
from penstock.core.request import Request, SamplingParams
from penstock.kvcache.cache import KVCache
from penstock.scheduler import Scheduler

BLOCK_SIZE = 16
PROMPT_TOKENS = 512
NUM_TENANTS = 8


def build(num_running: int, num_waiting: int, num_steps: int, num_drafts: int) -> Scheduler:
    """A scheduler whose requests all decode, and whose queue cannot drain: every seat is taken."""
    most_tokens = num_steps * (1 + num_drafts) + 8
    blocks_per_request = -(-(PROMPT_TOKENS + most_tokens) // BLOCK_SIZE)
    config = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * PROMPT_TOKENS,  # the first step computes every prompt
        max_queue_requests=1_000_000,
        max_queue_tokens=1_000_000_000,
        queue_timeout_s=None,
        max_draft_tokens=num_drafts,
    )
    scheduler = Scheduler(
        config,
        KVCache(num_running * blocks_per_request),
        max_model_len=PROMPT_TOKENS + most_tokens,
        eos_token_ids=frozenset({2}),
    )
    for number in range(num_running + num_waiting):
        scheduler.add(make_request(number, most_tokens), now=0.0)
    return scheduler


def make_request(number: int, max_tokens: int) -> Request:
    return Request(
        id=f"request-{number}",
        prompt_token_ids=tuple((number * 7919 + index * 31) % 30_000 + 10 for index in range(PROMPT_TOKENS)),
        sampling=SamplingParams(max_tokens=max_tokens),
        tenant=f"tenant-{number % NUM_TENANTS}",
    )


def execute(plan: StepPlan) -> StepResult:
    """Half of the drafts are right. A drafted token costs a hundredth of a step."""
    token_id = 100 + plan.step_id % 1000
    sampled = tuple(
        SampledToken(chunk.request_id, token_id, accepted=chunk.drafts[: len(chunk.drafts) // 2])
        for chunk in plan.chunks
        if chunk.samples
    )
    num_drafted = sum(len(chunk.drafts) for chunk in plan.chunks)
    return StepResult(plan.step_id, sampled, 0.02 + 0.0002 * num_drafted / len(plan.chunks))


def measure(
    num_running: int, depth: int, num_waiting: int, num_steps: int, num_drafts: int
) -> tuple[float, float]:
    """Median microseconds of `plan` and of `commit` while all running requests decode."""
    scheduler = build(num_running, num_waiting, num_steps, num_drafts)
    in_flight: deque[StepPlan] = deque()
    plan_us: list[float] = []
    commit_us: list[float] = []
    now = 0.0
    while len(commit_us) < num_steps // 2:
        now += 0.02
        drafts = {
            request_id: Draft((7,) * min(most, num_drafts), "bench")
            for request_id, most in (scheduler.wants_drafts().items() if num_drafts else ())
        }
        started = time.perf_counter()
        plan = scheduler.plan(now, drafts)
        planned = time.perf_counter()
        if plan is not None:
            in_flight.append(plan)
        if plan is not None and len(in_flight) < depth:
            continue
        plan_to_commit = in_flight.popleft()
        result = execute(plan_to_commit)
        committing = time.perf_counter()
        scheduler.commit(plan_to_commit, result, now)
        if len(plan_to_commit.chunks) == len(result.sampled) == num_running:
            plan_us.append((planned - started) * 1e6)
            commit_us.append((time.perf_counter() - committing) * 1e6)
    return statistics.median(plan_us), statistics.median(commit_us)


def measure_waste(num_running: int, *, halves_blocks: bool, num_steps: int) -> tuple[float, float]:
    """Mean shares of slots that hold nothing: of those that requests hold, and of those in active blocks."""
    rng = random.Random(1)
    cache = KVCache(num_running * 20, halves_blocks=halves_blocks)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=num_running),
        cache,
        max_model_len=256,
        eos_token_ids=frozenset(),
    )
    context_lens: dict[str, int] = {}
    of_held, of_active = [], []
    num_added = 0
    for step in range(num_steps):
        now = step * 0.02
        while len(context_lens) < num_running:
            num_added += 1
            prompt = tuple(rng.randrange(30_000) for _ in range(rng.randint(100, 156)))
            sampling = SamplingParams(max_tokens=rng.randint(32, 96), ignore_eos=True)
            scheduler.add(Request(id=f"request-{num_added}", prompt_token_ids=prompt, sampling=sampling), now)
            context_lens[f"request-{num_added}"] = len(prompt)
        plan = scheduler.plan(now)
        assert plan is not None
        context_lens |= {chunk.request_id: chunk.start + chunk.num_tokens for chunk in plan.chunks}
        if step > num_steps // 4 and len(plan.chunks) == num_running:
            of_held.append(scheduler.stats().kv_fragmentation)
            of_active.append(1 - sum(context_lens.values()) / (cache.pool.num_active * BLOCK_SIZE))
        for event in scheduler.commit(plan, execute(plan), now):
            if event.finish_reason is not None:
                del context_lens[event.request_id]
    return statistics.mean(of_held), statistics.mean(of_active)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="steps per measurement")
    num_steps = parser.parse_args().steps
    print(
        f"{'running':>8} {'depth':>6} {'waiting':>8} {'drafts':>7} {'plan µs':>9} {'commit µs':>10} {'sum µs':>8}"
    )
    for num_waiting, num_drafts in ((0, 0), (10_000, 0), (0, 4)):
        for num_running in (1, 32, 256, 1024):
            for depth in (1, 2) if not num_drafts else (1,):
                plan_us, commit_us = measure(num_running, depth, num_waiting, num_steps, num_drafts)
                print(
                    f"{num_running:>8} {depth:>6} {num_waiting:>8} {num_drafts:>7} {plan_us:>9.0f}"
                    f" {commit_us:>10.0f} {plan_us + commit_us:>8.0f}",
                    flush=True,
                )
    print(f"\n{'running':>8} {'last blocks':>12} {'of held':>8} {'of used':>8}")
    for num_running in (1, 8, 32, 256):
        for halves_blocks in (False, True):
            of_held, of_active = measure_waste(num_running, halves_blocks=halves_blocks, num_steps=num_steps)
            name = "halves" if halves_blocks else "whole"
            print(f"{num_running:>8} {name:>12} {of_held:>8.1%} {of_active:>8.1%}")


if __name__ == "__main__":
    main()
