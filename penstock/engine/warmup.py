"""Compiles GPU kernels before serving. Every kernel has a few variants, by the number of rows. Without a warm-up, the
first step that needs a new variant would make its requests wait for the compilation.

A handful of steps of the real model, over a cache of a single block, need all variants. They launch no kernel:
kernels are only collected, and then compiled at the same time. Torch computes meanwhile on uninitialised memory,
which loads its libraries; the results are not read.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from penstock.core.clock import Clock
from penstock.engine.device import allocate_kv, with_spare_states
from penstock.kernels.interface import AttentionBatch, KVStore, MovesTokens, Ops, SamplingBatch
from penstock.models.model import Model

logger = logging.getLogger(__name__)

STALL_S = 0.05  # of a step, worth a line in the log
LONG_CONTEXT = 1024  # attention splits it over the chip when requests are few
VERY_LONG_CONTEXT = 65_536  # attention splits it over the chip in any step
MANY_TOKENS = 2048  # fill the chip ...
SHORT_CHUNK = 256  # ... also in chunks that our own attention is best at


@dataclass(frozen=True, slots=True)
class WarmUpStep:
    """A step of this many requests, each with this many new tokens, together with requests with contexts of up to
    `span`."""

    num_requests: int
    tokens_each: int
    span: int
    verifies: bool = False  # drafts, as a decode for each token
    has_trees: bool = False  # of drafts


# The longest compilations come first: prompts, their ends after long cached beginnings, a few tokens over a long
# context, and short prompts.
PREFILLS = (
    WarmUpStep(1, 400, 400),
    WarmUpStep(1, 300, 300),
    WarmUpStep(1, 64, VERY_LONG_CONTEXT),
    WarmUpStep(4, 10, 10),
    WarmUpStep(1, 2, VERY_LONG_CONTEXT),
    WarmUpStep(1, 200, 200),
    WarmUpStep(1, 100, 100),
)
# Decodes: one row, and the padded sizes of products, with one token per request. The first steps split contexts over
# the chip, the later steps do not.
DECODES = (
    WarmUpStep(1, 1, VERY_LONG_CONTEXT),
    *(WarmUpStep(count, 1, LONG_CONTEXT) for count in (1, 2, 8, 32, 64, 128)),
)
# Attention splits contexts of the first step over the chip. The second has too short ones, the third too many.
VERIFICATIONS = tuple(
    WarmUpStep(count, 1, span, verifies=True, has_trees=has_trees)
    for has_trees in (False, True)
    for count, span in ((8, LONG_CONTEXT), (8, 64), (1024, LONG_CONTEXT))
)


def warm_up(
    model: Model,
    ops: Ops,
    *,
    block_size: int,
    max_rows: int,
    max_tokens: int,
    verifies: bool = False,
    verifies_trees: bool = False,
    launch_drafter: Callable[[], None] | None = None,
) -> None:
    """Compile all kernels that steps of at most this many requests and tokens need, also steps that verify drafts if
    the engine `verifies`, and trees of drafts if it `verifies_trees`. `launch_drafter` launches the kernels of a
    drafter."""
    model = model.with_distinct_layers()
    kv = allocate_kv(model, ops, 1, block_size)
    many = min(MANY_TOKENS, max_tokens)
    chunks = max(1, min(many // SHORT_CHUNK, max_rows))
    steps = [WarmUpStep(chunks, many // chunks, 4 * many), *PREFILLS, *DECODES]
    if (experts := model.config.experts) is not None:
        from penstock.kernels.triton.expert_groups import FEW_PAIRS  # only a GPU has kernels to compile

        # The tiles of experts grow with the step: three times as many tokens, at least, from one size to the next.
        sizes = [400 << doublings for doublings in range(max_tokens.bit_length())]
        # The first step whose pairs are counted ahead may have tiles of a size that the next of these no longer has.
        sizes += [FEW_PAIRS[-1] // experts.per_token + 1, max_tokens]
        steps += [WarmUpStep(1, size, size) for size in sizes]
    steps = [
        step
        for step in steps
        if step.num_requests <= max_rows and step.num_requests * step.tokens_each <= max_tokens
    ]
    if verifies:
        steps += [
            step
            for step in VERIFICATIONS
            if step.num_requests <= max_tokens and (verifies_trees or not step.has_trees)
        ]
    with _compiling(ops.device), torch.inference_mode():
        _sample(ops, model.config.vocab_size)
        if verifies_trees and isinstance(kv, MovesTokens):
            nothing = torch.zeros(1, 1, dtype=torch.int64, device=ops.device)
            kv.move_tokens(nothing, nothing)
        for step in steps:
            run_step(model, ops, kv, step)
        if launch_drafter is not None:
            launch_drafter()


def report_compilations(clock: Clock) -> None:
    """Log each kernel that is compiled from now on, for which all requests of the step wait."""
    from triton import knobs  # only a GPU has kernels to compile

    began_s: dict[str, float] = {}

    def begin(*, key: str, is_manual_warmup: bool, **_: Any) -> None:
        if not is_manual_warmup:
            began_s[key] = clock.now()

    def end(*, key: str, repr: str, **_: Any) -> None:
        took_s = clock.now() - began_s.pop(key, clock.now())
        if took_s >= STALL_S:
            name = repr.partition("[")[0]
            logger.warning("%s was compiled while serving: its step waited for %.2f s", name, took_s)

    knobs.runtime.jit_cache_hook = begin
    knobs.runtime.jit_post_compile_hook = end


class _Compilers(ThreadPoolExecutor):
    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        return super().submit(_load, compile_kernel)


def _load(compile_kernel: Callable[[], Any]) -> Any:
    kernel = compile_kernel()
    # Asking for the kernel's launcher builds it, a small C library, and loads the kernel. Otherwise the first launch
    # would.
    _ = kernel.run
    return kernel


@contextmanager
def _compiling(device: torch.device) -> Iterator[None]:
    """Collect the kernels that are launched in this context without running them; compile and load them at its
    end."""
    from triton import AsyncCompileMode, JITFunction  # only a GPU has kernels to compile

    launch = JITFunction.run
    asked_for_all = threading.Event()
    gpu = None
    if device.type == "cuda":  # Threads begin with the first one, whichever this one has chosen.
        gpu = torch.cuda.current_device() if device.index is None else device.index

    def ask(self: Any, *args: Any, **options: Any) -> Any:
        return launch(self, *args, **(options | {"warmup": True}))

    def begin() -> None:
        # Until then, compilers would only compete for the interpreter with the thread that collects kernels.
        asked_for_all.wait()
        if gpu is not None:
            torch.cuda.set_device(gpu)

    with _Compilers(os.cpu_count(), initializer=begin) as compilers, AsyncCompileMode(compilers):
        JITFunction.run = ask
        try:
            yield
        finally:
            JITFunction.run = launch
            asked_for_all.set()


def run_step(model: Model, ops: Ops, kv: KVStore, step: WarmUpStep) -> None:
    """Run a step whose results are not used, over a cache of one block."""
    token_ids, batch = inputs_of(step, ops, kv.block_size)
    hidden = model.forward(token_ids, with_spare_states(batch, model, ops), kv)
    model.logits(hidden[: step.num_requests])


def inputs_of(step: WarmUpStep, ops: Ops, block_size: int) -> tuple[torch.Tensor, AttentionBatch]:
    """Return the tokens of a step, int32 [T], and its batch, over a cache of one block."""

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=ops.device)

    requests, each = step.num_requests, step.tokens_each
    batch = AttentionBatch(
        positions=int32([0] * requests * each),
        slots=int32([0] * requests * each),
        query_starts=int32(list(range(0, requests * each + 1, each))),
        context_lens=int32([each] * requests),
        block_tables=torch.zeros(requests, -(-step.span // block_size), dtype=torch.int32, device=ops.device),
        num_requests=requests,
        max_query_len=each,
        max_context_len=step.span,
        num_decodes=requests if each == 1 else 0,
        neighbours=int32([0] * requests + [1] * requests).view(2, -1) if step.verifies else None,
        ancestors=int32([-1] * requests) if step.has_trees else None,
    )
    return int32([0] * requests * each), batch


def _sample(ops: Ops, vocab_size: int) -> None:
    """Sample one row with a limit, which needs all kernels of rows without one, and more."""

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((1,), value, dtype=dtype, device=ops.device)

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
