from __future__ import annotations

import pytest

from penstock.bench.load import ClosedLoop, IntRange, Workload, measure_offline
from penstock.core.clock import VirtualClock
from penstock.core.errors import PenstockError

PROMPTS = Workload(arrivals=ClosedLoop(4), num_requests=4, output_len=IntRange(3, 9)).prompts()


def test_throughput_is_tokens_over_the_time_of_one_call() -> None:
    clock = VirtualClock()

    def generate(prompts, sampling):
        assert [params.max_tokens for params in sampling] == [prompt.max_tokens for prompt in PROMPTS]
        assert all(params.ignore_eos for params in sampling)
        clock.advance(2.0)
        return [params.max_tokens for params in sampling]

    summary = measure_offline("m", PROMPTS, 0.6, generate, clock)
    assert summary.num_input_tokens == 4 * 128
    assert summary.output_tokens_per_s == sum(prompt.max_tokens for prompt in PROMPTS) / 2


def test_short_answers_spoil_the_figure() -> None:
    with pytest.raises(PenstockError, match="1 of 4 answers"):
        measure_offline(
            "m",
            PROMPTS,
            0.0,
            lambda _, sampling: [0, *(params.max_tokens for params in sampling[1:])],
            VirtualClock(),
        )
