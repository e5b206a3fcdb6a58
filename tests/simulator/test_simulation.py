from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest

from penstock.core.engine_config import SchedulerConfig
from penstock.core.figures import percentile
from penstock.core.plan import StateSlots
from penstock.core.request import Tier
from penstock.simulator import Fixed, LogNormal, ReplicaConfig, SimulationConfig, Tenant, Workload, simulate
from penstock.simulator.report import Outcome, Report, Samples, Summary

PAGE = Path(__file__).parents[2] / "docs" / "simulator.md"
WORKLOAD = Workload(
    num_requests=200,
    requests_per_s=50.0,
    prompt_tokens=LogNormal(200, 1.0, 2000),
    output_tokens=LogNormal(50, 0.8, 300),
    max_tokens=300,
    prefix_tokens=Fixed(160),
    tenants=(Tenant("a"), Tenant("b", 1.0, Tier.BATCH)),
)


def test_the_same_configuration_gives_the_same_report() -> None:
    config = SimulationConfig(workload=WORKLOAD, num_replicas=2, seed=7)
    assert simulate(config) == simulate(config)
    assert simulate(config) != simulate(SimulationConfig(workload=WORKLOAD, num_replicas=2, seed=8))


def test_a_report_adds_up() -> None:
    report = simulate(SimulationConfig(workload=WORKLOAD, num_replicas=2))
    assert report.num_requests == sum(report.finished.values()) + sum(report.rejected.values()) == 200
    assert report.latency.ttft_s.count == report.latency.e2e_s.count == 200
    assert report.latency.itl_s.count == report.output_tokens - 200
    assert set(report.latency_by_tier) == {"default", "batch"}
    assert sum(latency.e2e_s.count for latency in report.latency_by_tier.values()) == 200
    assert sum(replica.num_requests for replica in report.replicas) == 200
    assert all(0.0 < replica.busy_share <= 1.0 for replica in report.replicas)
    computed = sum(replica.num_tokens_computed for replica in report.replicas)
    assert computed >= report.prompt_tokens - report.cached_tokens + report.output_tokens - 200
    assert 0 < report.cached_tokens < report.prompt_tokens
    assert report.output_tokens_per_s == pytest.approx(report.output_tokens / report.duration_s)


def test_times_of_tiers_and_of_all_requests() -> None:
    """The first tier's times are those of all requests until a request of another tier ends."""
    workload = Workload(
        num_requests=60,
        requests_per_s=20.0,
        prompt_tokens=Fixed(50),
        output_tokens=Fixed(5),
        tenants=(Tenant("a", 4.0), Tenant("b", 1.0, Tier.BATCH)),
    )
    ended: list[Outcome] = []
    report = simulate(SimulationConfig(workload=workload), on_outcome=ended.append)

    def first_tokens(*tiers: Tier) -> Summary:
        samples = Samples()
        for each in ended:
            if each.arrival.request.tier in tiers:
                samples.add(each.token_times_s[0] - each.arrival.time_s)
        return samples.summary()

    assert report.latency.ttft_s == first_tokens(*Tier)
    assert {tier: latency.ttft_s for tier, latency in report.latency_by_tier.items()} == {
        tier.value: first_tokens(tier) for tier in (Tier.DEFAULT, Tier.BATCH)
    }
    assert report.latency.itl_s.count == 4 * 60


def test_values_that_are_added_together_count_as_values_one_by_one() -> None:
    rng = Random(4)
    for max_kept in (1, 2, 7, 100):
        together, one_by_one = Samples(max_kept), Samples(max_kept)
        for _ in range(60):
            values = [rng.random() for _ in range(rng.choice((0, 1, 3, 40)))]
            together.extend(values)
            for value in values:
                one_by_one.add(value)
            assert vars(together) == vars(one_by_one)


def test_a_model_with_states_reuses_less_and_answers_all() -> None:
    """Prefixes count up to a snapshot only, and requests of one step cannot share what the step computes."""
    plain = simulate(SimulationConfig(workload=WORKLOAD))
    states = StateSlots(num_slots=SchedulerConfig().max_num_seqs + 16)
    report = simulate(SimulationConfig(workload=WORKLOAD, replica=ReplicaConfig(states=states)))
    assert report.finished == plain.finished
    assert 0 < report.cached_tokens < plain.cached_tokens


def test_a_report_reads_well() -> None:
    text = str(simulate(SimulationConfig(workload=WORKLOAD)))
    assert text.startswith("200 requests in ")
    assert "time to first token" in text


def test_nothing_to_do_is_a_report_too() -> None:
    workload = Workload(num_requests=0, requests_per_s=1.0, prompt_tokens=Fixed(1), output_tokens=Fixed(1))
    report = simulate(SimulationConfig(workload=workload, replica=ReplicaConfig(num_blocks=4)))
    assert (report.num_requests, report.output_tokens_per_s) == (0, 0.0)
    assert str(report)


def test_percentiles_are_observed_values() -> None:
    ordered = [float(value) for value in range(1, 101)]
    assert [percentile(ordered, p) for p in (0, 1, 50, 99, 100)] == [1.0, 1.0, 50.0, 99.0, 100.0]
    assert percentile([3.0], 99) == 3.0
    assert Summary.of([]) == Summary()
    assert Summary.of([2.0, 1.0, 4.0]) == Summary(3, pytest.approx(7 / 3), 2.0, 4.0, 4.0, 4.0)


def test_the_example_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), {})
    assert "output tokens/s" in capsys.readouterr().out


def test_drafts_save_steps_and_change_no_answer() -> None:
    workload = Workload(
        num_requests=40,
        requests_per_s=1.0,
        prompt_tokens=Fixed(100),
        output_tokens=Fixed(100),
        max_tokens=200,
    )

    def run(acceptance: float | None) -> Report:
        replica = ReplicaConfig(depth=1, draft_acceptance=acceptance)
        return simulate(SimulationConfig(workload=workload, replica=replica))

    plain, drafted, wrong = run(None), run(0.8), run(0.0)
    assert plain.output_tokens == drafted.output_tokens == wrong.output_tokens
    assert drafted.replicas[0].num_steps < 0.6 * plain.replicas[0].num_steps
    assert drafted.latency.e2e_s.p50 < 0.6 * plain.latency.e2e_s.p50
    assert wrong.latency.e2e_s.p50 < 1.02 * plain.latency.e2e_s.p50
    # Tokens that come together share the time: no gap is zero.
    assert drafted.latency.itl_s.count == plain.latency.itl_s.count
    assert 0.0 < drafted.latency.itl_s.p50 < 0.8 * plain.latency.itl_s.p50
