"""The workloads of `penstock bench gpu`, and the figures that they give.

Decode: milliseconds per step of a batch, at 512 tokens of context and more. Prefill: milliseconds until prompts of
512 tokens have a first token. Offline: 256 prompts of 100–1024 tokens with answers of 100–1024, all at once. Served:
over HTTP, with streams that come and go. The caller passes the engine and the server in; this module imports neither.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from penstock.bench.load import ClosedLoop, IntRange, Target, Workload, run_load
from penstock.bench.summary import Summary, summarize
from penstock.core.clock import Clock
from penstock.core.plan import TokenEvent
from penstock.core.request import Adapter, Request, SamplingParams

PROMPT_TOKENS = 512
DECODE_STEPS = 64
SETTLING_TOKENS = 8  # tokens of every answer before the timed steps
DECODE_BATCHES = (1, 8, 32, 128, 256)
PREFILL_COUNTS = (1, 256)
OFFLINE_WORKLOAD = Workload(
    arrivals=ClosedLoop(256),
    num_requests=256,
    input_len=IntRange(100, 1024),
    output_len=IntRange(100, 1024),
)
# Six prompts, two at a time, with answers so short that their tokens hardly count.
LONG_PROMPTS = Workload(
    arrivals=ClosedLoop(2),
    num_requests=6,
    input_len=IntRange(16_000, 16_000),
    output_len=IntRange(8, 8),
)
BESIDE_DELAY_S = 0.5  # time for the streams to begin before the long prompts arrive
_THROUGHPUT = "output tokens/s"
BESIDE_LONG_PROMPTS = "32 streams beside 16,000-token prompts"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. `peer` is the same measurement of another server, made in the same run."""

    what: str
    value: float
    peer: float | None = None
    more_is_better: bool = False

    @property
    def ratio(self) -> float | None:
        """Return how many times better the value is than the peer's."""
        if not self.peer or not self.value:
            return None
        return self.value / self.peer if self.more_is_better else self.peer / self.value


class StepLoop(Protocol):
    """The part of an engine's loop that the decode workload drives."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[TokenEvent]: ...


def begin_decoding(
    loop: StepLoop,
    batch: int,
    vocabulary: IntRange,
    seed: int,
    max_tokens: int = DECODE_STEPS + 32,
    adapters: Sequence[Adapter] = (),
) -> list[Request]:
    """Add `batch` requests, with `adapters` in turn, and step until each has its first tokens. All of them may get
    `max_tokens` more."""
    rng = random.Random(seed)
    sampling = SamplingParams(max_tokens=SETTLING_TOKENS + max_tokens, temperature=0.6, ignore_eos=True)
    requests = [
        Request(
            id=f"decode-{seed}-{index}",
            prompt_token_ids=tuple(vocabulary.draw(rng) for _ in range(PROMPT_TOKENS)),
            sampling=sampling,
            adapter=adapters[index % len(adapters)] if adapters else None,
        )
        for index in range(batch)
    ]
    for request in requests:
        loop.add(request)
    counts = dict.fromkeys((request.id for request in requests), 0)
    while min(counts.values()) < SETTLING_TOKENS:
        for event in loop.step():
            counts[event.request_id] += len(event.token_ids)
    return requests


def decode_step_ms(
    loop: StepLoop,
    batch: int,
    vocabulary: IntRange,
    seed: int,
    clock: Clock,
    adapters: Sequence[Adapter] = (),
) -> float:
    requests = begin_decoding(loop, batch, vocabulary, seed, adapters=adapters)
    start = clock.now()
    for _ in range(DECODE_STEPS):
        loop.step()
    elapsed_s = clock.now() - start
    for request in requests:
        loop.abort(request.id)
    while loop.has_work:
        loop.step()
    return elapsed_s / DECODE_STEPS * 1000


def prefill_ms(
    first_tokens: Callable[[Sequence[Sequence[int]]], None],
    count: int,
    vocabulary: IntRange,
    seed: int,
    clock: Clock,
) -> float:
    """Return the milliseconds that `first_tokens` takes to compute one token for each prompt."""
    rng = random.Random(seed)
    prompts = [[vocabulary.draw(rng) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
    start = clock.now()
    first_tokens(prompts)
    return (clock.now() - start) * 1000


def served_workloads(vocabulary: IntRange) -> dict[str, Workload]:
    def streams(count: int, num_requests: int, seed: int) -> Workload:
        return Workload(
            arrivals=ClosedLoop(count),
            num_requests=num_requests,
            input_len=IntRange(512, 512),
            output_len=IntRange(128, 128),
            vocabulary=vocabulary,
            seed=seed,
        )

    return {
        "1 stream": streams(1, 4, 1),
        "32 streams": streams(32, 128, 2),
        "128 streams": streams(128, 512, 3),
        "256 streams": streams(256, 1024, 4),
        "64 streams, 2,048 shared": replace(
            streams(64, 256, 5),
            shared_prefix_len=2048,
            input_len=IntRange(64, 64),
            output_len=IntRange(64, 64),
        ),
        BESIDE_LONG_PROMPTS: replace(
            streams(32, 32, 6), input_len=IntRange(128, 128), output_len=IntRange(512, 512)
        ),
    }


async def measure_served(target: Target, name: str, workload: Workload) -> Summary:
    assert isinstance(workload.arrivals, ClosedLoop)
    # The warm-up has the same shape, because a GPU engine prepares for each batch size when it first occurs.
    await run_load(target, workload.warm_up(2 * workload.arrivals.concurrency))
    if name != BESIDE_LONG_PROMPTS:
        return summarize(target, workload, await run_load(target, workload))
    long_prompts = replace(LONG_PROMPTS, vocabulary=workload.vocabulary)

    async def arrive() -> None:
        await asyncio.sleep(BESIDE_DELAY_S)
        await run_load(target, long_prompts)

    await run_load(target, long_prompts.warm_up(2))
    arriving = asyncio.create_task(arrive())
    try:
        return summarize(target, workload, await run_load(target, workload))
    finally:
        arriving.cancel()


def served_figures(name: str, summary: Summary, peer: Summary | None) -> list[Figure]:
    theirs = _rows(peer) if peer is not None else {}
    return [
        Figure(what=f"{name}: {what}", value=value, peer=theirs.get(what), more_is_better=what == _THROUGHPUT)
        for what, value in _rows(summary).items()
        if value is not None
    ]


def _rows(summary: Summary) -> dict[str, float | None]:
    ttft, itl = summary.ttft_ms, summary.itl_ms
    return {
        _THROUGHPUT: summary.output_tokens_per_s,
        "first token p50, ms": ttft.p50 if ttft else None,
        "between tokens p50, ms": itl.p50 if itl else None,
        "between tokens p99, ms": itl.p99 if itl else None,
    }
