#!/usr/bin/env python3
"""Where the time of an offline run goes: the steps of the offline workload of `penstock bench gpu`, by kind.

    python -m bench.gpu_offline FOLDER [--max-num-batched-tokens 8192] [--rounds 2]

FOLDER needs nothing but a config.json: weights are random. A step has decodes alone, or tokens of prompts beside
them. The figures are those of the last round; the first one captures graphs. "GPU" is the time of a step's work on
the device, and "gap" what the host adds to it between one result and the next.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.bench.gpu import OFFLINE_WORKLOAD
from penstock.bench.load import Prompt, measure_offline
from penstock.cli.bench_gpu import read_vocabulary
from penstock.core.clock import Clock, SystemClock
from penstock.core.engine_config import EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.plan import StepPlan, StepResult
from penstock.core.request import SamplingParams
from penstock.engine.loop import Executor
from penstock.engine.offline import OfflineEngine

DECODES_EACH = 32  # kinds of steps differ by so many decodes


@dataclass(frozen=True, slots=True)
class Step:
    num_decodes: int
    num_prompt_tokens: int
    gpu_s: float
    done_s: float  # when the host had the result

    @property
    def kind(self) -> str:
        first = (max(self.num_decodes, 1) - 1) // DECODES_EACH * DECODES_EACH
        return f"{'prompts and ' if self.num_prompt_tokens else ''}{first + 1}–{first + DECODES_EACH} decodes"


class NotedSteps:
    """An executor that notes the steps of another one."""

    def __init__(self, executor: Executor, clock: Clock) -> None:
        self._executor = executor
        self._clock = clock
        self._plans: dict[int, StepPlan] = {}
        self.steps: list[Step] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, plan: StepPlan) -> Any:
        self._plans[plan.step_id] = plan
        return self._executor.submit(plan)

    def collect(self) -> StepResult:
        result = self._executor.collect()
        chunks = self._plans.pop(result.step_id).chunks
        decodes = sum(chunk.num_tokens == 1 for chunk in chunks)
        prompts = sum(chunk.num_tokens for chunk in chunks) - decodes
        self.steps.append(Step(decodes, prompts, result.elapsed_s, self._clock.now()))
        return result


def table(steps: list[Step], began_s: float) -> Iterable[tuple[str, ...]]:
    """The steps of each kind, in the order in which kinds occur."""
    yield "steps with", "steps", "decodes", "prompt tokens", "GPU, s", "ms per step", "gap, s"
    befores = [began_s, *(step.done_s for step in steps)]
    gaps = {id(step): step.done_s - before - step.gpu_s for step, before in zip(steps, befores, strict=False)}
    for kind in dict.fromkeys(step.kind for step in steps):
        own = [step for step in steps if step.kind == kind]
        gpu_s = sum(step.gpu_s for step in own)
        decodes, tokens = sum(step.num_decodes for step in own), sum(step.num_prompt_tokens for step in own)
        gap_s = sum(gaps[id(step)] for step in own)
        figures = f"{gpu_s:.2f}", f"{gpu_s / len(own) * 1000:.2f}", f"{gap_s:.2f}"
        yield kind, f"{len(own):,}", f"{decodes:,}", f"{tokens:,}", *figures


def run(config: EngineConfig, folder: Path, rounds: list[list[Prompt]]) -> list[str]:
    """Return the lines of the last round."""
    clock = SystemClock()
    engine = OfflineEngine(config, folder)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    noted = NotedSteps(engine.loop.executor, clock)
    engine.loop.executor = noted
    lines: list[str] = []
    for prompts in rounds:
        noted.steps.clear()
        began_s = clock.now()
        summary = measure_offline(
            engine.card.name,
            prompts,
            0.6,
            lambda given, sampling: [len(each.token_ids) for each in engine.generate(given, sampling)],
            clock,
        )
        lines = [f"{summary.output_tokens_per_s:,.0f} output tokens/s in {len(noted.steps):,} steps"]
        lines += ["| " + " | ".join(cells) + " |" for cells in table(noted.steps, began_s)]
        lines.insert(2, "|" + "---|" * 7)
    engine.close()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    config = EngineConfig(
        model=ModelConfig(model=str(arguments.folder), load_format="random", max_model_len=4096),
        # Random weights repeat themselves, so drafts would be accepted more often than those of a real model.
        scheduler=SchedulerConfig(
            max_num_batched_tokens=arguments.max_num_batched_tokens, itl_target_ms=None, max_draft_tokens=0
        ),
    )
    workload = replace(OFFLINE_WORKLOAD, vocabulary=read_vocabulary(arguments.folder))
    rounds = [replace(workload, seed=seed).prompts() for seed in reversed(range(arguments.rounds))]
    print("\n".join(run(config, arguments.folder, rounds)))


if __name__ == "__main__":
    main()
