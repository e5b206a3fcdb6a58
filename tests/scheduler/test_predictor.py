"""The step-time model, and how it bounds prefill while answers stream."""

from __future__ import annotations

import random

import pytest

from penstock.scheduler.step_builder import StepLoad, StepTimePredictor
from tests.scheduler.strict import Driver, make_request

BASE_S, PREFILL_S, DECODE_S, CONTEXT_S, PAIR_S = 0.012, 6e-4, 9e-4, 3e-6, 2e-7


def load_of(num_prefill: int, start: int, num_decodes: int, context: int) -> StepLoad:
    load = StepLoad(decode_sequences=num_decodes, decode_context_tokens=num_decodes * context)
    if num_prefill:
        load.add_prefill(start, num_prefill)
    return load


def true_s(load: StepLoad) -> float:
    return (
        BASE_S
        + PREFILL_S * load.prefill_tokens
        + DECODE_S * load.decode_sequences
        + CONTEXT_S * load.decode_context_tokens
        + PAIR_S * load.prefill_pairs
    )


def random_load(rng: random.Random) -> StepLoad:
    num_prefill = rng.choice([0, 0, 16, 64, 256, 1024])
    return load_of(num_prefill, rng.choice([0, 0, 512]), rng.randint(0, 32), rng.randint(10, 2000))


def test_it_learns_a_machine_thirty_times_slower_than_it_thought() -> None:
    rng = random.Random(1)
    predictor = StepTimePredictor()
    for _ in range(100):
        load = random_load(rng)
        predictor.observe(load, true_s(load) * rng.uniform(0.95, 1.05))
    for _ in range(50):
        load = random_load(rng)
        assert predictor.predict(load) == pytest.approx(true_s(load), rel=0.15)


def test_outliers_hardly_move_it() -> None:
    rng = random.Random(2)
    predictor = StepTimePredictor()
    for index in range(300):
        load = random_load(rng)
        factor = 50.0 if index % 20 == 10 else 0.02 if index % 20 == 15 else 1.0
        predictor.observe(load, true_s(load) * factor)
    errors = []
    for _ in range(50):
        load = random_load(rng)
        errors.append(abs(predictor.predict(load) / true_s(load) - 1.0))
    assert sorted(errors)[25] < 0.15


def test_long_stretches_of_decode_do_not_unlearn_prefill() -> None:
    rng = random.Random(3)
    predictor = StepTimePredictor()
    for _ in range(100):
        load = random_load(rng)
        predictor.observe(load, true_s(load))
    for index in range(5000):
        load = load_of(0, 0, 16, 100 + index % 50)
        predictor.observe(load, true_s(load) * rng.uniform(0.95, 1.05))
    load = load_of(256, 0, 16, 100)
    assert predictor.predict(load) == pytest.approx(true_s(load), rel=0.3)


def test_it_follows_a_machine_that_slows_down() -> None:
    rng = random.Random(4)
    predictor = StepTimePredictor()
    for speed in (1.0, 3.0):
        for _ in range(300):
            load = random_load(rng)
            predictor.observe(load, true_s(load) * speed)
    load = load_of(256, 0, 16, 100)
    assert predictor.predict(load) == pytest.approx(3.0 * true_s(load), rel=0.2)


def test_the_number_of_tokens_within_a_target_is_the_inverse_of_predict() -> None:
    predictor = StepTimePredictor()
    for start in (0, 1000, 50_000):
        base = load_of(0, 0, 8, 500)
        num_tokens = predictor.prefill_tokens_within(0.05, base, start)
        assert predictor.predict(load_of(num_tokens, start, 8, 500)) <= 0.05
        assert predictor.predict(load_of(num_tokens + 1, start, 8, 500)) > 0.05
    assert predictor.prefill_tokens_within(0.001, load_of(0, 0, 8, 500), 0) == 0


def largest_prefill(driver: Driver) -> int:
    return max(chunk.num_tokens for chunk in driver.plans[-1].chunks)


def test_prefill_shrinks_while_others_decode_but_never_stops() -> None:
    # The strict executor takes 10 ms for a step and 0.1 ms for each token.
    driver = Driver(num_blocks=2000, max_model_len=4000, itl_target_ms=20.0, max_num_batched_tokens=1000)
    for index in range(4):
        driver.add(make_request(f"warm{index}", 50 + 100 * index, 2))
        driver.run()
    driver.add(make_request("stream", 8, 60))
    driver.step()
    driver.add(make_request("long", 1500, 2))
    driver.step()
    assert 50 <= largest_prefill(driver) <= 150
    driver.run()
    assert max(plan.num_tokens for plan in driver.plans[-60:]) < 200


def test_without_decodes_or_without_a_target_the_whole_budget_is_used() -> None:
    alone = Driver(num_blocks=2000, max_model_len=4000, itl_target_ms=1.0, max_num_batched_tokens=1000)
    alone.add(make_request("long", 1500, 2))
    alone.step()
    assert largest_prefill(alone) == 1000
    unbounded = Driver(num_blocks=2000, max_model_len=4000, itl_target_ms=0.0, max_num_batched_tokens=1000)
    unbounded.add(make_request("stream", 8, 500))
    unbounded.step()
    unbounded.add(make_request("long", 1500, 2))
    unbounded.step()
    assert largest_prefill(unbounded) == 999


def test_a_target_that_cannot_be_met_still_lets_prompts_advance() -> None:
    driver = Driver(itl_target_ms=0.001)
    driver.add(make_request("stream", 8, 40))
    driver.step()
    driver.add(make_request("a", 40, 2))
    driver.add(make_request("b", 40, 2))
    driver.step()
    assert largest_prefill(driver) == 16
    assert len(driver.plans[-1].chunks) == 2
    driver.run()
