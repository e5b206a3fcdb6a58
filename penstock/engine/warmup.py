"""Compiles what serving will need before it is needed: every GPU kernel exists in a few variants, by the number of
rows, and the first step that meets a new one would make all its requests wait while it is compiled.

A handful of steps of the real model, over a cache of a single block, meet all of them. They run side by side: each
waits for its own kernels, and all compilers are busy meanwhile. Nothing is read from their results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial

import torch

from penstock.kernels.interface import AttentionBatch, KVStore, Ops, SamplingBatch
from penstock.models.model import Model

LONG_CONTEXT = 1024  # is split over the chip when requests are few
VERY_LONG_CONTEXT = 65_536  # whatever the step, it leaves the chip room to split it
MANY_TOKENS = 2048  # fill the chip ...
SHORT_CHUNK = 256  # ... also in chunks that our own attention is best at


@dataclass(frozen=True, slots=True)
class WarmUpStep:
    """So many requests, each with so many tokens of its own, among others that may have contexts of `span`."""

    num_requests: int
    tokens_each: int
    span: int


# One row, and few in each size that products are padded to, each with one token per request: decodes. The first ones
# leave the chip room to split contexts, the later ones do not.
DECODES = tuple(WarmUpStep(count, 1, LONG_CONTEXT) for count in (1, 2, 8, 32, 64, 128))
# Ends of prompts whose beginnings are cached, and whole prompts.
PREFILLS = (WarmUpStep(4, 10, 10), WarmUpStep(1, 10, VERY_LONG_CONTEXT), WarmUpStep(1, 200, 200))


def warm_up(model: Model, ops: Ops, *, block_size: int, max_rows: int, max_tokens: int) -> None:
    """Returns when everything is compiled that steps of so many requests and tokens at most can meet."""
    kv = ops.allocate_kv(model.num_layers, 1, block_size, model.num_kv_heads, model.head_dim)
    many = min(MANY_TOKENS, max_tokens)
    chunks = max(1, min(many // SHORT_CHUNK, max_rows))
    steps = [*DECODES, *PREFILLS, WarmUpStep(chunks, many // chunks, 4 * many)]
    if model.config.experts is not None:
        # The tiles of experts grow with the step: three times as many tokens, at least, from one size to the next.
        steps += [
            WarmUpStep(1, 400 << doublings, 400 << doublings) for doublings in range(max_tokens.bit_length())
        ]
    steps = [
        step
        for step in steps
        if step.num_requests <= max_rows and step.num_requests * step.tokens_each <= max_tokens
    ]
    tasks = [partial(_run, model, ops, kv, step) for step in steps]
    _run_side_by_side([partial(_sample, ops, model.config.vocab_size), *tasks])


def _run_side_by_side(tasks: Sequence[Callable[[], None]]) -> None:
    from triton import AsyncCompileMode  # only a GPU has kernels to compile

    # In this mode a kernel that several tasks want is compiled once. It is a matter of the context, which threads do
    # not inherit.
    with (
        ThreadPoolExecutor(os.cpu_count()) as compilers,
        AsyncCompileMode(compilers),
        ThreadPoolExecutor(len(tasks)) as threads,
    ):
        for done in [threads.submit(copy_context().run, task) for task in tasks]:
            done.result()


def _run(model: Model, ops: Ops, kv: KVStore, step: WarmUpStep) -> None:
    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=ops.device)

    requests, each = step.num_requests, step.tokens_each
    batch = AttentionBatch(
        positions=int32([0] * requests * each),
        slots=int32([0] * requests * each),
        query_starts=int32(list(range(0, requests * each + 1, each))),
        context_lens=int32([each] * requests),
        block_tables=torch.zeros(
            requests, -(-step.span // kv.block_size), dtype=torch.int32, device=ops.device
        ),
        num_requests=requests,
        max_query_len=each,
        max_context_len=step.span,
        num_decodes=requests if each == 1 else 0,
    )
    with torch.inference_mode():
        hidden = model.forward(int32([0] * requests * each), batch, kv)
        model.logits(hidden[:requests])


def _sample(ops: Ops, vocab_size: int) -> None:
    """One row with a limit: it meets what rows without one do, and more."""

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((1,), value, dtype=dtype, device=ops.device)

    with torch.inference_mode():
        batch = SamplingBatch(
            temperature=column(1.0, torch.float32),
            top_k=column(2, torch.int32),
            top_p=column(0.9, torch.float32),
            min_p=column(0.0, torch.float32),
            seed=column(0, torch.int64),
            position=column(0, torch.int64),
            all_greedy=False,
        )
        ops.sample(torch.zeros(1, vocab_size, device=ops.device), batch)
