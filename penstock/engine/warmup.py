"""Compiles what serving will need before it is needed: every GPU kernel exists in a few variants, by the number of
rows, and the first step that meets a new one would make all its requests wait while it is compiled.

A handful of steps of the real model, over blocks that nobody owns yet, meet all of them. They run in threads, because
compilers do: one step after the other would cost three times as much. Nothing is read from their results.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from penstock.kernels.interface import AttentionBatch, KVStore, Ops, SamplingBatch
from penstock.models.model import Model

MAX_THREADS = 8
LONG_CONTEXT = 1024  # is split over the chip when requests are few


@dataclass(frozen=True, slots=True)
class WarmUpStep:
    """So many requests, each with so many tokens of its own."""

    num_requests: int
    tokens_each: int


# One row, and few in each size that products are padded to, each with one token per request: decodes. The first ones
# leave the chip room to split contexts, the later ones do not.
DECODES = tuple(WarmUpStep(count, 1) for count in (1, 2, 32, 64, 128))
# Ends of prompts whose beginnings are cached, and whole prompts.
PREFILLS = (WarmUpStep(4, 10), WarmUpStep(1, 200))


def warm_up(model: Model, ops: Ops, kv: KVStore, *, max_rows: int, max_tokens: int) -> None:
    """Returns when everything is compiled that steps of so many requests and tokens at most can meet. Writes to
    blocks of `kv`, so it comes before the first request."""
    steps = [*DECODES, *PREFILLS]
    if model.config.experts is not None:
        # The tiles of experts grow with the step: three times as many tokens, at least, from one size to the next.
        steps += [WarmUpStep(1, 400 << doublings) for doublings in range(max_tokens.bit_length())]
    steps = [
        step
        for step in steps
        if step.num_requests <= max_rows and step.num_requests * step.tokens_each <= max_tokens
    ]
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        tasks = [threads.submit(_run, model, ops, kv, step) for step in steps]
        tasks.append(threads.submit(_sample, ops, model.config.vocab_size))
        for task in tasks:
            task.result()


def _run(model: Model, ops: Ops, kv: KVStore, step: WarmUpStep) -> None:
    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=ops.device)

    requests, each = step.num_requests, step.tokens_each
    is_decode = each == 1
    batch = AttentionBatch(
        positions=int32([0] * requests * each),
        slots=int32([0] * requests * each),
        query_starts=int32(list(range(0, requests * each + 1, each))),
        context_lens=int32([each] * requests),
        block_tables=torch.zeros(
            requests, -(-max(LONG_CONTEXT, each) // kv.block_size), dtype=torch.int32, device=ops.device
        ),
        num_requests=requests,
        max_query_len=each,
        max_context_len=LONG_CONTEXT if is_decode else each,
        num_decodes=requests if is_decode else 0,
    )
    with torch.inference_mode():
        hidden = model.forward(int32([0] * requests * each), batch, kv)
        model.logits(hidden[:requests])


def _sample(ops: Ops, vocab_size: int) -> None:
    """One row that may draw anything, then one with a limit."""

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((1,), value, dtype=dtype, device=ops.device)

    with torch.inference_mode():
        logits = torch.zeros(1, vocab_size, device=ops.device)
        for is_whole in (True, False):
            batch = SamplingBatch(
                temperature=column(1.0, torch.float32),
                top_k=column(0 if is_whole else 2, torch.int32),
                top_p=column(1.0 if is_whole else 0.9, torch.float32),
                min_p=column(0.0, torch.float32),
                seed=column(0, torch.int64),
                position=column(0, torch.int64),
                all_greedy=False,
                whole_vocabulary=is_whole,
            )
            ops.sample(logits, batch)
