"""Samples not taken because a grammar's mask was late: the position is planned again, and nothing is lost."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.plan import SampledToken, StepPlan, StepResult
from penstock.core.request import FinishReason, Grammar, Tier
from tests.scheduler.strict import Driver, StrictExecutor, make_request

ANY = Grammar("json")


class LateExecutor(StrictExecutor):
    """Postpones samples of constrained requests, whose ids start with "c", as chance has it."""

    def postpone_by(self, rng: random.Random, share: float) -> None:
        self._rng = rng
        self._share = share

    def execute(self, plan: StepPlan, tokens: dict[str, list[int]], tenants: dict[str, str]) -> StepResult:
        for chunk in plan.chunks:
            assert not (chunk.in_flight and chunk.request_id.startswith("c")), (
                "planned ahead of its own sample"
            )
        result = super().execute(plan, tokens, tenants)
        return StepResult(result.step_id, tuple(map(self._maybe_late, result.sampled)), result.elapsed_s)

    def _maybe_late(self, sampled: SampledToken) -> SampledToken:
        if not sampled.request_id.startswith("c") or self._rng.random() >= self._share:
            return sampled
        row = self.rows[sampled.request_id]
        row.num_computed -= 1
        row.digests.pop()
        row.last_sample = None
        return SampledToken(sampled.request_id, 0, is_postponed=True)


def late_driver(seed: int, share: float, **settings: object) -> Driver:
    driver = Driver(**settings)  # type: ignore[arg-type]
    executor = LateExecutor(driver.config, driver.cache.num_blocks, driver.cache.block_size)
    executor.postpone_by(random.Random(seed), share)
    driver.executor = executor
    return driver


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 3),
    num_blocks=st.integers(8, 40),
    max_num_batched_tokens=st.sampled_from([6, 17, 48]),
)
def test_late_masks_preemption_and_aborts_lose_and_repeat_nothing(
    seed: int, depth: int, num_blocks: int, max_num_batched_tokens: int
) -> None:
    rng = random.Random(seed)
    driver = late_driver(
        seed,
        0.6,
        depth=depth,
        num_blocks=num_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=5,
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
    driver.executor.postpone_by(random.Random(0), 0.0)  # type: ignore[attr-defined]
    driver.run()
    assert len(driver.answers["c"]) == 10


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
