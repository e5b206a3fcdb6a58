"""The clock of benches that count CPU time."""

from __future__ import annotations

import importlib

import pytest

from bench.cpu_clock import SteadyClock


class Core:
    """Stands for a core whose speed changes, and that does what the test says."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.probe_s = 1e-3

    def probe(self) -> float:
        self.now_s += self.probe_s
        return self.probe_s


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    core = Core()
    monkeypatch.setattr("bench.cpu_clock.time.process_time", lambda: core.now_s)
    monkeypatch.setattr(SteadyClock, "probe_s", lambda _: core.probe())
    return core


def test_a_step_takes_as_long_as_on_a_core_of_the_usual_speed(core: Core) -> None:
    clock = SteadyClock()
    clock.set_usual_speed()
    core.probe_s = 2e-3  # the core got slower
    for _ in range(4):
        began_s = clock.now()
        core.now_s += 0.5
        ended_s = clock.end_step(began_s)
    assert ended_s - began_s == pytest.approx(0.25)
    assert clock.now() == pytest.approx(ended_s), "probes take no time"


def test_what_a_bench_notes_takes_no_time(core: Core) -> None:
    clock = SteadyClock()
    ended_s = clock.end_step(clock.now())
    core.now_s += 3.0
    clock.set(ended_s)
    assert clock.now() == pytest.approx(ended_s)
    clock.skip_to(ended_s + 7.0)
    assert clock.now() == pytest.approx(ended_s + 7.0)
    clock.skip_to(ended_s)
    assert clock.now() == pytest.approx(ended_s + 7.0), "time never goes back"


@pytest.mark.parametrize("name", ["policies", "simulator_validation"])
def test_benches_with_this_clock_can_be_loaded(name: str) -> None:
    importlib.import_module(f"bench.{name}")
