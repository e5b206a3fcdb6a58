"""Drafts change how many steps an answer takes, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.engine_config import SchedulerConfig
from penstock.core.plan import ON_DEVICE, Draft, DraftUse, SampledToken, StepResult
from penstock.core.request import FinishReason
from penstock.kvcache.cache import KVCache
from penstock.scheduler import Scheduler
from penstock.scheduler.acceptance import Drafting, NodeTally, Tally
from penstock.scheduler.step_builder import StepLoad
from penstock.scheduler.tenants import OUTPUT_TOKEN_WEIGHT, PROMPT_TOKEN_WEIGHT
from tests.scheduler.strict import Driver, expected_answer, make_request


def drafting_driver(**settings: object) -> Driver:
    chosen = {"max_draft_tokens": 4, "draft_share": 1.0, **settings}
    return Driver(**chosen)  # type: ignore[arg-type]


def set_step_cost(driver: Driver, base_s: float, per_row_s: float) -> None:
    """Let steps take so long, and let the predictor know."""
    driver.executor.faults.step_s = lambda num_tokens: base_s + per_row_s * num_tokens  # type: ignore[method-assign]
    for count in range(400):
        load = StepLoad(decode_sequences=1 + count % 7, draft_tokens=count % 5)
        driver.scheduler._predictor.observe(load, base_s + per_row_s * load.decode_rows)


@pytest.mark.parametrize("halves_blocks", [False, True])
def test_right_drafts_save_steps(halves_blocks: bool) -> None:
    driver = drafting_driver(halves_blocks=halves_blocks, block_size=16)
    driver.add(make_request("r", 5, 60))
    driver.run()
    assert driver.answers["r"] == expected_answer(driver.requests["r"], 60)
    assert len(driver.plans) < 30
    (stats,) = driver.scheduler.stats().drafters
    assert (stats.drafter, stats.accepted[0]) == ("test", stats.drafted[0])


def test_wrong_drafts_cost_no_token() -> None:
    driver = drafting_driver(spoiled_share=1.0)
    driver.add(make_request("r", 5, 60))
    driver.run()
    assert driver.answers["r"] == expected_answer(driver.requests["r"], 60)
    (stats,) = driver.scheduler.stats().drafters
    assert sum(stats.accepted) == 0 < sum(stats.drafted)


@pytest.mark.parametrize("starts_late", [False, True])
@pytest.mark.parametrize("spoiled", [0.0, 0.4, 1.0])
def test_a_tenant_is_charged_for_accepted_tokens_alone(spoiled: float, starts_late: bool) -> None:
    """Drafts that are rejected are no service, and accepted ones are as much as any token."""
    driver = drafting_driver(spoiled_share=spoiled, depth=2 if starts_late else 1, starts_late=starts_late)
    for tenant in "ab":
        driver.add(make_request(tenant, 5, 60, tenant=tenant))
    driver.step()
    accounts = {sequence.request.id: sequence.account for sequence in driver.scheduler._running.sequences}
    driver.run()
    (stats,) = driver.scheduler.stats().drafters
    assert sum(stats.drafted) > sum(stats.accepted) or spoiled == 0.0
    services = {tenant: account.service for tenant, account in accounts.items()}
    assert services == dict.fromkeys("ab", PROMPT_TOKEN_WEIGHT * 5 + OUTPUT_TOKEN_WEIGHT * 60)


def test_drafts_that_are_always_wrong_are_soon_left_out() -> None:
    driver = drafting_driver(spoiled_share=1.0, max_model_len=2000, num_blocks=500)
    set_step_cost(driver, 0.005, 0.001)
    driver.add(make_request("r", 5, 600))
    for _ in range(300):
        driver.step()
    drafted = sum(driver.scheduler.stats().drafters[0].drafted)
    for _ in range(250):
        driver.step()
    # A trial now and then.
    assert 0 < sum(driver.scheduler.stats().drafters[0].drafted) - drafted <= 5


def test_no_draft_is_taken_where_a_row_costs_as_much_as_a_step() -> None:
    driver = drafting_driver(max_model_len=1000, num_blocks=300)
    set_step_cost(driver, 0.0, 0.01)
    for number in range(4):
        driver.add(make_request(f"r{number}", 5, 60))
    driver.step()
    plans = [driver.step() for _ in range(40)]
    drafted = [chunk.drafts for plan in plans if plan is not None for chunk in plan.chunks if chunk.drafts]
    assert [len(drafts) for drafts in drafted] == [1], "one trial"


def test_under_load_only_drafts_that_are_nearly_always_right_are_taken() -> None:
    """A draft that is always right is a token like any other, at any load. With 12 requests here, a draft pays from a
    chance of 0.6 on."""
    lengths = {}
    for spoiled in (0.0, 0.5):
        driver = drafting_driver(spoiled_share=spoiled, max_model_len=200, num_blocks=200, block_size=16)
        set_step_cost(driver, 0.010, 0.001)
        for number in range(12):
            driver.add(make_request(f"r{number}", 5, 180))
        for _ in range(15):
            driver.step()
        chunks = [chunk for _ in range(15) if (plan := driver.step()) is not None for chunk in plan.chunks]
        lengths[spoiled] = sum(len(chunk.drafts) for chunk in chunks) / len(chunks)
    assert lengths[0.0] > 3
    assert lengths[0.5] < 0.2


def test_drafts_leave_room_for_prompts_that_wait() -> None:
    """Drafts that are always right would fill every step until the answers end."""
    driver = drafting_driver(
        max_draft_tokens=12, max_model_len=1000, num_blocks=300, block_size=16, max_num_batched_tokens=16
    )
    set_step_cost(driver, 0.010, 0.0)
    for number in range(3):
        driver.add(make_request(f"busy{number}", 5, 900, tenant="busy"))
    for _ in range(20):
        driver.step()
    driver.add(make_request("new", 40, 5, tenant="other"))
    plans = [plan for _ in range(10) if (plan := driver.step()) is not None]
    assert driver.answers["new"]
    assert any(chunk.drafts for plan in plans[:5] for chunk in plan.chunks), "drafts go on meanwhile"


def test_longer_drafts_where_rows_are_cheap() -> None:
    lengths = {}
    for per_draft_s in (0.0001, 0.004):
        driver = drafting_driver(
            max_draft_tokens=12, spoiled_share=0.2, max_model_len=1000, num_blocks=100, block_size=16
        )
        driver.executor.faults.step_s = (  # type: ignore[method-assign]
            lambda num_tokens, cost=per_draft_s: 0.01 + cost * num_tokens  # type: ignore[misc]
        )
        driver.add(make_request("r", 5, 400))
        driver.run()
        drafted = [len(chunk.drafts) for plan in driver.plans for chunk in plan.chunks if chunk.drafts]
        lengths[per_draft_s] = sum(drafted) / len(drafted)
    assert lengths[0.0001] > 1.5 * lengths[0.004]


def test_an_answer_ends_at_the_first_stop_token_among_accepted_ones() -> None:
    answer = expected_answer(make_request("r", 5, 60), 60)
    stop = next(token for token in answer[6:] if token not in answer[:6])
    driver = drafting_driver(max_draft_tokens=12)
    driver.add(make_request("r", 5, 60, stop_token_ids=(stop,)))
    driver.run()
    assert driver.answers["r"] == answer[: answer.index(stop) + 1]
    assert driver.finished["r"].finish_reason is FinishReason.STOP


@settings(max_examples=40, deadline=None)
@given(max_tokens=st.integers(1, 20), max_draft_tokens=st.integers(1, 12), room=st.integers(0, 20))
def test_drafts_never_pass_a_limit(max_tokens: int, max_draft_tokens: int, room: int) -> None:
    driver = drafting_driver(max_draft_tokens=max_draft_tokens, max_model_len=6 + room)
    driver.add(make_request("r", 5, max_tokens))
    driver.run()
    assert len(driver.answers["r"]) == driver.length_of(driver.requests["r"])


def test_drafts_preempt_nobody() -> None:
    """Both requests fit the cache to the last block: drafts take only what is spare."""
    driver = drafting_driver(num_blocks=10, max_draft_tokens=8, prefix_caching=False)
    for number in range(2):
        driver.add(make_request(f"r{number}", 4, 16))
    driver.run()
    assert not driver.scheduler.stats().num_preemptions


def test_a_step_waits_for_the_tokens_that_its_drafts_follow() -> None:
    driver = drafting_driver(depth=2)
    driver.add(make_request("r", 5, 60))
    driver.run()
    assert all(not chunk.in_flight for plan in driver.plans for chunk in plan.chunks)
    assert len(driver.plans) < 30


def test_steps_are_planned_ahead_again_when_nothing_is_drafted() -> None:
    driver = drafting_driver(depth=2, draft_share=0.0)
    driver.add(make_request("r", 5, 60))
    driver.run()
    ahead = [any(chunk.in_flight for chunk in plan.chunks) for plan in driver.plans]
    assert not any(ahead[:8])
    assert sum(ahead) > 40


def test_more_tokens_than_were_drafted_are_refused() -> None:
    cache = KVCache(16, block_size=4, enable_prefix_caching=True)
    config = SchedulerConfig(max_draft_tokens=2)
    scheduler = Scheduler(config, cache, max_model_len=64, eos_token_ids=frozenset())
    scheduler.add(make_request("r", 5, 10), 0.0)
    first = scheduler.plan(0.0)
    assert first is not None
    scheduler.commit(first, StepResult(first.step_id, (SampledToken("r", 1),), 0.01), 0.0)
    assert scheduler.wants_drafts() == {"r": 2}
    plan = scheduler.plan(0.0, {"r": Draft((1, 2, 3), "test")})
    assert plan is not None
    assert plan.chunks[0].drafts == (1, 2)
    sampled = SampledToken("r", 4, accepted=(1, 2, 3))
    with pytest.raises(ValueError, match="3 of 2 drafts"):
        scheduler.commit(plan, StepResult(plan.step_id, (sampled,), 0.01), 0.0)


def test_events_tell_of_the_drafts_that_were_verified() -> None:
    cache = KVCache(16, block_size=4, enable_prefix_caching=True)
    config = SchedulerConfig(max_draft_tokens=3)
    scheduler = Scheduler(config, cache, max_model_len=64, eos_token_ids=frozenset({9}))
    scheduler.add(make_request("r", 5, 20), 0.0)
    scheduler._speculation._row_s = 1e-5  # before that is known, drafts are short
    uses = []
    steps = (((), (), 1), ((2, 3, 4), (2,), 7), ((), (), 6), ((8, 9, 4), (8, 9, 4), 5))
    for drafts, accepted, token_id in steps:
        plan = scheduler.plan(0.0, {"r": Draft(drafts, "test")} if drafts else {})
        assert plan is not None
        sampled = SampledToken("r", token_id, accepted=accepted)
        (event,) = scheduler.commit(plan, StepResult(plan.step_id, (sampled,), 0.01), 0.0)
        uses.append((event.token_ids, event.draft_use))
    assert uses == [
        ((1,), None),
        ((2, 7), DraftUse("test", 3, 1)),
        ((6,), None),
        ((8, 9), DraftUse("test", 3, 2)),  # the answer ends with 9
    ]


def test_a_tally_starts_from_what_is_known_of_others() -> None:
    tally = Tally(decay=0.9, prior_weight=2.0)
    assert tally.chance(0, 0.7) == 0.7
    for _ in range(50):
        tally.observe(3, 1)
    assert tally.chance(0, 0.1) > 0.8
    assert tally.chance(1, 0.9) < 0.2
    assert tally.chance(2, 0.3) == 0.3, "never tried: the token in front of it was never accepted"


def test_a_request_without_luck_pauses_longer_each_time() -> None:
    drafting = Drafting()
    pauses = []
    for _ in range(6):
        drafting.pause(100)
        pauses.append(drafting.paused_until - 100)
    assert pauses == [1, 2, 4, 8, 16, 16]
    drafting.observe(("test", 0), 2, 1)
    drafting.pause(100)
    assert drafting.paused_until == 101


def test_drafts_make_up_for_the_time_of_the_host() -> None:
    """Where steps could be planned ahead, a guess that saves less than the host's time is not worth it."""
    accepted = {}
    for host_s in (0.0, 0.02):
        driver = drafting_driver(
            depth=2, max_draft_tokens=1, spoiled_share=0.7, num_blocks=300, max_model_len=1000
        )
        driver.add(make_request("r", 5, 400))
        for _ in range(350):
            while driver.num_in_flight < 2 and driver.plan() is not None:
                pass
            driver.now += 0.01 + host_s
            if driver.num_in_flight:
                driver.commit()
        accepted[host_s] = sum(bool(chunk.drafts) for plan in driver.plans for chunk in plan.chunks)
    assert accepted[0.02] < 0.3 * accepted[0.0]


