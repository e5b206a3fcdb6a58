from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from random import Random

import pytest

from penstock.core.config import RoutingPolicy
from penstock.core.engine_config import CacheConfig, SchedulerConfig
from penstock.core.plan import NO_DRAFTS, Draft, StepPlan, StepResult, TokenEvent
from penstock.core.request import FinishReason, Tier
from penstock.kvcache import KVCache
from penstock.scheduler.scheduler import Scheduler
from penstock.simulator.cost import LinearCost
from penstock.simulator.driver import Driver
from penstock.simulator.fleet import SimulatedReplica
from penstock.simulator.report import Outcome
from penstock.simulator.simulation import ReplicaConfig
from penstock.simulator.workload import END_TOKEN_ID, Fixed, LogNormal, Tenant, Uniform, Workload, generate
from tests.simulator.drivers import make_driver, replicas_of

COST = LinearCost(base_s=5e-3, per_token_s=1e-5, per_sequence_s=1e-4, per_context_token_s=1e-7)
ROOMY = ReplicaConfig(num_blocks=2000, max_model_len=1024, cost=COST)
TIGHT = ReplicaConfig(
    num_blocks=24,
    max_model_len=256,
    cost=COST,
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
)
MIXED = Workload(
    num_requests=150,
    requests_per_s=40.0,
    prompt_tokens=Uniform(1, 100),
    output_tokens=Uniform(1, 60),
    max_tokens=60,
    prefix_tokens=Fixed(40),
    prefixes_per_tenant=2,
    tenants=(Tenant("a", 1.0, Tier.PRIORITY), Tenant("b", 2.0), Tenant("c", 1.0, Tier.BATCH)),
)


def run(
    workload: Workload = MIXED,
    replica: ReplicaConfig = ROOMY,
    *,
    num_replicas: int = 2,
    policy: RoutingPolicy = "least-loaded",
    seed: int = 0,
) -> tuple[Driver, list[Outcome]]:
    """Run to the end and check what must hold after any run. Outcomes are in order of arrival."""
    driver, ended = make_driver(replica.build, num_replicas, policy)
    arrivals = list(generate(workload, Random(seed)))
    driver.run(arrivals)
    by_id = {outcome.arrival.request.id: outcome for outcome in ended}
    assert len(by_id) == len(ended)
    outcomes = [by_id[arrival.request.id] for arrival in arrivals]
    for outcome in outcomes:
        assert outcome.end_s is not None
        assert (outcome.finish_reason is None) != (outcome.rejection is None)
        assert all(earlier <= later for earlier, later in pairwise(outcome.token_times_s))
        assert all(outcome.arrival.time_s < time_s <= outcome.end_s for time_s in outcome.token_times_s)
    for simulated in replicas_of(driver):
        assert not simulated.scheduler.has_work
        assert simulated.num_requests == 0
        simulated.cache.check_integrity([])
    return driver, outcomes


def full_answer(outcome: Outcome) -> list[int]:
    arrival = outcome.arrival
    length = min(arrival.num_output_tokens, arrival.request.sampling.max_tokens)
    return [arrival.output_token(index) for index in range(length)]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [24, 2000])
def test_every_request_is_answered_once_with_exactly_its_tokens(depth: int, num_blocks: int) -> None:
    """With few blocks this goes through preemption and recomputation, and with depth through plans made ahead."""
    config = ReplicaConfig(
        num_blocks=num_blocks, max_model_len=256, depth=depth, cost=COST, scheduler=TIGHT.scheduler
    )
    driver, outcomes = run(replica=config)
    assert [outcome.token_ids for outcome in outcomes] == [full_answer(outcome) for outcome in outcomes]
    assert {outcome.finish_reason for outcome in outcomes} == {FinishReason.STOP}
    preemptions = sum(replica.scheduler.stats().num_preemptions for replica in replicas_of(driver))
    # With room for all, a request of a higher tier may still take the place of another one.
    assert preemptions > 10 if num_blocks == 24 else preemptions < 5


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    assert run(seed=seed)[1] == run(seed=seed)[1]


