from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest

from penstock.core.engine_config import SchedulerConfig
from penstock.core.errors import UsageError
from penstock.core.plan import (
    NO_DRAFTS,
    Draft,
    SampledToken,
    StateSlots,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprobs,
)
from penstock.core.plan_log import (
    AbortCall,
    AddCall,
    CommitCall,
    LogHeader,
    LogRecord,
    PlanCall,
    encode_record,
    read_plan_log,
)
from penstock.core.request import Request, Tier
from penstock.kvcache import KVCache
from penstock.scheduler.scheduler import Scheduler
from penstock.simulator.cost import LinearCost, fit, observations
from penstock.simulator.fleet import SimulatedReplica
from penstock.simulator.replay import replay
from penstock.simulator.workload import END_TOKEN_ID, Fixed, Tenant, Uniform, Workload, generate
from tests.simulator.drivers import make_driver

HEADER = LogHeader(
    config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128),
    num_blocks=30,
    block_size=16,
    enable_prefix_caching=True,
    max_pinned_fraction=0.5,
    max_model_len=256,
    eos_token_ids=(END_TOKEN_ID,),
)
COST = LinearCost(5e-3, 1e-5, 1e-4, 1e-7)
WORKLOAD = Workload(
    num_requests=60,
    requests_per_s=60.0,
    prompt_tokens=Uniform(1, 80),
    output_tokens=Uniform(1, 50),
    max_tokens=50,
    prefix_tokens=Fixed(48),
    tenants=(Tenant("a", 1.0, Tier.PRIORITY), Tenant("b", 1.0, Tier.BATCH)),
    mean_patience_s=3.0,
    timeout_s=5.0,
)


class LoggedScheduler(Scheduler):
    """The real scheduler, with every call noted as the engine's recorder does."""

    def __init__(self, cache: KVCache, log: list[LogRecord], config: SchedulerConfig = HEADER.config) -> None:
        super().__init__(
            config,
            cache,
            max_model_len=HEADER.max_model_len,
            eos_token_ids=frozenset(HEADER.eos_token_ids),
        )
        self.log = log

    def add(self, request: Request, now: float) -> None:
        super().add(request, now)
        self.log.append(AddCall(now, request))

    def abort(self, request_id: str, now: float) -> None:
        super().abort(request_id, now)
        self.log.append(AbortCall(now, request_id))

    def plan(self, now: float, drafts: Mapping[str, Draft] = NO_DRAFTS) -> StepPlan | None:
        plan = super().plan(now, drafts)
        self.log.append(PlanCall(now, plan, dict(drafts)))
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        events = super().commit(plan, result, now)
        self.log.append(CommitCall(now, result))
        return events


def record(depth: int) -> list[LogRecord]:
    """A run under pressure: preemptions, aborts, deadlines."""
    log: list[LogRecord] = [HEADER]
    cache = KVCache(HEADER.num_blocks)
    scheduler = LoggedScheduler(cache, log)
    driver, _ = make_driver(lambda: SimulatedReplica(scheduler, cache, COST, depth=depth, acceptance=0.2))
    driver.run(generate(WORKLOAD, Random(5)))
    assert scheduler.stats().num_preemptions > 0
    assert any(isinstance(call, AbortCall) for call in log)
    assert any(
        chunk.drafts
        for call in log
        if isinstance(call, PlanCall) and call.plan is not None
        for chunk in call.plan.chunks
    )
    return log


def test_a_recorded_run_with_states_gives_the_same_plans_again() -> None:
    states = StateSlots(num_slots=12, num_host_slots=2)
    config = msgspec.structs.replace(HEADER.config, max_draft_tokens=0)
    header = msgspec.structs.replace(HEADER, states=states, config=config)
    log: list[LogRecord] = [header]
    cache = KVCache(header.num_blocks, states=states)
    scheduler = LoggedScheduler(cache, log, config)
    driver, _ = make_driver(lambda: SimulatedReplica(scheduler, cache, COST, depth=2))
    driver.run(generate(replace(WORKLOAD, prefix_tokens=Fixed(80)), Random(5)))
    assert cache.states is not None
    assert cache.states.num_used > 0
    result = replay(encode(log))
    assert result.mismatch is None
    assert result.num_plans > 50
    assert replay(encode([HEADER, *log[1:]])).mismatch is not None


def encode(log: list[LogRecord]) -> list[bytes]:
    return [encode_record(entry) for entry in log]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_recorded_run_gives_the_same_plans_again(depth: int, tmp_path: Path) -> None:
    log = record(depth)
    path = tmp_path / "plans.jsonl"
    path.write_bytes(b"".join(encode(log)))
    with path.open("rb") as lines:
        result = replay(lines)
    assert result.mismatch is None
    assert result.num_calls == len(log) - 1
    assert result.num_plans == sum(isinstance(call, PlanCall) and call.plan is not None for call in log) > 50


def test_a_different_plan_is_found_where_it_happened() -> None:
    log = record(depth=1)
    position, call = next(
        (index, call)
        for index, call in enumerate(log)
        if isinstance(call, PlanCall) and call.plan is not None and call.plan.step_id == 20
    )
    assert isinstance(call, PlanCall)
    assert call.plan is not None
    other = StepPlan(call.plan.step_id, call.plan.chunks[:-1])
    log[position] = PlanCall(call.now, other, call.drafts)
    result = replay(encode(log))
    assert result.mismatch is not None
    assert (result.mismatch.recorded, result.mismatch.replayed) == (other, call.plan)
    assert (result.num_plans, result.num_calls) == (19, position - 1)


def test_other_settings_give_other_plans() -> None:
    log = record(depth=1)
    log[0] = msgspec.structs.replace(HEADER, config=SchedulerConfig(max_num_seqs=2))
    assert replay(encode(log)).mismatch is not None


def test_a_log_survives_writing_and_reading() -> None:
    log = record(depth=2)
    header, calls = read_plan_log(encode(log))
    assert [header, *calls] == log


def test_logprobs_are_left_out_even_when_they_are_infinite() -> None:
    sampled = SampledToken("r", 3, TokenLogprobs(float("-inf"), (1,), (float("-inf"),)))
    lines = encode([HEADER, CommitCall(1.0, StepResult(1, (sampled,), 0.1))])
    _, calls = read_plan_log(lines)
    assert list(calls) == [CommitCall(1.0, StepResult(1, (SampledToken("r", 3),), 0.1))]


def test_the_cost_model_can_be_fitted_to_a_log() -> None:
    _, calls = read_plan_log(encode(record(depth=2)))
    found = fit(observations(calls))
    assert found.base_s == pytest.approx(COST.base_s, rel=1e-3)
    assert found.per_token_s == pytest.approx(COST.per_token_s, rel=1e-2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "The header .* cannot be read"),
        ([b'{"call":"plan","now":1.0,"plan":null}\n'], "The header .* cannot be read"),
        ([b"not json\n"], "The header .* cannot be read"),
        ([*encode([HEADER]), b'{"call":"plan","no'], "Line 2 .* cannot be read"),
        (encode([HEADER, HEADER]), "Line 2 .* cannot be read"),
        (encode([HEADER, CommitCall(1.0, StepResult(9, (), 0.1))]), "step 9, which was not planned"),
    ],
)
def test_a_broken_log_is_a_clear_error(lines: list[bytes], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replay(lines)