def test_drafts_return_soon_after_the_load_has_fallen() -> None:
    driver = drafting_driver(
        depth=2, max_draft_tokens=2, spoiled_share=0.4, num_blocks=100, max_model_len=300, block_size=16
    )
    set_step_cost(driver, 0.010, 0.004)
    for number in range(8):
        driver.add(make_request(f"r{number}", 5, 290))

    def lengths(count: int) -> float:
        first = len(driver.plans)
        while len(driver.plans) < first + count:
            while driver.num_in_flight < 2 and driver.plan() is not None:
                pass
            driver.now += 0.01
            driver.commit()
        chunks = [chunk for plan in driver.plans[first:] for chunk in plan.chunks]
        return sum(len(chunk.drafts) for chunk in chunks) / len(chunks)

    lengths(60)
    assert driver.scheduler._speculation._plans_between_trials > 16
    assert lengths(20) < 0.1
    for number in range(7):
        driver.scheduler.abort(f"r{number}", driver.now)
    lengths(8)
    assert lengths(20) > 0.5


def test_a_gain_within_the_error_of_the_estimates_is_not_taken() -> None:
    """One of 32 requests copies its prompt, and a row costs half of its share of a step. A draft of one token would
    raise the rate by 1.3 percent, which the best of many guesses do not keep; a draft of four by 5."""
    lengths = {}
    for most in (1, 4):
        driver = drafting_driver(max_draft_tokens=most, max_model_len=200, num_blocks=500, block_size=16)
        set_step_cost(driver, 0.032, 0.001)
        for number in range(32):
            driver.add(make_request(f"r{number}", 5, 180))
        for kind in (("test", 0), ("test", 1)) * 60:
            driver.scheduler._speculation._tally(kind).observe(4, 4)
        right = driver._drafts
        driver._drafts = lambda right=right: {  # type: ignore[method-assign, misc]
            request_id: draft for request_id, draft in right().items() if request_id == "r0"
        }
        for _ in range(15):
            driver.step()
        chunks = [chunk for _ in range(30) if (plan := driver.step()) is not None for chunk in plan.chunks]
        lengths[most] = sum(len(chunk.drafts) for chunk in chunks if chunk.request_id == "r0")
    assert lengths[1] <= 2, "trials"
    assert lengths[4] > 60


