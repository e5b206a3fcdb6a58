"""Samples not taken because a grammar's mask was late: the position is planned again, and nothing is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.plan import SampledToken, StepResult, WindowGroup
from penstock.core.request import FinishReason, Grammar, Tier
from penstock.scheduler.scheduler import TOKENS_AFTER_LATE_MASK
from tests.scheduler.strict import Driver, Faults, make_request

ANY = Grammar("json")
KINDS: list[dict[str, Any]] = [  # of models
    {},
    {"num_spare_states": 0},
    {"num_spare_states": 5},
    {"windows": (WindowGroup(9, 2),), "num_window_blocks": 90},
]


def late_driver(seed: int, share: float, **settings: object) -> Driver:
    driver = Driver(**settings)  # type: ignore[arg-type]
    driver.executor.faults = Faults(random.Random(seed), late_share=share)
    return driver


@settings(max_examples=settings.default.max_examples // 3, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 3),
    num_blocks=st.integers(8, 40),
    max_num_batched_tokens=st.sampled_from([6, 17, 48]),
    masks_late=st.booleans(),
)
def test_late_masks_preemption_and_aborts_lose_and_repeat_nothing(
    seed: int, depth: int, num_blocks: int, max_num_batched_tokens: int, masks_late: bool
) -> None:
    rng = random.Random(seed)
    driver = late_driver(
        seed,
        0.1 if masks_late else 0.6,
        masks_late=masks_late,
        depth=depth,
        num_blocks=num_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=5,
        max_draft_tokens=rng.choice([0, 4]),
        draft_share=0.7,
        spoiled_share=0.2,
        **rng.choice(KINDS),
    )
    driver.expect_short_answers()
    shared = tuple(rng.randrange(20) for _ in range(24))
    for number in range(14):
        is_constrained = rng.random() < 0.6
        driver.add(
            make_request(
                f"{'c' if is_constrained else 'f'}{number}",
                (*shared[: rng.choice([0, 4, 24])], *(rng.randrange(20) for _ in range(rng.randint(1, 5)))),
                rng.randint(1, 12),
                tier=rng.choice(list(Tier)),
                grammar=ANY if is_constrained else None,
            )
        )
        for _ in range(rng.randint(0, 3)):
            driver.step()
        if rng.random() < 0.15:
            driver.abort(rng.choice(sorted(driver.requests)))
    driver.run()


def test_a_late_mask_costs_others_no_step() -> None:
    driver = late_driver(0, 1.0)
    driver.add(make_request("c", max_tokens=10, grammar=ANY))
    driver.add(make_request("free", max_tokens=30))
    for _ in range(30):
        driver.step()
    assert driver.finished["free"].finish_reason is FinishReason.LENGTH
    assert driver.answers["c"] == []
    driver.executor.faults.late_share = 0.0
    driver.run()
    assert len(driver.answers["c"]) == 10


@pytest.mark.parametrize("masks_late", [True, False])
def test_constrained_requests_join_every_step_of_an_executor_that_masks_late(masks_late: bool) -> None:
    driver = late_driver(0, 0.0, depth=2, masks_late=masks_late)
    driver.add(make_request("c", max_tokens=20, grammar=ANY))
    driver.add(make_request("free", max_tokens=40))
    driver.run()
    with_both = [
        plan for plan in driver.plans if {chunk.request_id for chunk in plan.chunks} == {"c", "free"}
    ]
    until = driver.plans.index(with_both[-1])
    assert (until + 1 - len(with_both) <= 1) == masks_late


def test_a_grammar_that_was_slow_is_planned_with_its_tokens_known_for_a_while() -> None:
    driver = late_driver(0, 1.0, depth=2, masks_late=True)
    driver.add(make_request("c", max_tokens=40, grammar=ANY))
    driver.add(make_request("free", max_tokens=80))
    for _ in range(8):
        driver.step()
    driver.executor.faults.late_share = 0.0
    driver.run()
    ahead = [
        chunk.start
        for plan in driver.plans
        for chunk in plan.chunks
        if chunk.request_id == "c" and chunk.in_flight
    ]
    first_known = len(driver.requests["c"].prompt_token_ids)
    assert min(ahead) <= first_known  # before the first late mask
    assert sorted(ahead)[2] >= first_known + TOKENS_AFTER_LATE_MASK
    assert len(driver.answers["c"]) == 40


def test_a_token_that_completes_ends_the_answer_before_min_tokens() -> None:
    driver = Driver()
    driver.add(make_request("c", max_tokens=10, min_tokens=9, grammar=ANY, ignore_eos=True))
    plan = driver.scheduler.plan(0.0)
    assert plan is not None
    (event,) = driver.scheduler.commit(
        plan, StepResult(plan.step_id, (SampledToken("c", 7, completes=True),), 0.01), 0.0
    )
    assert event.finish_reason is FinishReason.STOP
    assert event.token_ids == (7,)


def test_decodes_never_exceed_the_token_budget_when_constrained_requests_take_turns() -> None:
    driver = late_driver(0, 0.0, depth=2, max_num_seqs=8, max_num_batched_tokens=4)
    for number in range(8):
        driver.add(make_request(f"c{number}", 2, max_tokens=20, grammar=ANY))
    for _ in range(6):
        driver.step()
    while driver.num_in_flight:  # all can decode at once now
        driver.commit()
    driver.run()  # the executor checks the budget of every plan
    assert all(len(driver.answers[f"c{number}"]) == 20 for number in range(8))
