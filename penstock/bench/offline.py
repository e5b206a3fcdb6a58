"""Throughput of an engine without a server, on the workload that small engines publish.

The engine comes in as a function; this room imports none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from penstock.bench.workload import Prompt
from penstock.core.clock import Clock
from penstock.core.errors import PenstockError
from penstock.core.request import SamplingParams

Generate = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], Sequence[int]]
"""Prompts and their settings in; the number of tokens generated for each out."""


class OfflineSummary(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    num_prompts: int
    num_input_tokens: int
    num_output_tokens: int
    duration_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float


def measure_offline(
    model: str, prompts: Sequence[Prompt], temperature: float, generate: Generate, clock: Clock
) -> OfflineSummary:
    """Hand every prompt to `generate` at once and time it. Each answer must have its exact length."""
    sampling = [
        SamplingParams(max_tokens=prompt.max_tokens, temperature=temperature, seed=index, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]
    start = clock.now()
    lengths = generate([prompt.token_ids for prompt in prompts], sampling)
    duration_s = clock.now() - start

    short = sum(length != prompt.max_tokens for length, prompt in zip(lengths, prompts, strict=True))
    if short:
        raise PenstockError(
            f"{short} of {len(prompts)} answers did not have the length asked for, so the figure would be wrong.",
            hint="Prompt and answer together must fit into --max-model-len.",
        )
    num_input = sum(len(prompt.token_ids) for prompt in prompts)
    num_output = sum(lengths)
    return OfflineSummary(
        model=model,
        num_prompts=len(prompts),
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        duration_s=duration_s,
        output_tokens_per_s=num_output / duration_s,
        total_tokens_per_s=(num_input + num_output) / duration_s,
    )