@pytest.mark.parametrize(("num_requests", "num_asked"), [(4, 40), (20, 5)])
def test_the_host_seldom_looks_for_drafts_that_are_not_found(num_requests: int, num_asked: int) -> None:
    driver = drafting_driver(draft_share=0.0, max_model_len=200, num_blocks=400, block_size=16)
    set_step_cost(driver, 0.010, 0.002)
    for number in range(num_requests):
        driver.add(make_request(f"r{number}", 5, 180))
    while driver.scheduler._speculation._num_plans_without < 8:
        driver.step()
    asked = []
    for _ in range(40):
        asked.append(bool(driver.scheduler.wants_drafts()))
        driver.step()
    assert abs(sum(asked) - num_asked) <= 2


@pytest.mark.parametrize("num_requests", [1, 2, 3, 4, 9])
def test_a_trial_does_not_lead_to_the_next_one(num_requests: int) -> None:
    """The step that is planned ahead after a trial has only the requests that verify no draft. That is not a fallen
    load."""
    driver = drafting_driver(
        depth=2, max_draft_tokens=2, spoiled_share=1.0, num_blocks=200, max_model_len=300, block_size=16
    )
    set_step_cost(driver, 0.010, 0.001)
    for number in range(num_requests):
        driver.add(make_request(f"r{number}", 5, 290))
    while len(driver.plans) < 250:
        driver.step()
    num_trials = sum(any(chunk.drafts for chunk in plan.chunks) for plan in driver.plans[100:])
    assert num_trials <= 5


