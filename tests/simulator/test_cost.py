from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from penstock.core.errors import UsageError
from penstock.core.plan import Chunk, StepPlan, StepResult
from penstock.core.plan_log import CommitCall, PlanCall
from penstock.simulator.cost import (
    LLAMA_8B_ON_H200,
    LinearCost,
    StepWork,
    fit,
    fit_corrected,
    mean_relative_error,
    observations,
    with_spread,
)


def random_work(rng: Random) -> StepWork:
    sequences = rng.randint(1, 64)
    tokens = sequences + rng.choice([0, 0, 512])
    samples = sequences if tokens == sequences else rng.choice([0, sequences // 2, sequences])
    return StepWork(tokens, sequences, rng.randint(tokens, 50_000), samples=samples)


def test_the_work_of_a_plan_counts_tokens_sequences_and_the_context_they_read() -> None:
    plan = StepPlan(1, (Chunk("a", 0, 100, True, (), True), Chunk("b", 40, 1, True, ())))
    assert StepWork.of(plan) == StepWork(101, 2, 141, pairs=5050 + 41, samples=2)
    assert StepWork.of(plan) == StepWork.prompt(100) + StepWork.decodes(1, 41)


def test_only_sampled_rows_need_logits() -> None:
    """The middle of a prompt samples nothing; a decode with two drafts samples three times."""
    middle = Chunk("a", 64, 64, False, ())
    drafted = Chunk("b", 40, 3, True, (), drafts=(7, 8))
    assert StepWork.of(StepPlan(1, (middle,))).samples == 0
    assert StepWork.of(StepPlan(1, (drafted,))).samples == 3
    assert StepWork.of(StepPlan(1, (middle, drafted))).samples == 3


def test_a_prompt_in_the_cache_is_read_and_not_computed() -> None:
    rest = StepPlan(1, (Chunk("a", 60, 40, True, (), True),))
    assert StepWork.prompt(100, 60) == StepWork.of(rest)


def test_a_step_costs_the_sum_of_its_parts() -> None:
    cost = LinearCost(base_s=1.0, per_token_s=0.1, per_sequence_s=0.01, per_context_token_s=0.001)
    assert cost.step_s(StepWork(tokens=2, sequences=3, context_tokens=4)) == pytest.approx(1.234)


def test_the_output_layer_costs_nothing_in_a_step_that_samples_nothing() -> None:
    cost = LinearCost(1.0, 0.0, 0.0, 0.0, per_sample_s=0.01, sampling_s=0.5)
    middle = StepWork(tokens=64, sequences=1, context_tokens=64)
    assert cost.step_s(middle) == 1.0
    assert cost.step_s(middle + StepWork.decodes(2, 80)) == pytest.approx(1.52)


def test_fitting_finds_the_costs_that_made_the_observations() -> None:
    rng = Random(1)
    truth = LinearCost(5e-3, 3e-5, 2e-5, 4e-8, per_sample_s=6e-5, sampling_s=1e-3)
    observed = [(work, truth.step_s(work)) for work in (random_work(rng) for _ in range(200))]
    found = fit(observed)
    assert found.base_s == pytest.approx(truth.base_s)
    assert found.per_token_s == pytest.approx(truth.per_token_s)
    assert found.per_sequence_s == pytest.approx(truth.per_sequence_s)
    assert found.per_context_token_s == pytest.approx(truth.per_context_token_s)
    assert found.per_sample_s == pytest.approx(truth.per_sample_s)
    assert found.sampling_s == pytest.approx(truth.sampling_s)
    assert mean_relative_error(found, observed) < 1e-6


def test_fitting_noise_gives_no_negative_cost_and_a_close_fit() -> None:
    rng = Random(2)
    truth = LinearCost(5e-3, 3e-5, 0.0, 0.0)
    observed = [
        (work, truth.step_s(work) * rng.uniform(0.9, 1.1)) for work in (random_work(rng) for _ in range(200))
    ]
    found = fit(observed)
    assert min(found.base_s, found.per_token_s, found.per_sequence_s, found.per_context_token_s) >= 0.0
    assert mean_relative_error(found, observed) < 0.06


def test_what_always_comes_together_is_a_cost_of_the_first_kind() -> None:
    """Decodes alone do not tell tokens from sequences or samples, nor the step from its sampling."""
    rng = Random(4)
    truth = LinearCost(5e-3, 3e-5, 2e-5, 4e-8, per_sample_s=1e-5, sampling_s=1e-3)
    works = [StepWork.decodes(rng.randint(1, 64), rng.randint(64, 50_000)) for _ in range(200)]
    found = fit([(work, truth.step_s(work)) for work in works])
    assert (found.per_sequence_s, found.per_pair_s, found.per_sample_s, found.sampling_s) == (0, 0, 0, 0)
    assert found.base_s == pytest.approx(6e-3)
    assert found.per_token_s == pytest.approx(6e-5)


def test_fitting_steps_that_are_all_alike_still_predicts_them() -> None:
    work = StepWork(8, 8, 800)
    assert fit([(work, 0.02)] * 5).step_s(work) == pytest.approx(0.02)


def test_a_corrected_fit_follows_what_no_line_does() -> None:
    """Steps of 8 tokens take longer than any line through the others says."""
    steps = [(StepWork(tokens, 1, tokens), 1e-3 * tokens + 5e-3) for tokens in (1, 2, 4, 16, 32)]
    steps.append((StepWork(8, 1, 8), 20e-3))
    observed = steps * 10
    corrected = fit_corrected(observed)
    assert mean_relative_error(corrected, observed) < 0.01 < mean_relative_error(fit(observed), observed)
    assert corrected.step_s(StepWork(1024, 1, 1024)) == pytest.approx(
        1.03, rel=0.5
    )  # more than was ever seen


def test_kernels_that_take_rows_in_tiles_are_learned() -> None:
    """Steps of 17 to 24 tokens take as long as one of 24: factors at powers of two are too far apart for that."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 18, 20, 22, 24, 28, 32, 40, 48, 64]
    steps = [(StepWork(size, size, 40 * size), 1e-3 * (24 if 17 <= size <= 24 else size)) for size in sizes]
    assert mean_relative_error(fit_corrected(steps * 20), steps) < 0.015


def test_there_must_be_something_to_fit() -> None:
    with pytest.raises(UsageError, match="no steps"):
        fit([])


def test_observations_pair_recorded_plans_with_their_results() -> None:
    first = StepPlan(1, (Chunk("a", 0, 10, True, (), True),))
    second = StepPlan(2, (Chunk("a", 10, 1, True, ()),))
    calls = [
        PlanCall(0.0, first),
        PlanCall(0.0, second),
        CommitCall(0.5, StepResult(1, (), 0.5)),
        PlanCall(0.5, None),
        CommitCall(0.6, StepResult(2, (), 0.1)),
    ]
    assert list(observations(calls)) == [(StepWork.prompt(10), 0.5), (StepWork.decodes(1, 11), 0.1)]


def test_the_preset_is_near_what_the_hardware_allows() -> None:
    """A lone decode reads 16 GB at no more than 4.8 TB/s; 2,048 prompt tokens take 33 TFLOP at no more than 989."""
    decode_s = LLAMA_8B_ON_H200.step_s(StepWork(1, 1, 1000))
    prefill_s = LLAMA_8B_ON_H200.step_s(StepWork(2048, 1, 2048))
    assert 16.06e9 / 4.8e12 < decode_s < 2 * 16.06e9 / 4.8e12
    assert 2048 * 16.06e9 / 989e12 < prefill_s < 3 * 2048 * 16.06e9 / 989e12


def test_steps_are_spread_as_the_observed_steps_of_their_kind() -> None:
    rng = Random(3)
    linear = LinearCost(5e-3, 3e-5, 0.0, 4e-8)
    observed = [
        (work, linear.step_s(work) * (1.5 if work.tokens == work.sequences and rng.random() < 0.2 else 1.0))
        for work in (random_work(rng) for _ in range(500))
    ]
    cost = with_spread(linear, observed)
    decodes = [StepWork(8, 8, 1000 + number) for number in range(1000)]
    slow = sum(cost.step_s(work) > 1.4 * linear.step_s(work) for work in decodes)
    assert 150 < slow < 250
    assert [cost.step_s(work) for work in decodes] == [cost.step_s(work) for work in decodes]
    other = replace(cost, seed=1)
    assert [other.step_s(work) for work in decodes] != [cost.step_s(work) for work in decodes]
    prompt = StepWork(520, 8, 2000)
    assert cost.step_s(prompt) == pytest.approx(linear.step_s(prompt))


def test_steps_of_a_size_have_a_spread_of_their_own() -> None:
    """The costs are right for small batches, and half of what large ones take."""
    linear = LinearCost(5e-3, 3e-5, 0.0, 4e-8)
    sizes = [4, 24] * 150 + [200] * 20
    observed = [
        (work, linear.step_s(work) * (2.0 if work.sequences > 16 else 1.0))
        for work in (StepWork.decodes(size, 40 * size + place) for place, size in enumerate(sizes))
    ]
    cost = with_spread(linear, observed)
    for size, factor in ((3, 1.0), (30, 2.0)):
        work = StepWork.decodes(size, 1000)
        assert cost.step_s(work) == pytest.approx(factor * linear.step_s(work))
    seen = {
        round(cost.step_s(work) / linear.step_s(work))
        for work in (StepWork.decodes(200, 1000 + place) for place in range(100))
    }
    assert seen == {1, 2}, "too few steps of this size for a spread of their own"


def test_without_observed_steps_nothing_is_spread() -> None:
    linear = LinearCost(5e-3, 3e-5, 0.0, 4e-8)
    assert with_spread(linear, []).step_s(StepWork(2, 2, 50)) == linear.step_s(StepWork(2, 2, 50))
