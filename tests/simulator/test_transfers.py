"""Replicas that compute prompts for others, and KV that moves between replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.core.engine_config import SchedulerConfig
from penstock.simulator import (
    ControlTimes,
    Fixed,
    Kill,
    ReplicaConfig,
    Report,
    SimulationConfig,
    SlowDown,
    Uniform,
    Workload,
    simulate,
)
from penstock.simulator.report import Outcome
from penstock.simulator.transfers import KVLink
from penstock.simulator.workload import Fault, RestartGateway

WORKLOAD = Workload(
    num_requests=60,
    requests_per_s=30.0,
    prompt_tokens=Uniform(300, 3000),
    output_tokens=Uniform(5, 60),
    prefix_tokens=Fixed(256),
)


def config(*faults: Fault, counts_decodes: bool = True, **changes: object) -> SimulationConfig:
    made = SimulationConfig(
        workload=WORKLOAD,
        replica=ReplicaConfig(
            num_blocks=4000,
            scheduler=SchedulerConfig(max_num_seqs=32, queue_timeout_s=None),
            counts_decodes=counts_decodes,
        ),
        num_replicas=2,
        num_prefill_replicas=2,
        kv_link=KVLink(bytes_per_token=131_072, bytes_per_s=10e9),
        times=ControlTimes(start_s=0.5),
        faults=faults,
        seed=3,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def run(config: SimulationConfig) -> tuple[Report, list[Outcome]]:
    outcomes: list[Outcome] = []
    return simulate(config, on_outcome=outcomes.append), outcomes


def test_prompts_are_computed_by_one_pool_and_answered_by_the_other() -> None:
    report, outcomes = run(config())
    assert report.num_answered == 60
    assert all(outcome.replica_id in ("replica-0", "replica-1") for outcome in outcomes)
    decoding, prefilling = report.replicas[:2], report.replicas[2:]
    assert report.num_moved_tokens > 10_000
    assert sum(each.num_tokens_computed for each in prefilling) > 10 * sum(
        each.num_tokens_computed - 32 * each.num_requests for each in decoding
    )


def test_answers_are_smoother_where_others_compute_the_prompts() -> None:
    apart, _ = run(config())
    together, _ = run(config(num_replicas=4, num_prefill_replicas=0, kv_link=None))
    assert apart.latency.itl_s.p99 < together.latency.itl_s.p99
    assert together.num_moved_tokens == 0


def test_a_slow_connection_is_seen_in_the_time_to_the_first_token() -> None:
    quick, _ = run(config())
    slow, _ = run(config(kv_link=KVLink(bytes_per_token=131_072, bytes_per_s=0.5e9)))
    assert slow.latency.ttft_s.p50 > quick.latency.ttft_s.p50


@pytest.mark.parametrize(
    "faults",
    [
        (),
        (Kill(0.5, 2, 0.1, 0.5), Kill(0.9, 3, 0.1, 0.5)),  # both that compute prompts
        (Kill(0.5, 0, 0.1, 0.5),),
        (SlowDown(0.3, 2, 50.0, 1.5), RestartGateway(0.8, 0)),
    ],
)
def test_every_request_ends_once_and_counting_decodes_changes_nothing(faults: tuple[Fault, ...]) -> None:
    workload = replace(WORKLOAD, mean_patience_s=2.0)
    counted = run(config(*faults, workload=workload))
    plain = run(config(*faults, workload=workload, counts_decodes=False))
    assert counted == plain
    assert counted[0].num_requests == 60
    for outcome in counted[1]:
        assert outcome.token_ids == outcome.arrival.output_tokens(0, len(outcome.token_ids))


def test_replicas_without_pools_lend_each_other_what_they_have_cached() -> None:
    workload = replace(
        WORKLOAD, prefix_tokens=Fixed(4000), prompt_tokens=Fixed(20), num_requests=200, requests_per_s=300.0
    )
    fleet = config(workload=workload, num_prefill_replicas=0, num_replicas=4)
    lent, _ = run(replace(fleet, kv_link=KVLink(bytes_per_token=10_000)))
    assert lent.num_answered == 200
    assert lent.num_moved_tokens > 0
