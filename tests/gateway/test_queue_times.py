from __future__ import annotations

import pytest

from penstock.core.messages import EngineStats
from penstock.gateway.gateway import MAX_WAIT_S, MIN_WAIT_S, QueueTimes


def stats(tokens_computed: int, num_waiting: int, num_waiting_tokens: int = 0) -> EngineStats:
    return EngineStats(
        tokens_computed=tokens_computed, num_waiting=num_waiting, num_waiting_tokens=num_waiting_tokens
    )


def test_the_work_that_waits_over_the_measured_speed() -> None:
    times = QueueTimes()
    for second in range(10):
        times.observe(stats(1000 * second, num_waiting=5), float(second))
    waiting = stats(9000, num_waiting=10, num_waiting_tokens=4000)
    assert times.drain_s(waiting, mean_answer_tokens=200.0) == pytest.approx(6.0)


def test_idle_time_does_not_slow_the_engine_down() -> None:
    times = QueueTimes()
    times.observe(stats(0, num_waiting=1), 0.0)
    times.observe(stats(1000, num_waiting=0), 1.0)
    times.observe(stats(1000, num_waiting=1), 500.0)
    assert times.drain_s(stats(1000, 1, 5000), 0.0) == pytest.approx(5.0)


def test_recent_speed_counts_more() -> None:
    times = QueueTimes()
    times.observe(stats(0, 1), 0.0)
    times.observe(stats(10_000, 1), 10.0)
    times.observe(stats(11_000, 1), 130.0)  # almost stuck for two minutes
    assert times.drain_s(stats(11_000, 1, 1000), 0.0) > 50.0


def test_the_latest_step_stands_in_before_anything_was_measured() -> None:
    waiting = EngineStats(num_waiting=1, num_waiting_tokens=5000, step_tokens=100, step_s=0.1)
    assert QueueTimes().drain_s(waiting, 0.0) == pytest.approx(5.0)


def test_bounds() -> None:
    times = QueueTimes()
    assert times.drain_s(stats(0, 1, 5000), 0.0) == MIN_WAIT_S  # nothing is known
    times.observe(stats(0, 1), 0.0)
    times.observe(stats(0, 1), 60.0)  # an engine that hangs
    assert times.drain_s(stats(0, 1, 5000), 0.0) == MAX_WAIT_S


def test_another_engine_starts_a_new_measurement() -> None:
    times = QueueTimes()
    times.observe(stats(10**6, 1), 0.0)
    times.observe(stats(0, 1), 1.0)
    times.observe(stats(1000, 1), 2.0)
    assert times.drain_s(stats(1000, 1, 3000), 0.0) == pytest.approx(3.0)
