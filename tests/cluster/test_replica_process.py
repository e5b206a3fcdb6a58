"""When silence counts as trouble."""

from __future__ import annotations

import pytest

from penstock.cluster.replica_process import FreezeDetector
from penstock.core.messages import EngineStats


def silent_for(silence: FreezeDetector, *, is_working: bool = False) -> float:
    passed_s = 0.0
    while not silence.is_too_long(0.25, is_working=is_working):
        passed_s += 0.25
    return passed_s


def test_an_engine_may_be_silent_for_the_timeout() -> None:
    assert silent_for(FreezeDetector(5.0, max_step_tokens=2048)) == 5.0


def test_a_heartbeat_begins_the_count_anew() -> None:
    silence = FreezeDetector(5.0, max_step_tokens=2048)
    for _ in range(100):
        assert not silence.is_too_long(0.25, is_working=False)
        silence.heard(EngineStats())


def test_slow_engines_get_the_time_that_their_largest_steps_take() -> None:
    silence = FreezeDetector(5.0, max_step_tokens=2048)
    silence.heard(EngineStats(num_steps=1, step_tokens=64, step_s=64 * 0.010))
    assert 60.0 < silent_for(silence) < 62.0
    silence.heard(EngineStats(num_steps=2, step_tokens=1, step_s=0.4))
    assert silent_for(silence) > 60.0, "what decoding takes says nothing about prompts"
    silence.heard(EngineStats(num_steps=3, step_tokens=512, step_s=512 * 0.001))
    assert 5.5 < silent_for(silence) < 6.5


def test_a_process_that_works_is_not_frozen_but_has_no_time_for_ever() -> None:
    assert silent_for(FreezeDetector(5.0, max_step_tokens=2048), is_working=True) == pytest.approx(
        50.0, abs=0.5
    )
