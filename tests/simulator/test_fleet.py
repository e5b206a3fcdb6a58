from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from penstock.control.autoscaler import AutoscalerConfig
from penstock.core.hashing import chain_hashes
from penstock.dispatch import DispatchConfig, WaitingConfig
from penstock.dispatch.health import BreakerConfig, OutlierConfig
from penstock.router import POLICIES
from penstock.simulator import (
    ControlTimes,
    Kill,
    LogNormal,
    LoseKVEvents,
    ReplicaConfig,
    Report,
    SimulationConfig,
    SlowDown,
    Uniform,
    generate,
    shared_prefix_workload,
    simulate,
)
from penstock.simulator.cost import LinearCost
from penstock.simulator.workload import Arrival

COST = LinearCost(base_s=2e-2, per_token_s=1e-4, per_sequence_s=1e-4, per_context_token_s=1e-7)
REPLICA = ReplicaConfig(num_blocks=1500, max_model_len=8192, cost=COST)
WORKLOAD = replace(
    shared_prefix_workload(400, 30.0, num_tenants=8, prefixes_per_tenant=4),
    prefix_tokens=LogNormal(median=600, sigma=0.3, maximum=1500),
    prompt_tokens=Uniform(10, 80),
    output_tokens=Uniform(2, 12),
)
BUSY = replace(WORKLOAD, num_requests=800, requests_per_s=80.0, prefixes_per_tenant=16, zipf_exponent=0.6)


