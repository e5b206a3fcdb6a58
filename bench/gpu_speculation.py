#!/usr/bin/env python3
"""What verified drafts bring on a GPU, with random weights and a drafter of a set acceptance.

    python -m bench.gpu_speculation FOLDER [--acceptance 0.7] [--batch 1 --batch 8 ...] [--max-draft-tokens 8]

FOLDER needs only a config.json. Random weights make text that nothing could guess, so the script replaces one thing:
whether a draft is accepted is drawn by lot, with the set chance for each position. Drafts, verification, sampling, KV
and scheduling are those that serve. Each batch decodes without drafts in one engine, then with drafts in another. The
second table has the GPU's time for a step of one request that verifies so many tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.bench.gpu import begin_decoding
from penstock.bench.workload import IntRange
from penstock.cli.bench_gpu import read_vocabulary
from penstock.core.clock import SystemClock
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.plan import Chunk, Draft, StepPlan, StepResult
from penstock.core.request import Request
from penstock.engine.build import Engine, build_engine
from penstock.engine.grammar_masks import CompiledGrammar
from penstock.engine.loop import EngineLoop, Executor

MAX_MODEL_LEN = 4096
NEW_TOKENS = 128  # of every answer on average, timed


class RandomDrafter:
    """Drafts any tokens, as many as are wanted; at most `limit` for each request, if one is set."""

    def __init__(self, vocabulary: IntRange) -> None:
        self._vocabulary = vocabulary
        self._rng = random.Random(0)
        self.limit: int | None = None

    def add(self, request: Request) -> None: ...
    def append(self, request_id: str, token_ids: tuple[int, ...]) -> None: ...
    def remove(self, request_id: str) -> None: ...

    def propose(self, wanted: Mapping[str, int]) -> dict[str, Draft]:
        drafts = {}
        for request_id, most in wanted.items():
            count = most if self.limit is None else min(most, self.limit)
            drafts[request_id] = Draft(
                tuple(self._vocabulary.draw(self._rng) for _ in range(count)), "random"
            )
        return drafts


class SetAcceptance:
    """An executor whose drafts are accepted by lot."""

    def __init__(self, executor: Executor, acceptance: float) -> None:
        self._executor = executor
        self.acceptance = acceptance
        self._rng = random.Random(1)
        self._plans: deque[StepPlan] = deque()

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        self._executor.add(request, grammar)

    def append(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        self._executor.append(request_id, token_ids)

    def remove(self, request_id: str) -> None:
        self._executor.remove(request_id)

    def submit(self, plan: StepPlan) -> tuple[Chunk, ...]:
        self._plans.append(plan)
        return self._executor.submit(plan)

    def collect(self) -> StepResult:
        drafts = {chunk.request_id: chunk.drafts for chunk in self._plans.popleft().chunks if chunk.drafts}
        result = self._executor.collect()
        if not drafts:
            return result
        sampled = tuple(
            msgspec.structs.replace(token, accepted=self._accepted(drafts.get(token.request_id, ())))
            for token in result.sampled
        )
        return msgspec.structs.replace(result, sampled=sampled)

    def _accepted(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        count = 0
        while count < len(drafts) and self._rng.random() < self.acceptance:
            count += 1
        return drafts[:count]


@dataclass(frozen=True, slots=True)
class Measured:
    tokens_per_s: float
    tokens_per_step: float  # of each request
    step_ms: float
    gpu_ms: float  # of that on the GPU


def build(folder: Path, max_draft_tokens: int, acceptance: float) -> Engine:
    config = EngineConfig(
        model=ModelConfig(model=str(folder), load_format="random", max_model_len=MAX_MODEL_LEN),
        cache=CacheConfig(kv_cache_memory="24GiB"),  # two engines share the GPU
        scheduler=SchedulerConfig(
            max_num_batched_tokens=8192, itl_target_ms=None, max_draft_tokens=max_draft_tokens
        ),
        speculate="lookup" if max_draft_tokens else "off",
    )
    engine = build_engine(config, folder)
    if max_draft_tokens:
        engine.loop.drafter = RandomDrafter(read_vocabulary(folder))
        engine.loop.executor = SetAcceptance(engine.loop.executor, acceptance)
    return engine


def measure(loop: EngineLoop, batch: int, vocabulary: IntRange, seed: int) -> Measured:
    """Decode a batch until every request has NEW_TOKENS more tokens on average."""
    clock = SystemClock()
    requests = begin_decoding(loop, batch, vocabulary, seed, 3 * NEW_TOKENS)
    num_tokens, steps_ms, gpu_ms = 0, [], []
    began_s = before_s = clock.now()
    while num_tokens < batch * NEW_TOKENS:
        num_tokens += sum(len(event.token_ids) for event in loop.step())
        now = clock.now()
        steps_ms.append((now - before_s) * 1000)
        gpu_ms.append(loop.step_s * 1000)
        before_s = now
    elapsed_s = clock.now() - began_s
    for request in requests:
        loop.abort(request.id)
    while loop.has_work:
        loop.step()
    return Measured(
        num_tokens / elapsed_s,
        num_tokens / batch / len(steps_ms),
        statistics.median(steps_ms),
        statistics.median(gpu_ms),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--max-draft-tokens", type=int, default=8)
    arguments = parser.parse_args()
    folder, batches = arguments.folder, arguments.batch or [1, 8, 32, 64, 128, 256]
    vocabulary = read_vocabulary(folder)
    plain_engine = build(folder, 0, 0.0)
    plain = {}
    for batch in batches:
        measure(plain_engine.loop, batch, vocabulary, 2 * batch)
        plain[batch] = measure(plain_engine.loop, batch, vocabulary, 2 * batch + 1)
    engine = build(folder, arguments.max_draft_tokens, arguments.acceptance)
    print(f"{folder.name}, acceptance {arguments.acceptance:g} for each position")
    print("| batch | tokens/s without | with drafts | ratio | tokens per step | step, ms, without | with |")
    print("|---|---|---|---|---|---|---|")
    for batch in batches:
        for round_ in (1, 2):  # captures graphs of all sizes that drafts lead to
            measure(engine.loop, batch, vocabulary, -round_ * batch)
        ours, without = measure(engine.loop, batch, vocabulary, 2 * batch + 1), plain[batch]
        print(
            f"| {batch} | {without.tokens_per_s:,.0f} | {ours.tokens_per_s:,.0f} "
            f"| {ours.tokens_per_s / without.tokens_per_s:.2f} | {ours.tokens_per_step:.2f} "
            f"| {without.step_ms:.2f} | {ours.step_ms:.2f} |",
            flush=True,
        )
    print_verifications(engine, vocabulary, measure(plain_engine.loop, 1, vocabulary, 0))
    for each in (plain_engine, engine):
        each.close()


def print_verifications(engine: Engine, vocabulary: IntRange, plain: Measured) -> None:
    executor, drafter = engine.loop.executor, engine.loop.drafter
    assert isinstance(executor, SetAcceptance)
    assert isinstance(drafter, RandomDrafter)
    executor.acceptance = 1.0  # the scheduler then takes every draft
    print("\n| tokens verified | GPU ms | to a plain step |\n|---|---|---|")
    print(f"| none | {plain.gpu_ms:.2f} | 1.00 |")
    for num_tokens in (2, 4, 8):
        drafter.limit = num_tokens - 1
        for round_ in range(3):
            found = measure(engine.loop, 1, vocabulary, -1000 - 10 * num_tokens - round_)
        print(f"| {num_tokens} | {found.gpu_ms:.2f} | {found.gpu_ms / plain.gpu_ms:.2f} |")


if __name__ == "__main__":
    main()
