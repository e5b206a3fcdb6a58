"""The search for policy sets, and its command."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from penstock.cli.commands import penstock
from penstock.core.objective import ObjectiveSettings, PolicySet, RoutingWeights, Weights
from penstock.planner.scenario import scenario_of, simulation_of
from penstock.planner.traffic import RecordedArrivals
from penstock.planner.tune import check, mean_gain, search, split, with_policy
from penstock.simulator import SimulationConfig, simulate

SLOW_CHUNKS = """
[model]
hardware = "l4"
[traffic]
requests = 30
rate = 4
input = 1500
output = 20
[scheduler]
max_num_batched_tokens = 32
"""


def load() -> SimulationConfig:
    return simulation_of(scenario_of(tomllib.loads(SLOW_CHUNKS), "test"))


def test_the_search_leaves_a_bad_chunk_size() -> None:
    found = list(search(load(), simulate, max_evaluations=6, settings=("max_num_batched_tokens",)))
    best = [each for each in found if each.is_best][-1]
    assert best.number > 1
    assert (best.policy.max_num_batched_tokens or 0) > 32
    assert best.objective.total < found[0].objective.total
    assert len(found) == 6
    (again, *_) = check((load(),), best.policy, simulate)
    assert again.after == pytest.approx(best.objective.total)
    assert mean_gain((again,)) > 0.0


def test_no_set_is_evaluated_twice_and_the_value_in_use_is_left_out() -> None:
    found = list(search(load(), simulate, max_evaluations=30, settings=("preempt_batch", "length_bins")))
    policies = [each.policy for each in found]
    assert len(set(policies)) == len(policies)
    assert policies[0] == PolicySet()
    assert all(policy.length_bins != "prompt" and policy.preempt_batch is not True for policy in policies)


def test_a_policy_set_reaches_the_scheduler_the_router_and_the_weights() -> None:
    policy = PolicySet(
        itl_target_ms=20.0, routing=RoutingWeights(policy="least-loaded"), weights=Weights(ttft=3.0)
    )
    changed = with_policy(load(), policy)
    assert changed.replica.scheduler.itl_target_ms == 20.0
    assert changed.dispatch.routing.policy == "least-loaded"
    assert changed.objective.weights.ttft == 3.0
    assert simulate(replace(changed, num_replicas=2)).reasons == {"load": 30}


def test_the_objective_of_a_report_follows_other_weights() -> None:
    report = simulate(load())
    doubled = report.objective_by(ObjectiveSettings(weights=Weights(ttft=2.0, itl=2.0, idle=0.4, drops=20.0)))
    assert doubled.total == pytest.approx(2.0 * report.objective.total)
    assert 0.0 < report.objective.utilisation <= 1.0
    assert "objective" in str(report)


def test_requests_that_are_refused_count_as_dropped() -> None:
    config = load()
    scheduler = msgspec.structs.replace(config.replica.scheduler, max_num_seqs=1, max_queue_requests=1)
    tight = replace(config.replica, scheduler=scheduler)
    report = simulate(replace(config, replica=tight))
    assert report.rejected
    dropped = sum(sums.num_dropped for sums in report.sums.values())
    assert dropped == sum(report.rejected.values())
    assert report.objective.overall.drops == pytest.approx(10.0 * dropped / 30)


def test_a_recorded_load_is_checked_with_its_later_part(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 100 * n, "input_length": 50, "output_length": 5, "hash_ids": []} for n in range(40)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = simulation_of(scenario_of({"traffic": {"trace": "trace.jsonl"}}, "test"), tmp_path)
    training, (later,) = split(config)
    assert (training.workload.num_requests, later.workload.num_requests) == (24, 16)
    assert isinstance(later.arrivals, RecordedArrivals)
    times_s = [arrival.time_s for arrival in later.arrivals]
    assert (len(times_s), times_s[0]) == (16, 0.0)
    assert [arrival.time_s for arrival in later.arrivals] == times_s  # may be simulated again


def run(tmp_path: Path, *arguments: str) -> tuple[int, str, str]:
    (tmp_path / "load.toml").write_text(SLOW_CHUNKS)
    result = CliRunner().invoke(penstock, ["tune", str(tmp_path / "load.toml"), *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_prints_a_table_for_the_settings_file(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "--evaluations", "4", "--only", "max-num-batched-tokens", "--name", "wide")
    assert code == 0, err
    assert tomllib.loads(out)["policies"]["wide"]["max_num_batched_tokens"] > 32
    assert "requests that the search has not seen" in " ".join(err.split())
    assert "penstock experiment start default wide" in err


def test_nothing_better_is_said_so(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "--evaluations", "2", "--only", "preempt_batch")
    assert (code, out) == (0, "")
    assert "is better than the settings in use" in " ".join(err.split())


def test_a_setting_that_does_not_exist_is_a_sentence(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "--only", "luck")
    assert code != 0
    assert "luck is no setting to tune" in err


def test_a_search_that_takes_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.simulations.PROGRESS_S", 0.0)
    _, _, err = run(tmp_path, "--evaluations", "100000", "--only", "preempt_batch")
    assert "simulations take up to" in " ".join(err.split())
    assert "hours" in err


def test_an_interrupted_search_keeps_the_best_set_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import penstock.planner.tune as tuning

    whole = tuning.search

    def interrupted(*args: object, **named: object) -> object:
        for each in whole(*args, **named):  # type: ignore[arg-type]
            yield each
            if each.number == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "search", interrupted)
    code, out, err = run(tmp_path, "--only", "max_num_batched_tokens")
    assert code == 0, err
    assert "[policies.tuned]" in out
    assert "Ended after 2 simulations" in err
