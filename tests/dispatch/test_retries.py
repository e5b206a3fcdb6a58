from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dispatch.requests import Failure, RetryBudget, RetryConfig, RetryPolicy, Verdict

CONFIG = RetryConfig(budget_per_s=0.0, max_budget=10.0)
POLICY = RetryPolicy(CONFIG)


def verdict(failure: Failure, tokens: float = 10.0, now: float = 0.0) -> Verdict:
    return POLICY.decide(failure, RetryBudget(tokens=tokens, updated_s=0.0), now)[0].verdict


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Failure(attempts=1), Verdict.RESTART),
        (Failure(attempts=1, num_emitted_tokens=5), Verdict.CONTINUE),
        (Failure(attempts=1, num_emitted_tokens=5, can_continue=False), Verdict.NOT_RETRYABLE),
        (Failure(attempts=1, is_retryable=False), Verdict.NOT_RETRYABLE),
        (Failure(attempts=3), Verdict.NO_ATTEMPTS_LEFT),
        (Failure(attempts=1, deadline_s=1.0, predicted_ttft_s=1.5), Verdict.NO_TIME_LEFT),
        (Failure(attempts=1, deadline_s=2.0, predicted_ttft_s=1.5), Verdict.RESTART),
    ],
)
def test_what_becomes_of_a_failure(failure: Failure, expected: Verdict) -> None:
    assert verdict(failure) is expected


def test_without_budget_nothing_is_retried_and_nothing_is_taken() -> None:
    budget = RetryBudget(tokens=0.5, updated_s=0.0)
    decision, after = POLICY.decide(Failure(attempts=1), budget, 0.0)
    assert decision.verdict is Verdict.NO_BUDGET_LEFT
    assert after.tokens == 0.5


def test_pauses_grow_from_the_second_retry_on() -> None:
    policy = RetryPolicy(RetryConfig(max_attempts=9))
    pauses = [
        policy.decide(Failure(attempts=attempts), policy.first_budget(0.0), 0.0)[0].pause_s
        for attempts in range(1, 8)
    ]
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]


@given(
    st.lists(st.tuples(st.sampled_from(["attempt", "fail"]), st.floats(0.0, 5.0)), max_size=300),
    st.floats(0.0, 1.0),
    st.floats(0.0, 2.0),
)
@settings(deadline=None)
def test_retries_never_exceed_what_the_budget_allows(
    steps: list[tuple[str, float]], ratio: float, per_s: float
) -> None:
    config = RetryConfig(budget_ratio=ratio, budget_per_s=per_s, max_budget=5.0)
    policy = RetryPolicy(config)
    budget, now, attempts, retries = policy.first_budget(0.0), 0.0, 0, 0
    for verb, elapsed_s in steps:
        now += elapsed_s
        if verb == "attempt":
            budget = policy.attempted(budget, now)
            attempts += 1
        else:
            decision, budget = policy.decide(Failure(attempts=1), budget, now)
            retries += decision.is_retry
        assert 0.0 <= budget.tokens <= config.max_budget
        assert retries <= config.max_budget + ratio * attempts + per_s * now + 1e-6


@given(
    attempts=st.integers(1, 5),
    deadline_s=st.floats(0.0, 10.0),
    now=st.floats(0.0, 10.0),
    ttft_s=st.floats(0.0, 10.0),
)
def test_a_retry_that_would_be_too_late_is_never_made(
    attempts: int, deadline_s: float, now: float, ttft_s: float
) -> None:
    failure = Failure(attempts=attempts, deadline_s=deadline_s, predicted_ttft_s=ttft_s)
    decision, _ = POLICY.decide(failure, RetryBudget(tokens=5.0, updated_s=0.0), now)
    if decision.is_retry:
        assert attempts < CONFIG.max_attempts
        assert now + decision.pause_s + ttft_s < deadline_s
