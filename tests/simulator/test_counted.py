"""Counting decodes gives what planning every token gives, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from penstock.control.autoscaler import AutoscalerConfig
from penstock.core.engine_config import CacheConfig, SchedulerConfig
from penstock.core.plan import StepPlan
from penstock.core.request import Tier
from penstock.dispatch import DispatchConfig
from penstock.scheduler.counted import CountedScheduler
from penstock.scheduler.counted_plan import CountedPlan
from penstock.simulator import (
    ControlTimes,
    Fixed,
    Kill,
    LogNormal,
    LoseKVEvents,
    ReplicaConfig,
    Report,
    SimulationConfig,
    SlowDown,
    Tenant,
    Uniform,
    Workload,
    simulate,
)
from penstock.simulator.cost import LinearCost
from penstock.simulator.report import Outcome
from penstock.simulator.workload import Fault


def random_simulation(seed: int) -> SimulationConfig:
    """Draw a small fleet and its traffic: short of blocks or not, with tiers, conversations, bursts, faults, clients
    that leave, plans ahead of commits, and costs so even that events of several replicas fall on one instant."""
    rng = Random(seed)
    num_replicas = rng.choice((1, 1, 2, 4))
    rate = rng.choice((3.0, 30.0, 200.0)) * num_replicas
    duration_s = 60 / rate
    cost = rng.choice((
        LinearCost(5e-3, 1e-5, 1e-4, 1e-7),
        LinearCost(1 / 128, 0.0, 0.0, 0.0),
        LinearCost(1 / 1024, 1 / 4096, 0.0, 0.0),
    ))  # fmt: skip
    faults: list[Fault] = [
        *(Kill(rng.uniform(0, duration_s), rng.randrange(num_replicas), 0.1, rng.choice((None, 0.5)))
          for _ in range(rng.choice((0, 0, 1, 2)))),
        *(SlowDown(rng.uniform(0, duration_s), rng.randrange(num_replicas), 3.0, duration_s)
          for _ in range(rng.choice((0, 1)))),
        *(LoseKVEvents(rng.uniform(0, duration_s), duration_s, 0.5) for _ in range(rng.choice((0, 1)))),
    ]  # fmt: skip
    return SimulationConfig(
        workload=Workload(
            num_requests=60,
            requests_per_s=rate,
            prompt_tokens=rng.choice((Fixed(1), Uniform(1, 100), LogNormal(40, 1.0, 300))),
            output_tokens=rng.choice((Fixed(1), Uniform(1, 60), LogNormal(60, 1.0, 200))),
            max_tokens=rng.choice((None, 40, 300)),
            tenants=(Tenant("a", 2.0, Tier.PRIORITY), Tenant("b"), Tenant("c", 1.0, Tier.BATCH)),
            prefix_tokens=rng.choice((None, Fixed(64), Uniform(1, 200))),
            prefixes_per_tenant=2,
            session_share=rng.choice((0.0, 0.4)),
            mean_think_s=0.2,
            burst_share=rng.choice((0.0, 0.2)),
            burst_size=5,
            timeout_s=rng.choice((None, None, None, 0.5)),
            mean_patience_s=rng.choice((None, None, 0.5)),
        ),
        replica=ReplicaConfig(
            num_blocks=rng.choice((40, 80, 2000)),
            max_model_len=600,
            depth=rng.choice((1, 2, 2, 3)),
            cost=cost,
            scheduler=SchedulerConfig(
                max_num_seqs=rng.choice((2, 8, 64)),
                max_num_batched_tokens=rng.choice((16, 64, 2048)),
                itl_target_ms=rng.choice((None, 20.0)),
                queue_timeout_s=rng.choice((None, 0.3)),
                aging_s=rng.choice((0.1, 30.0)),
            ),
            cache=CacheConfig(enable_prefix_caching=rng.random() < 0.8),
        ),
        num_replicas=num_replicas,
        num_gateways=rng.choice((1, 2)),
        dispatch=DispatchConfig(routing_policy=rng.choice(("prefix-aware", "least-loaded", "round-robin"))),
        autoscaler=rng.choice((None, None, AutoscalerConfig(min_replicas=1, max_replicas=6))),
        faults=tuple(faults),
        times=ControlTimes(heartbeat_s=rng.choice((1 / 16, 0.1)), control_s=0.5, start_s=0.5),
        seed=seed,
    )


def run(config: SimulationConfig) -> tuple[Report, list[Outcome]]:
    outcomes: list[Outcome] = []
    return simulate(config, on_outcome=outcomes.append), outcomes


@pytest.mark.parametrize("first_seed", range(0, 60, 10))
def test_counted_decodes_give_the_same_figures_to_the_last_bit(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 10):
        config = random_simulation(seed)
        plain = replace(config, replica=replace(config.replica, counts_decodes=False))
        report, outcomes = run(config)
        expected, expected_outcomes = run(plain)
        assert outcomes == expected_outcomes, seed  # also in the order of their ends
        assert report == expected, seed


def test_times_of_long_answers_are_kept_until_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are longer than the number of commits whose times a replica keeps at least."""
    monkeypatch.setattr("penstock.scheduler.counted._TIMES_KEPT", 8)
    for seed in (3, 14):
        config = random_simulation(seed)
        workload = replace(config.workload, num_requests=20, output_tokens=Uniform(1, 150), max_tokens=150)
        counted = replace(config, workload=workload)
        plain = replace(counted, replica=replace(config.replica, counts_decodes=False))
        assert run(counted) == run(plain)


def test_steps_beside_a_prompt_are_skipped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt means three plans (its own, the plan ahead of its commit, the plan behind it), the second one
    two: the plan ahead of its commit only decodes. A replica looks 64 steps ahead, which means two more plans, and
    the ends of both answers mean three."""
    planned: list[float] = []
    plan_step = CountedScheduler.plan_step

    def count(scheduler: CountedScheduler, now: float) -> CountedPlan | StepPlan | None:
        planned.append(now)
        return plan_step(scheduler, now)

    monkeypatch.setattr(CountedScheduler, "plan_step", count)
    lengths = {"prompt_tokens": Fixed(100), "output_tokens": Fixed(200)}
    workload = Workload(num_requests=2, requests_per_s=10.0, **lengths)
    (replica,) = simulate(SimulationConfig(workload=workload)).replicas
    assert replica.num_steps > 200
    assert len(planned) == 10