def test_a_slow_start_of_the_host_is_soon_forgotten() -> None:
    """The first steps of a GPU record graphs, for which the host takes a hundred times as long as later."""
    driver = drafting_driver(depth=2, spoiled_share=0.2, num_blocks=100, max_model_len=300, block_size=16)
    set_step_cost(driver, 0.010, 0.001)
    driver.add(make_request("r", 5, 280))
    for number in range(60):
        while driver.num_in_flight < 2 and driver.plan() is not None:
            pass
        driver.now += 0.4 if number < 3 else 0.012
        if driver.num_in_flight:
            driver.commit()
    assert sum(bool(chunk.drafts) for plan in driver.plans[-15:] for chunk in plan.chunks) > 10


def test_a_predictor_that_learned_nothing_but_zeros_ends_no_step() -> None:
    driver = drafting_driver()
    driver.scheduler._predictor._weights = [0.0] * 6
    driver.scheduler._predictor.observe = lambda load, elapsed_s: None  # type: ignore[method-assign]
    driver.executor.faults.step_s = lambda num_tokens: 0.01  # type: ignore[method-assign]
    driver.add(make_request("r", 5, 20))
    driver.run()
    assert driver.answers["r"] == expected_answer(driver.requests["r"], 20)


def test_plain_steps_are_known_by_the_number_of_requests() -> None:
    """A straight line fits neither few nor many requests where the time of a step is a curve of their number."""
    driver = drafting_driver()
    set_step_cost(driver, 0.010, 0.001)
    speculation = driver.scheduler._speculation
    for num_requests, step_s in ((4, 0.010), (128, 0.020)):
        for _ in range(20):
            speculation.observe_step(StepLoad(decode_sequences=num_requests), None, step_s)
    plain_steps = speculation._plain_steps
    assert plain_steps.predict(StepLoad(decode_sequences=4)) == pytest.approx(0.010, rel=0.01)
    assert plain_steps.predict(StepLoad(decode_sequences=128)) == pytest.approx(0.020, rel=0.01)
    assert plain_steps.predict(StepLoad(decode_sequences=160)) == pytest.approx(
        0.020 * (0.010 + 0.160) / (0.010 + 0.128), rel=0.01
    )


