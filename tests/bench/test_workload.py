from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.bench.load import STANDARD_WORKLOADS, ClosedLoop, IntRange, PoissonArrivals, Workload
from penstock.core.errors import ConfigError

WORKLOAD = Workload(
    arrivals=ClosedLoop(8),
    num_requests=50,
    input_len=IntRange(10, 20),
    output_len=IntRange(1, 3),
    shared_prefix_len=7,
    vocabulary=IntRange(100, 200),
    seed=5,
)


def test_prompts_have_the_lengths_and_tokens_asked_for() -> None:
    prompts = WORKLOAD.prompts()
    assert len(prompts) == 50
    assert {len(prompt.token_ids) - 7 for prompt in prompts} <= set(range(10, 21))
    assert {prompt.max_tokens for prompt in prompts} == {1, 2, 3}
    assert len({prompt.token_ids[:7] for prompt in prompts}) == 1
    assert len({prompt.token_ids[7:] for prompt in prompts}) == 50
    assert all(100 <= token <= 200 for prompt in prompts for token in prompt.token_ids)


def test_the_seed_decides_everything() -> None:
    assert WORKLOAD.prompts() == replace(WORKLOAD).prompts()
    assert WORKLOAD.prompts() != replace(WORKLOAD, seed=6).prompts()


def test_poisson_arrivals_have_the_rate_and_only_move_forward() -> None:
    times = replace(WORKLOAD, arrivals=PoissonArrivals(4.0), num_requests=4000).arrival_times_s()
    assert times is not None
    assert times[0] == 0
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.1)


def test_a_warm_up_shares_no_prompt_and_no_prefix() -> None:
    warm = WORKLOAD.warm_up(3)
    assert warm.arrivals == ClosedLoop(3)
    assert {prompt.token_ids[:7] for prompt in warm.prompts()}.isdisjoint(
        prompt.token_ids[:7] for prompt in WORKLOAD.prompts()
    )


@pytest.mark.parametrize(("text", "expected"), [("128", IntRange(128, 128)), ("1:9", IntRange(1, 9))])
def test_ranges(text: str, expected: IntRange) -> None:
    assert IntRange.parse(text) == expected


@pytest.mark.parametrize("text", ["", "x", "0", "9:1", "1:", "-5", "1:2:3"])
def test_a_bad_range_is_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError):
        IntRange.parse(text)


def test_workloads_describe_themselves() -> None:
    assert str(STANDARD_WORKLOADS["streams-1"]) == "1 stream, 128 in, 64 out"
    assert str(STANDARD_WORKLOADS["shared-prefix"]) == "16 streams, 1,024 shared + 32 in, 32 out"
    assert str(WORKLOAD) == "8 streams, 7 shared + 10–20 in, 1–3 out"