def test_answers_do_not_depend_on_caching_or_planning_ahead() -> None:
    answers = []
    for depth in (1, 2):
        for caching in (True, False):
            config = ReplicaConfig(
                num_blocks=24,
                max_model_len=256,
                depth=depth,
                cost=COST,
                scheduler=TIGHT.scheduler,
                cache=CacheConfig(enable_prefix_caching=caching),
            )
            answers.append([outcome.token_ids for outcome in run(replica=config)[1]])
    assert all(answer == answers[0] for answer in answers)


def test_max_tokens_cuts_an_answer_short() -> None:
    workload = Workload(
        num_requests=5, requests_per_s=10.0, prompt_tokens=Fixed(20), output_tokens=Fixed(30), max_tokens=7
    )
    _, outcomes = run(workload)
    assert {outcome.finish_reason for outcome in outcomes} == {FinishReason.LENGTH}
    assert {len(outcome.token_ids) for outcome in outcomes} == {7}


def test_clients_that_leave_get_a_beginning_of_their_answer_and_free_their_blocks() -> None:
    workload = Workload(
        num_requests=200,
        requests_per_s=100.0,
        prompt_tokens=Uniform(1, 100),
        output_tokens=Uniform(1, 60),
        mean_patience_s=0.5,
    )
    _, outcomes = run(workload, TIGHT)
    reasons = Counter(outcome.finish_reason for outcome in outcomes)
    assert reasons[FinishReason.ABORT] > 20
    assert reasons[FinishReason.STOP] > 20
    for outcome in outcomes:
        answer = full_answer(outcome)
        assert outcome.token_ids == answer[: len(outcome.token_ids)]
        if outcome.finish_reason is FinishReason.ABORT:
            assert outcome.end_s == outcome.arrival.departs_s
            assert len(outcome.token_ids) < len(answer)


def test_deadlines_end_requests_that_take_too_long() -> None:
    workload = Workload(
        num_requests=100,
        requests_per_s=1000.0,
        prompt_tokens=Fixed(50),
        output_tokens=Fixed(50),
        timeout_s=1.0,
    )
    _, outcomes = run(workload, TIGHT)
    reasons = Counter(outcome.finish_reason for outcome in outcomes)
    assert reasons[FinishReason.DEADLINE] > 10
    assert reasons[FinishReason.STOP] > 10
    for outcome in outcomes:
        assert outcome.end_s is not None
        assert outcome.end_s <= outcome.arrival.time_s + 1.0 + 0.1


def test_a_full_queue_refuses_and_everything_accepted_is_served() -> None:
    config = ReplicaConfig(
        num_blocks=24,
        max_model_len=256,
        cost=COST,
        scheduler=SchedulerConfig(max_num_seqs=4, max_queue_requests=5, max_num_batched_tokens=64),
    )
    workload = Workload(
        num_requests=100, requests_per_s=10_000.0, prompt_tokens=Fixed(50), output_tokens=Fixed(20)
    )
    _, outcomes = run(workload, config)
    rejections = Counter(outcome.rejection for outcome in outcomes)
    assert rejections["overloaded"] > 50
    for outcome in outcomes:
        assert outcome.token_ids == ([] if outcome.rejection else full_answer(outcome))


def test_a_prompt_that_can_never_fit_is_refused_and_the_rest_is_served() -> None:
    workload = Workload(
        num_requests=50, requests_per_s=10.0, prompt_tokens=Uniform(1, 400), output_tokens=Fixed(3)
    )
    _, outcomes = run(workload, TIGHT)
    for outcome in outcomes:
        too_long = len(outcome.arrival.request.prompt_token_ids) > 255
        assert (outcome.rejection == "context_length_exceeded") == too_long