def test_the_first_steps_of_a_number_of_requests_alternate_between_drafts_and_none() -> None:
    driver = drafting_driver(max_model_len=1000, num_blocks=300)
    set_step_cost(driver, 0.010, 0.0001)
    driver.add(make_request("a", 5, 400))
    driver.step()
    drafted = [bool(plan.chunks[0].drafts) for _ in range(30) if (plan := driver.step()) is not None]
    assert drafted[:7] == [True, False, True, False, True, False, True]
    assert all(drafted[8:])


def run_with_host(driver: Driver, host_s: float, num_steps: int) -> None:
    """Let the executor idle for so long before each step that was not planned ahead."""
    for _ in range(num_steps):
        waits = not driver.num_in_flight
        while driver.num_in_flight < 2 and driver.plan() is not None:
            pass
        driver.now += 0.01 + (host_s if waits else 0.0)
        if driver.num_in_flight:
            driver.commit()


@pytest.mark.parametrize(("num_requests", "most_waits"), [(4, 12), (20, 6)])
def test_few_steps_wait_for_drafts_that_do_not_come(num_requests: int, most_waits: int) -> None:
    """The GPU idles while a step waits for the commit in front of it. With many requests that costs more tokens."""
    driver = drafting_driver(
        depth=2, draft_share=0.0, max_model_len=300, num_blocks=num_requests * 20, block_size=16
    )
    for number in range(num_requests):
        driver.add(make_request(f"r{number}", 5, 280))
    while driver.scheduler.stats().num_waiting:
        driver.step()
    first = len(driver.plans)
    run_with_host(driver, 0.01, 100)
    assert (
        sum(not any(chunk.in_flight for chunk in plan.chunks) for plan in driver.plans[first:]) <= most_waits
    )


def test_recorded_graphs_do_not_put_drafts_off_for_long() -> None:
    """Steps in which the host records a graph take ten times as long, and come one after the other."""
    driver = drafting_driver(depth=2, spoiled_share=0.3, num_blocks=100, max_model_len=1000, block_size=16)
    set_step_cost(driver, 0.010, 0.001)
    driver.add(make_request("r", 5, 990))
    run_with_host(driver, 0.001, 30)
    run_with_host(driver, 0.1, 16)
    first = len(driver.plans)
    run_with_host(driver, 0.001, 40)
    assert sum(bool(chunk.drafts) for plan in driver.plans[first:] for chunk in plan.chunks) > 25


