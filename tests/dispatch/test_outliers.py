from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dispatch.health import OutlierConfig, OutlierDetector, OutlierState

CONFIG = OutlierConfig(max_ejected_share=0.34)
USUAL: dict[str, float | None] = {f"r{number}": 0.02 for number in range(6)}


def observe(
    rounds: int, figures: dict[str, float], state: OutlierState, start_s: float = 0.0
) -> OutlierState:
    detector = OutlierDetector(CONFIG)
    for number in range(rounds):
        state = detector.observe(figures, state, start_s + number)
    return state


def test_a_slow_replica_is_left_out_after_being_slow_several_times_in_a_row() -> None:
    slow = {**USUAL, "r3": 0.05}
    state = observe(2, slow, OutlierState())
    assert state.ejected() == frozenset()
    state = observe(1, USUAL, state)
    state = observe(2, slow, state)
    assert state.ejected() == frozenset()
    assert observe(1, slow, state).ejected() == {"r3"}


def test_it_comes_back_and_is_left_out_for_longer_if_it_is_still_slow() -> None:
    detector = OutlierDetector(CONFIG)
    state, out_since, durations = OutlierState(), None, []
    for second in range(400):
        idle = dict.fromkeys(state.ejected())  # nothing is sent to it, so nothing is measured
        state = detector.observe({**USUAL, "r3": 0.05, **idle}, state, float(second))
        if state.ejected() and out_since is None:
            out_since = second
        elif not state.ejected() and out_since is not None:
            durations.append(second - out_since)
            out_since = None
    assert durations[:3] == [30, 60, 120]


def test_a_replica_that_recovered_starts_over() -> None:
    state = observe(3, {**USUAL, "r3": 0.05}, OutlierState())
    state = observe(100, USUAL, state, start_s=10.0)
    assert state.ejected() == frozenset()
    assert state.replicas["r3"].ejections == 0


def test_too_few_samples_say_nothing_and_do_not_excuse_either() -> None:
    slow: dict[str, float | None] = {**USUAL, "r3": 0.05}
    unknown: dict[str, float | None] = {**USUAL, "r3": None}
    state = observe(1, slow, observe(5, unknown, observe(2, slow, OutlierState())))
    assert state.ejected() == {"r3"}


def test_when_all_are_slow_nobody_is() -> None:
    assert observe(10, dict.fromkeys(USUAL, 5.0), OutlierState()).ejected() == frozenset()


def test_two_replicas_cannot_say_what_is_usual() -> None:
    assert observe(10, {"r0": 0.01, "r1": 9.0}, OutlierState()).ejected() == frozenset()


@given(
    st.lists(st.dictionaries(st.sampled_from(sorted(USUAL)), st.none() | st.floats(0.001, 10.0)), max_size=60)
)
@settings(deadline=None)
def test_never_more_than_a_share_is_left_out_and_never_for_good(
    rounds: list[dict[str, float | None]],
) -> None:
    detector = OutlierDetector(CONFIG)
    state = OutlierState()
    for second, figures in enumerate(rounds):
        before = state.ejected()
        state = detector.observe(figures, state, float(second))
        if state.ejected() - before:
            assert len(state.ejected()) <= CONFIG.max_ejected_share * len(state.replicas)
        for record in state.replicas.values():
            assert record.ejected_until_s is None or record.ejected_until_s <= second + CONFIG.max_ejection_s
        assert msgspec.json.decode(msgspec.json.encode(state), type=OutlierState) == state
    assert detector.observe(dict.fromkeys(USUAL), state, 1e6).ejected() == frozenset()
