"""Releases in virtual time: the rules of `control/release` in a simulated fleet."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from penstock.control.gates import GateConfig
from penstock.control.release import ReleaseConfig
from penstock.core.errors import UsageError
from penstock.planner.scenario import scenario_of, simulation_of
from penstock.simulator import (
    ControlTimes,
    Fixed,
    Kill,
    LogNormal,
    Report,
    SimulationConfig,
    Workload,
    simulate,
)
from penstock.simulator.releases import SimulatedRelease

SETTINGS = ReleaseConfig(
    gates=GateConfig(min_requests=20, min_compared=5),
    mirrored_share=0.5,
    canary_shares=(0.2, 0.5),
    min_stage_s=3.0,
)


def run(num_requests: int = 1500, **changes: object) -> Report:
    config = SimulationConfig(
        workload=Workload(
            num_requests=num_requests, requests_per_s=20.0, prompt_tokens=Fixed(40), output_tokens=Fixed(12)
        ),
        num_replicas=3,
        times=ControlTimes(start_s=2.0),
        release=SimulatedRelease(at_s=1.0, config=SETTINGS),
    )
    assert config.release is not None
    known = {key: changes.pop(key) for key in ("faults", "num_gateways") if key in changes}
    release = replace(config.release, **changes)  # type: ignore[arg-type]
    return simulate(replace(config, release=release, **known))  # type: ignore[arg-type]


def stages(report: Report) -> list[str]:
    return [change.stage for change in report.release]


def test_a_good_candidate_takes_over_by_steps_and_no_request_is_lost() -> None:
    report = run(num_gateways=2)
    assert stages(report) == ["warming", "shadow", "canary", "canary", "lame_duck", "promoted"]
    assert [change.candidate_share for change in report.release] == [0.0, 0.0, 0.2, 0.5, 1.0, 1.0]
    assert report.num_answered == report.num_requests == 1500
    times_s = [change.at_s for change in report.release]
    assert times_s[1] >= 3.0  # replicas take their time to start
    assert all(later - earlier >= 3.0 for earlier, later in pairwise(times_s[1:5]))
    taken = [replica.num_requests for replica in report.replicas]
    assert len(taken) == 6
    assert sum(taken) > 1500  # mirrored requests reach replicas, and no client


@pytest.mark.parametrize(
    ("changes", "gate", "stage"),
    [
        ({"slowdown": 5.0}, "itl", "shadow"),
        ({"error_share": 0.2}, "errors", "shadow"),
        ({"diverging_share": 0.9}, "divergence", "shadow"),
    ],
)
def test_a_bad_candidate_is_rolled_back_by_its_gate(changes: dict[str, float], gate: str, stage: str) -> None:
    report = run(600, **changes)
    assert stages(report)[-2:] == ["rolling_back", "rolled_back"]
    assert gate in report.release[-1].reason
    assert stages(report)[-3] == stage
    assert report.num_answered == 600
    assert gate in str(report)


def test_a_candidate_whose_replica_dies_goes_on_when_it_is_back() -> None:
    gates = GateConfig(min_requests=20, min_compared=5, max_extra_errors=0.05)  # two of forty fail
    report = run(
        faults=(Kill(6.0, 3, restarts_after_s=5.0),),  # the first replica of the candidate
        config=msgspec.structs.replace(SETTINGS, gates=gates),
    )
    assert stages(report)[-1] == "promoted"
    assert report.num_answered == 1500


def test_a_candidate_that_is_lost_is_rolled_back() -> None:
    report = run(faults=(Kill(4.0, 3, restarts_after_s=None), Kill(4.0, 4, restarts_after_s=None)))
    assert stages(report)[-1] == "rolled_back"
    assert report.release[-1].reason == "no replica of it is ready"
    assert report.num_answered == 1500


def test_a_release_is_the_same_each_time() -> None:
    assert run(500, error_share=0.1) == run(500, error_share=0.1)


def test_scenarios_have_releases() -> None:
    values = {"release": {"at_s": 5.0, "slowdown": 2.0, "settings": {"canary_shares": [0.1]}}}
    release = simulation_of(scenario_of(values, "here")).release
    assert release is not None
    assert release.config.canary_shares == (0.1,)
    with pytest.raises(UsageError, match="canary shares rise"):
        scenario_of({"release": {"at_s": 5.0, "settings": {"canary_shares": [0.5, 0.1]}}}, "here")
    with pytest.raises(UsageError, match="one pool of fixed size"):
        simulation_of(scenario_of({**values, "fleet": {"autoscaler": {}}}, "here"))
    with pytest.raises(UsageError, match="from 0 to 1"):
        simulation_of(scenario_of({"release": {"at_s": 5.0, "error_share": 2.0}}, "here"))


def test_an_identical_candidate_with_few_samples_of_uneven_requests_is_not_rolled_back() -> None:
    """Prompts of very different lengths make times with a heavy tail, and half of them on one of three replicas would
    be twice the load of the stable ones."""
    workload = Workload(
        num_requests=600,
        requests_per_s=45.0,
        prompt_tokens=LogNormal(median=400, sigma=1.2, maximum=8000),
        output_tokens=LogNormal(median=60, sigma=0.8, maximum=500),
    )
    for seed in (1, 2):
        report = simulate(
            SimulationConfig(
                workload=workload,
                num_replicas=3,
                times=ControlTimes(start_s=2.0),
                release=SimulatedRelease(at_s=1.0, config=SETTINGS),
                seed=seed,
            )
        )
        assert "rolled_back" not in stages(report), report.release