def learned_host_s(
    before_plan_s: float, before_commit_s: float, recordings_s: tuple[float, ...] = (0.0,) * 20
) -> float:
    cache = KVCache(100, block_size=4, enable_prefix_caching=True)
    config = SchedulerConfig(max_draft_tokens=2)
    scheduler = Scheduler(config, cache, max_model_len=64, eos_token_ids=frozenset())
    now = 100.0  # the engine was idle before
    scheduler.add(make_request("r", 5, 50), now)
    for token_id, recording_s in enumerate(recordings_s):
        plan = scheduler.plan(now)
        assert plan is not None
        now += 0.01 + before_commit_s + recording_s
        sampled = (SampledToken("r", token_id),)
        scheduler.commit(plan, StepResult(plan.step_id, sampled, 0.01, is_unusual=recording_s > 0.0), now)
        now += before_plan_s
    return scheduler._speculation._host_s


def test_the_executor_idles_from_one_step_to_the_next() -> None:
    assert learned_host_s(0.0, 0.004) == pytest.approx(0.004)
    assert learned_host_s(0.003, 0.0) == pytest.approx(0.003, rel=0.3)
    assert learned_host_s(0.003, 0.004) == pytest.approx(0.007, rel=0.3)


def test_a_step_that_records_a_graph_tells_nothing_of_the_host() -> None:
    assert learned_host_s(0.0, 0.004, (0.0, 0.0, 0.2, 0.3, 0.0)) == pytest.approx(0.004)


def test_slow_first_steps_with_drafts_do_not_put_later_ones_off() -> None:
    """After a while without drafts, the drafter has to catch up with the text."""
    driver = drafting_driver(
        depth=2, spoiled_share=1.0, num_blocks=300, max_model_len=1000, max_draft_tokens=2, block_size=16
    )
    set_step_cost(driver, 0.010, 0.0001)
    driver.add(make_request("r", 5, 990))
    run_with_host(driver, 0.001, 60)
    driver.spoiled_share = 0.0
    first = len(driver.plans)
    while len(driver.plans) < first + 500:
        waits = not driver.num_in_flight
        while driver.num_in_flight < 2 and driver.plan() is not None:
            pass
        has_drafts, had_drafts = (
            any(chunk.drafts for chunk in plan.chunks) for plan in driver.plans[-2:][::-1]
        )
        catches_up = has_drafts and not had_drafts
        driver.now += 0.01 + (0.1 if catches_up else 0.001 if waits else 0.0)
        if driver.num_in_flight:
            driver.commit()
        if driver.finished:
            break
    drafted = [any(chunk.drafts for chunk in plan.chunks) for plan in driver.plans[first:]]
    assert sum(drafted) > 0.4 * len(drafted)


@pytest.mark.parametrize(
    ("host_s", "spoiled_share", "is_late"), [(0.02, 0.0, True), (0.0, 0.0, False), (0.005, 0.3, False)]
)
def test_a_step_is_planned_while_drafts_are_in_flight_if_that_pays(
    host_s: float, spoiled_share: float, is_late: bool
) -> None:
    driver = drafting_driver(
        depth=2, spoiled_share=spoiled_share, num_blocks=300, max_model_len=1000, starts_late=True
    )
    set_step_cost(driver, 0.010, 0.0001)
    driver.add(make_request("r", 5, 900))
    run_with_host(driver, host_s, 100)
    assert (driver.num_late > 30) == is_late
    assert driver.num_late < 5 or is_late
    driver.run()


def test_no_step_starts_late_while_a_prompt_waits() -> None:
    driver = drafting_driver(
        depth=2, num_blocks=300, max_model_len=1000, starts_late=True, late_share=1.0, max_num_seqs=2
    )
    driver.add(make_request("r", 5, 900))
    while not driver.num_late:
        driver.step()
    for number in range(3):
        driver.add(make_request(f"q{number}", 5, 40))
    before = driver.num_late
    for _ in range(20):
        driver.step()
    assert driver.scheduler.num_waiting > 0
    assert driver.num_late == before
    driver.run()


@pytest.mark.parametrize("sampling", [{"presence_penalty": 0.5}, {"min_tokens": 3}, {"logit_bias": {1: 2.0}}])
def test_requests_whose_samples_depend_on_the_answer_wait_for_their_drafts(sampling: dict[str, Any]) -> None:
    driver = drafting_driver(depth=2, num_blocks=100, max_model_len=300, starts_late=True, late_share=1.0)
    driver.add(make_request("r", 5, 200, **sampling))
    driver.run()
    assert driver.num_late == 0
    (stats,) = driver.scheduler.stats().drafters
    assert sum(stats.accepted) > 100


