from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dispatch.health import BreakerConfig, BreakerState, Circuit, CircuitBreaker

CONFIG = BreakerConfig(max_failures=3, probes=2, first_pause_s=1.0, max_pause_s=8.0)


def opened(breaker: CircuitBreaker, now: float = 0.0) -> BreakerState:
    state = BreakerState()
    for _ in range(CONFIG.max_failures):
        assert breaker.allows(state, now)
        state = breaker.failed(breaker.sent(state, now), now)
    return state


def test_it_opens_after_failures_in_a_row_and_not_before() -> None:
    breaker = CircuitBreaker(CONFIG)
    state = BreakerState()
    for _ in range(10):
        state = breaker.failed(breaker.failed(state, 0.0), 0.0)
        assert state.circuit is Circuit.CLOSED
        state = breaker.succeeded(state)
    assert opened(breaker).circuit is Circuit.OPEN


def test_an_open_one_lets_nothing_through_until_the_pause_is_over_and_then_only_probes() -> None:
    breaker = CircuitBreaker(CONFIG)
    state = opened(breaker)
    assert not breaker.allows(state, 0.99)
    assert breaker.allows(state, 1.0)
    state = breaker.sent(state, 1.0)
    assert breaker.allows(state, 1.0)
    state = breaker.sent(state, 1.0)
    assert not breaker.allows(state, 1.0)
    state = breaker.succeeded(state)
    assert not breaker.allows(state, 1.0)
    assert breaker.succeeded(state) == BreakerState()


def test_the_pause_doubles_up_to_its_limit_and_starts_over_once_closed() -> None:
    breaker = CircuitBreaker(CONFIG)
    state, now = opened(breaker), 0.0
    pauses = []
    for _ in range(6):
        pauses.append(state.retry_at_s - now)
        now = state.retry_at_s
        state = breaker.failed(breaker.sent(state, now), now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    now = state.retry_at_s
    for _ in range(CONFIG.probes):
        state = breaker.sent(state, now)
    for _ in range(CONFIG.probes):
        state = breaker.succeeded(state)
    assert state == BreakerState()


def test_a_probe_whose_client_left_makes_room_for_another() -> None:
    breaker = CircuitBreaker(CONFIG)
    state = opened(breaker)
    state = breaker.sent(breaker.sent(state, 1.0), 1.0)
    assert not breaker.allows(state, 1.0)
    assert breaker.allows(breaker.abandoned(state), 1.0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["send", "succeed", "fail", "abandon"]), st.floats(0.0, 3.0)), max_size=80
    )
)
@settings(deadline=None)
def test_in_any_order_pauses_and_probes_stay_within_bounds(steps: list[tuple[str, float]]) -> None:
    breaker = CircuitBreaker(CONFIG)
    state, now, in_flight = BreakerState(), 0.0, 0
    for verb, elapsed_s in steps:
        now += elapsed_s
        if verb == "send" and breaker.allows(state, now):
            state = breaker.sent(state, now)
            in_flight += 1
        elif in_flight and verb != "send":
            in_flight -= 1
            if verb == "succeed":
                state = breaker.succeeded(state)
            elif verb == "fail":
                state = breaker.failed(state, now)
            else:
                state = breaker.abandoned(state)
        assert 0 <= state.probing <= CONFIG.probes
        assert state.retry_at_s <= now + CONFIG.max_pause_s
        if state.circuit is Circuit.CLOSED:
            assert state.failures < CONFIG.max_failures
        # Whatever happened, it asks again one day.
        assert state.circuit is not Circuit.OPEN or breaker.allows(state, now + CONFIG.max_pause_s)
