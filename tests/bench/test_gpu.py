"""The GPU workloads against an engine that counts steps by a clock that each step moves."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from penstock.bench import gpu
from penstock.bench.load import ClosedLoop, IntRange, Workload, find_target
from penstock.core.plan import TokenEvent
from penstock.core.request import Request
from tests.bench.fake_server import FakeServer

VOCABULARY = IntRange(3, 9)


class Clock:
    time_s = 0.0

    def now(self) -> float:
        return self.time_s


class CountingLoop:
    """Every request gets a token in every step, and a step takes a millisecond for each of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.requests: dict[str, Request] = {}
        self.num_tokens: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        assert len(request.prompt_token_ids) == gpu.PROMPT_TOKENS
        self.requests[request.id] = request

    def abort(self, request_id: str) -> None:
        assert self.num_tokens[request_id] < self.requests[request_id].sampling.max_tokens
        del self.requests[request_id]

    def step(self) -> list[TokenEvent]:
        self._clock.time_s += 0.001 * len(self.requests)
        self.num_tokens.update(self.requests.keys())
        return [TokenEvent(request_id, (5,)) for request_id in self.requests]


@pytest.mark.parametrize("batch", [1, 7])
def test_decode_times_steps_of_a_full_batch(batch: int) -> None:
    clock = Clock()
    loop = CountingLoop(clock)
    assert gpu.decode_step_ms(loop, batch, VOCABULARY, 0, clock) == pytest.approx(batch)
    assert not loop.has_work


def test_prefill_times_all_prompts() -> None:
    clock = Clock()
    prompts: list[list[int]] = []

    def first_tokens(given: list[list[int]]) -> None:
        prompts.extend(given)
        clock.time_s += 0.25

    assert gpu.prefill_ms(first_tokens, 3, VOCABULARY, 0, clock) == pytest.approx(250)
    assert [len(prompt) for prompt in prompts] == [gpu.PROMPT_TOKENS] * 3
    assert prompts[0] != prompts[1]


def test_ratios_say_how_many_times_better() -> None:
    assert gpu.Figure(what="ms", value=2.0, peer=5.0).ratio == 2.5
    assert gpu.Figure(what="tok/s", value=50.0, peer=20.0, more_is_better=True).ratio == 2.5
    assert gpu.Figure(what="unknown", value=2.0).ratio is None


@pytest.mark.parametrize("name", ["1 stream", gpu.BESIDE_LONG_PROMPTS])
def test_served_workloads_run_against_a_server(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure() -> list[gpu.Figure]:
        server = FakeServer()
        async with server.running():
            target = await find_target("fake", server.url, None, None)
            workload = Workload(arrivals=ClosedLoop(2), num_requests=4, output_len=IntRange(3, 3))
            summary = await gpu.measure_served(target, name, workload)
            assert summary.num_completed == 4
            return gpu.served_figures(name, summary, summary)

    monkeypatch.setattr(gpu, "BESIDE_DELAY_S", 0.01)
    figures = asyncio.run(measure())
    assert [figure.what.removeprefix(f"{name}: ") for figure in figures] == [
        "output tokens/s",
        "first token p50, ms",
        "between tokens p50, ms",
        "between tokens p99, ms",
    ]
    assert all(figure.peer == figure.value for figure in figures)  # measured against itself