@pytest.mark.parametrize(("spoiled_share", "longest"), [(0.0, 4), (1.0, 1)])
def test_the_rest_of_a_draft_is_dropped_once_a_token_differs(spoiled_share: float, longest: int) -> None:
    """Tokens that continue a wrong one are verified in vain once, and no further ones are taken from that draft."""
    driver = drafting_driver(
        depth=2,
        num_blocks=300,
        max_model_len=1000,
        starts_late=True,
        late_share=1.0,
        spoiled_share=spoiled_share,
    )
    driver.add(make_request("r", 5, 600))
    driver.run()
    found = num_in_a_row = 0
    for plan in driver.plans:
        num_in_a_row = num_in_a_row + 1 if any(chunk.unsettled for chunk in plan.chunks) else 0
        found = max(found, num_in_a_row)
    assert found >= longest if longest > 1 else found == 1


def test_a_tree_is_cut_by_what_its_nodes_bring() -> None:
    """Nodes count by their rank, and a tree may have more of them than a chain may have tokens."""
    cache = KVCache(64, block_size=16, enable_prefix_caching=True)
    config = SchedulerConfig(max_draft_tokens=3)
    scheduler = Scheduler(config, cache, max_model_len=512, eos_token_ids=frozenset())
    scheduler.add(make_request("r", 5, 400), 0.0)
    scheduler._speculation._row_s = 1e-5  # before that is known, drafts are short
    for count in range(400):
        load = StepLoad(decode_sequences=1, draft_tokens=count % 16)
        scheduler._predictor.observe(load, 0.005 + 0.0002 * load.decode_rows)
    lengths = []
    tree = Draft((ON_DEVICE,) * 15, "heads", tree_depth=3)
    for number in range(120):
        plan = scheduler.plan(0.0, {"r": tree} if number else {})
        assert plan is not None
        (chunk,) = plan.chunks
        accepted: dict[str, tuple[int, ...]] = {}
        if chunk.drafts:
            assert chunk.tree_depth == 3
            lengths.append(len(chunk.drafts))
            if lengths[-1] > 2 and number % 2:  # the first node and a child of it
                accepted = {"accepted": (7, 8), "nodes": (0, 2)}
        sampled = SampledToken("r", 5, **accepted)
        elapsed_s = 0.005 + 0.0002 * chunk.num_tokens
        scheduler.commit(plan, StepResult(plan.step_id, (sampled,), elapsed_s), elapsed_s)
        scheduler.check_integrity()
    assert max(lengths) == 15
    assert set(lengths[-20:]) <= {3, 4}, "now and then a node that was left out is tried again"
    (stats,) = scheduler.stats().drafters
    assert len(stats.drafted) == 3
    assert stats.accepted[:3] == (stats.accepted[0], stats.accepted[0], 0)[: len(stats.accepted)]


def test_a_tree_has_room_in_the_answer() -> None:
    cache = KVCache(64, block_size=16, enable_prefix_caching=True)
    scheduler = Scheduler(
        SchedulerConfig(max_draft_tokens=3), cache, max_model_len=64, eos_token_ids=frozenset()
    )
    scheduler.add(make_request("r", 5, 6), 0.0)
    scheduler._speculation._row_s = 1e-5
    tree = Draft((ON_DEVICE,) * 15, "heads", tree_depth=3)
    for most in (0, 4):
        plan = scheduler.plan(0.0, {"r": tree} if most else {})
        assert plan is not None
        assert len(plan.chunks[0].drafts) == most
        sampled = (SampledToken("r", 1),)
        scheduler.commit(plan, StepResult(plan.step_id, sampled, 0.01), 0.0)


def test_nodes_are_as_likely_as_they_were_accepted() -> None:
    tally = NodeTally(decay=0.99, prior_weight=6.0, first_chance=0.6)
    assert tally.chances(3) == [0.6] * 3
    for number in range(300):
        tally.observe(3, (0, 2) if number % 2 else ())
    first, second, third = tally.chances(3)
    assert first == pytest.approx(0.5, abs=0.05)
    assert second == third == pytest.approx(0.25, abs=0.05), (
        "the third is accepted, and comes with the second"
    )
    assert tally.chances(1) == [first]
    for _ in range(400):
        tally.observe(1, (0,))
    assert tally.chances(3)[2] > 0.6, "nodes that are left out are tried again"