def run(*, dispatch: Mapping[str, object] | None = None, **changes: object) -> Report:
    fields: dict[str, object] = {
        "workload": WORKLOAD,
        "num_replicas": 4,
        "replica": REPLICA,
        "dispatch": DispatchConfig(**dispatch or {}),  # type: ignore[arg-type]
        **changes,
    }
    return simulate(SimulationConfig(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered_under_every_policy(policy: str) -> None:
    report = run(dispatch={"routing_policy": policy})
    assert report.finished == {"stop": 400}
    assert report.latency.ttft_s.count == 400
    assert sum(replica.num_requests for replica in report.replicas) == 400


def test_the_same_seed_gives_the_same_report() -> None:
    few = replace(WORKLOAD, num_requests=100)
    faults = (Kill(at_s=1.0, replica=1), LoseKVEvents(at_s=1.0, until_s=2.0, share=0.5))
    first, second, other = (run(workload=few, faults=faults, seed=seed) for seed in (3, 3, 4))
    assert first == second
    assert first != other


def test_schedulers_take_the_hashes_that_requests_come_with(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def count(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
        hashed.append(len(token_ids) // block_size)
        return chain_hashes(parent, token_ids, block_size)

    def report_of(arrivals: list[Arrival]) -> tuple[Report, int]:
        hashed.clear()
        return run(arrivals=arrivals, dispatch={"routing_policy": "round-robin"}), sum(hashed)

    monkeypatch.setattr("penstock.scheduler.sequence.chain_hashes", count)
    arrivals = list(generate(WORKLOAD, Random(1)))
    report, num_hashed = report_of(arrivals)
    expected, all_hashed = report_of([each._replace(block_hashes=()) for each in arrivals])
    assert report == expected
    assert num_hashed < 0.1 * all_hashed  # those of answers, and of last blocks that are full


def test_routing_by_prefix_finds_more_in_the_cache_and_answers_sooner() -> None:
    aware, unaware = (
        run(dispatch={"routing_policy": policy}, workload=BUSY) for policy in ("prefix-aware", "least-loaded")
    )
    assert aware.cached_share > 1.3 * unaware.cached_share
    assert aware.latency.ttft_s.p90 < 0.5 * unaware.latency.ttft_s.p90
    assert aware.max_over_mean_requests < 1.5
    assert aware.max_over_mean_tokens < 1.5


def test_several_gateways_that_know_nothing_of_each_other_route_nearly_as_well() -> None:
    one, three = run(num_gateways=1), run(num_gateways=3)
    assert three.finished == {"stop": 400}
    assert three.cached_share > 0.85 * one.cached_share


def test_a_killed_replica_costs_retries_and_no_request() -> None:
    report = run(faults=(Kill(at_s=5.0, replica=1, restarts_after_s=3.0),))
    assert report.finished == {"stop": 400}
    assert report.num_retries > 0
    assert len(report.replicas) == 5
    assert report.output_tokens == run().output_tokens  # nothing was answered twice, and nothing left out


def test_lost_events_are_noticed_and_repaired() -> None:
    report = run(faults=(LoseKVEvents(at_s=2.0, until_s=8.0, share=0.5),))
    assert report.finished == {"stop": 400}
    assert report.num_resyncs > 0
    assert report.cached_share > 0.6 * run().cached_share


def test_a_slow_replica_is_left_out_and_taken_back() -> None:
    report = run(
        workload=BUSY,
        faults=(SlowDown(at_s=2.0, replica=0, factor=6.0, until_s=8.0),),
        dispatch={"outliers": OutlierConfig(times_in_a_row=2, first_ejection_s=3.0)},
    )
    assert report.num_ejections >= 1
    assert report.finished == {"stop": 800}
    first, *others = [replica.num_requests for replica in report.replicas]
    assert first < min(others)


def test_the_fleet_grows_under_load_up_to_its_ceiling() -> None:
    report = run(
        workload=BUSY,
        num_replicas=1,
        autoscaler=AutoscalerConfig(
            min_replicas=1, max_replicas=4, ttft_target_s=0.2, up_cooldown_s=2.0, down_cooldown_s=3.0
        ),
        times=ControlTimes(control_s=0.5, start_s=1.0),
    )
    assert report.finished == {"stop": 800}
    sizes = [size for _, size in report.sizes]
    assert max(sizes) > 1
    assert max(sizes) <= 4


def test_from_zero_replicas_the_first_requests_wait_and_are_answered() -> None:
    report = run(
        num_replicas=0,
        autoscaler=AutoscalerConfig(min_replicas=0, max_replicas=4),
        times=ControlTimes(control_s=0.5, start_s=2.0),
    )
    assert report.num_waits > 0
    assert report.finished == {"stop": 400}


def test_traffic_is_in_order_shares_prefixes_and_goes_on_in_sessions() -> None:
    arrivals = list(generate(WORKLOAD, Random(1)))
    assert len(arrivals) == 400
    assert all(a.time_s <= b.time_s for a, b in pairwise(arrivals))
    assert len({arrival.request.id for arrival in arrivals}) == 400
    assert len({arrival.block_hashes[0] for arrival in arrivals}) <= 32
    sessions: dict[str, tuple[int, ...]] = {}
    num_continued = 0
    for arrival in arrivals:
        tokens = arrival.request.prompt_token_ids
        session = arrival.request.affinity_key
        if not session:
            continue
        before = sessions.get(session)
        if before is not None:
            num_continued += 1
            assert tokens[: len(before)] == before
        sessions[session] = tokens
    assert num_continued > 20


def test_a_replica_that_keeps_failing_is_left_alone() -> None:
    """The circuit breaker opens for a replica that is full, as it does in a live fleet."""
    dead = Kill(at_s=2.0, replica=0, noticed_after_s=0.5, restarts_after_s=None)
    report = run(dispatch={"breaker": BreakerConfig(max_failures=1)}, faults=(dead,))
    assert report.finished == {"stop": 400}


def test_a_full_waiting_room_refuses_as_a_live_fleet_does() -> None:
    report = run(
        num_replicas=0,
        dispatch={"waiting": WaitingConfig(max_requests=10)},
        autoscaler=AutoscalerConfig(min_replicas=0, max_replicas=4),
        times=ControlTimes(control_s=0.5, start_s=4.0),
    )
    assert set(report.rejected) == {"overloaded"}
    assert report.finished["stop"] + report.rejected["overloaded"] == 400


def test_requests_wait_while_the_only_replica_is_replaced() -> None:
    few = replace(WORKLOAD, num_requests=60, requests_per_s=10.0)
    report = run(workload=few, num_replicas=1, faults=(Kill(at_s=2.0, replica=0, restarts_after_s=3.0),))
    assert report.finished == {"stop": 60}
    assert report.num_waits > 0