def test_policies_spread_requests() -> None:
    _, in_turn = run(policy="round-robin", num_replicas=3)
    assert [outcome.replica_id for outcome in in_turn] == [
        f"replica-{number % 3}" for number in range(len(in_turn))
    ]
    _, by_load = run(num_replicas=3)
    assert max(Counter(outcome.replica_id for outcome in by_load).values()) < 80


def test_more_replicas_answer_sooner() -> None:
    few_end_s = max(outcome.end_s or 0.0 for outcome in run(replica=TIGHT, num_replicas=1)[1])
    many_end_s = max(outcome.end_s or 0.0 for outcome in run(replica=TIGHT, num_replicas=4)[1])
    assert many_end_s < few_end_s / 2


def test_a_shared_prefix_is_computed_once_per_replica() -> None:
    workload = Workload(
        num_requests=50,
        requests_per_s=20.0,
        prompt_tokens=Fixed(10),
        output_tokens=Fixed(5),
        prefix_tokens=Fixed(320),
    )
    driver, outcomes = run(workload, num_replicas=2)
    assert Counter(outcome.num_cached_tokens for outcome in outcomes) == {320: 48, 0: 2}
    assert sum(replica.num_tokens_computed for replica in replicas_of(driver)) == 2 * 320 + 50 * (10 + 4)


class RecordingScheduler(Scheduler):
    """The real scheduler, noting how far plans run ahead of commits and that time never goes back."""

    times_s: list[float]
    max_ahead: int

    def __init__(self, cache: KVCache) -> None:
        super().__init__(
            SchedulerConfig(), cache, max_model_len=1024, eos_token_ids=frozenset({END_TOKEN_ID})
        )
        self.times_s = []
        self.num_ahead = self.max_ahead = 0

    def plan(self, now: float, drafts: Mapping[str, Draft] = NO_DRAFTS) -> StepPlan | None:
        self.times_s.append(now)
        plan = super().plan(now, drafts)
        if plan is not None:
            self.num_ahead += 1
            self.max_ahead = max(self.max_ahead, self.num_ahead)
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        self.times_s.append(now)
        self.num_ahead -= 1
        return super().commit(plan, result, now)


@pytest.mark.parametrize("depth", [1, 2])
def test_depth_is_how_far_plans_run_ahead_and_time_is_monotone(depth: int) -> None:
    cache = KVCache(2000)
    scheduler = RecordingScheduler(cache)
    driver, _ = make_driver(lambda: SimulatedReplica(scheduler, cache, COST, depth=depth))
    driver.run(generate(MIXED, Random(0)))
    assert scheduler.max_ahead == depth
    assert all(earlier <= later for earlier, later in pairwise(scheduler.times_s))
    assert driver.clock.now() >= scheduler.times_s[-1]


def test_a_step_occupies_its_replica_for_as_long_as_the_cost_model_says() -> None:
    workload = Workload(num_requests=1, requests_per_s=1.0, prompt_tokens=Fixed(16), output_tokens=Fixed(3))
    cost = LinearCost(base_s=0.5, per_token_s=0.01, per_sequence_s=0.0, per_context_token_s=0.0)
    _, (outcome,) = run(workload, ReplicaConfig(num_blocks=10, max_model_len=100, cost=cost), num_replicas=1)
    start_s = outcome.arrival.time_s
    assert outcome.token_times_s == pytest.approx([start_s + 0.66, start_s + 1.17, start_s + 1.68])


def test_a_lightly_loaded_replica_makes_nobody_wait_for_long() -> None:
    """What the step-time predictor learns must keep prompts moving, whatever mix of steps it learns from."""
    workload = Workload(
        num_requests=400,
        requests_per_s=10.0,
        prompt_tokens=LogNormal(300, 1.0, 8000),
        output_tokens=LogNormal(150, 0.8, 2000),
        max_tokens=2000,
        prefix_tokens=Fixed(512),
        prefixes_per_tenant=4,
    )
    _, outcomes = run(workload, ReplicaConfig(), num_replicas=1)
    assert max(outcome.token_times_s[0] - outcome.arrival.time_s for outcome in outcomes) < 1.0
