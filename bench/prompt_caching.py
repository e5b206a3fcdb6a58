#!/usr/bin/env python3
"""Prompt caching on the real engine: a long system prompt with a five-minute breakpoint, asked about four times.

    python bench/prompt_caching.py [MODEL]

Between the calls other prompts take the whole KV cache, which is small on purpose, and may pin so little of it that
part of the system prompt has to go to host memory. Five minutes pass by setting the engine's clock ahead. Prints what
each call reused, and its time to first token.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.cli.console import fetch_model
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.plan import CacheUse
from penstock.core.request import CacheBreakpoint, Request, SamplingParams
from penstock.engine.build import Engine, build_engine

SYSTEM_TOKENS = 2000
QUESTION_TOKENS = 20
TTL_S = 300.0
NUM_KV_BLOCKS = 320
MAX_PINNED_FRACTION = 0.25


class SkippingClock:
    """The system's clock, plus whatever was skipped."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def now(self) -> float:
        return time.monotonic() + self._skipped_s

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    first_token_s: float
    cached_tokens: int
    use: CacheUse
    token_ids: tuple[int, ...]


class Demonstration:
    def __init__(self, model: ModelConfig) -> None:
        config = EngineConfig(
            model=model,
            cache=CacheConfig(num_kv_blocks=NUM_KV_BLOCKS, max_pinned_fraction=MAX_PINNED_FRACTION),
            scheduler=SchedulerConfig(itl_target_ms=None),
        )
        self._clock = SkippingClock()
        self._engine: Engine = build_engine(config, Path(fetch_model(model.model)), clock=self._clock)
        self._random = random.Random(0)
        self._vocab_size = self._engine.ready.model.vocab_size
        self._system = self._tokens(SYSTEM_TOKENS)
        self._question = self._tokens(QUESTION_TOKENS)
        self._num_requests = 0
        self._serve(self._tokens(64))  # warms up what is made on first use

    def run(self) -> list[Call]:
        calls = [self._call("first"), self._call("second")]
        self._take_the_whole_cache()
        calls.append(self._call("under memory pressure, within the TTL"))
        self._clock.skip(TTL_S)
        self._take_the_whole_cache()
        calls.append(self._call("after the TTL"))
        return calls

    @property
    def num_blocks_from_host(self) -> int:
        return self._engine.loop.stats().num_blocks_from_host

    def close(self) -> None:
        self._engine.close()

    def _call(self, name: str) -> Call:
        kept = CacheBreakpoint(len(self._system), TTL_S)
        return self._serve((*self._system, *self._question), name, (kept,), max_tokens=8)

    def _take_the_whole_cache(self) -> None:
        for _ in range(3):
            self._serve(self._tokens(NUM_KV_BLOCKS * 16 // 2))

    def _serve(
        self,
        prompt: tuple[int, ...],
        name: str = "",
        breakpoints: tuple[CacheBreakpoint, ...] = (),
        max_tokens: int = 1,
    ) -> Call:
        self._num_requests += 1
        request = Request(
            id=f"request-{self._num_requests}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            cache_breakpoints=breakpoints,
        )
        started_s = time.perf_counter()
        self._engine.loop.add(request)
        events = []
        first_token_s = 0.0
        while self._engine.loop.has_work:
            events += self._engine.loop.step()
            if events and not first_token_s:
                first_token_s = time.perf_counter() - started_s
        return Call(
            name,
            first_token_s,
            events[0].num_cached_tokens or 0,
            events[0].cache_use or CacheUse(0, ()),
            tuple(token for event in events for token in event.token_ids),
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(100, self._vocab_size - 100) for _ in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description="Shows what a cache breakpoint is worth.")
    parser.add_argument("model", nargs="?", default=ModelConfig().model)
    demonstration = Demonstration(ModelConfig(model=parser.parse_args().model))
    calls = demonstration.run()
    print(f"{'call':<40} {'TTFT ms':>8} {'cached':>7} {'cache read':>11} {'cache write':>12}")
    for call in calls:
        print(
            f"{call.name:<40} {call.first_token_s * 1000:>8.0f} {call.cached_tokens:>7}"
            f" {call.use.read_tokens:>11} {sum(call.use.written_tokens):>12}"
        )
    print(f"{demonstration.num_blocks_from_host} blocks came back from host memory.")
    demonstration.close()


if __name__ == "__main__":
    main()
