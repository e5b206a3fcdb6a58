"""Continuous batching, chunked prefill, overlap, and how requests end."""

from __future__ import annotations

import pytest

from penstock.core.errors import ContextLengthExceeded, InvalidRequest
from penstock.core.plan import SampledToken, StepResult
from penstock.core.request import FinishReason, Tier
from tests.scheduler.strict import EOS, VOCABULARY, Driver, expected_answer, make_request


def sizes(driver: Driver) -> list[dict[str, int]]:
    """Tokens by request, for each plan."""
    return [{chunk.request_id: chunk.num_tokens for chunk in plan.chunks} for plan in driver.plans]


def test_a_long_prompt_is_computed_in_chunks_and_samples_once_at_its_end() -> None:
    driver = Driver(max_num_batched_tokens=10)
    driver.add(make_request("a", 25, 2))
    driver.run()
    assert sizes(driver) == [{"a": 10}, {"a": 10}, {"a": 5}, {"a": 1}]
    assert [plan.chunks[0].samples for plan in driver.plans] == [False, False, True, True]


def test_decodes_come_first_then_running_prefills_then_admissions() -> None:
    driver = Driver(max_num_batched_tokens=20)
    driver.add(make_request("decoding", 4, 20))
    driver.step()
    driver.add(make_request("prefilling", 30, 2))
    driver.step()
    driver.add(make_request("waiting", 30, 2))
    driver.step()
    assert sizes(driver)[1:] == [
        {"decoding": 1, "prefilling": 19},
        {"decoding": 1, "prefilling": 11},  # 8 tokens are left, too few to be worth a chunk
    ]
    driver.step()
    assert sizes(driver)[3] == {"decoding": 1, "prefilling": 1, "waiting": 18}
    driver.run()


def test_a_short_prompt_need_not_wait_for_a_very_long_one() -> None:
    driver = Driver(max_num_batched_tokens=80)
    driver.add(make_request("long", 190, 2))
    driver.step()
    driver.add(make_request("short", 12, 2))
    driver.step()
    assert sizes(driver) == [{"long": 80}, {"long": 60, "short": 12}]
    driver.run()


def test_an_urgent_prompt_goes_before_a_running_prefill_that_is_less_urgent_and_not_old() -> None:
    driver = Driver(num_blocks=200, max_num_batched_tokens=30, aging_s=1.0)
    driver.add(make_request("long", 190, 2))
    driver.step()
    driver.add(make_request("urgent", 40, 2, tier=Tier.PRIORITY))
    driver.step()
    assert sizes(driver)[-1] == {"urgent": 30}
    driver.step()
    assert sizes(driver)[-1] == {"urgent": 10, "long": 20}
    driver.add(make_request("urgent too", 40, 2, tier=Tier.PRIORITY))
    driver.now += 1.0
    driver.step()
    assert sizes(driver)[-1] == {"urgent": 1, "long": 29}
    driver.run()


def test_new_requests_join_at_every_step_and_seats_are_bounded() -> None:
    driver = Driver(max_num_seqs=2)
    for name in "abc":
        driver.add(make_request(name, 4, 3))
    driver.step()
    assert set(sizes(driver)[0]) == {"a", "b"}
    driver.run()
    assert set(sizes(driver)[3]) == {"c"}
    assert driver.plans[3].released == ("a", "b")


def test_a_plan_ahead_of_its_commit_says_which_token_is_in_flight() -> None:
    driver = Driver()
    driver.add(make_request("a", 4, 4))
    for _ in range(3):
        driver.plan()
    assert [plan.chunks[0].in_flight for plan in driver.plans] == [0, 1, 1]
    assert [plan.chunks[0].start for plan in driver.plans] == [0, 4, 5]
    driver.run()


def test_nothing_is_planned_beyond_max_tokens_while_samples_are_in_flight() -> None:
    driver = Driver()
    driver.add(make_request("a", 4, 2))
    assert driver.plan() is not None
    assert driver.plan() is not None
    assert driver.plan() is None
    driver.run()
    assert len(driver.plans) == 2


def test_a_sample_of_a_request_that_ended_meanwhile_is_discarded() -> None:
    request = make_request("a", 4, 8)
    second_token = expected_answer(request, 2)[1]
    driver = Driver(depth=3)
    driver.add(make_request("a", 4, 8, stop_token_ids=(second_token,)))
    driver.run()
    assert driver.finished["a"].finish_reason is FinishReason.STOP
    assert len(driver.answers["a"]) <= 2
    assert len(driver.plans) > len(driver.answers["a"])


def test_an_id_may_come_back_while_a_step_of_its_former_owner_is_in_flight() -> None:
    driver = Driver()
    driver.add(make_request("a", 6, 8))
    driver.plan()
    driver.abort("a")
    driver.add(make_request("a", (9, 9, 9), 2))
    plan = driver.plan()
    assert plan is not None
    assert plan.released == ("a",)
    assert plan.chunks[0].begins
    driver.run()
    assert len(driver.answers["a"]) == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_frees_blocks_at_once_and_names_the_request_released_once(depth: int) -> None:
    driver = Driver(depth=depth)
    driver.add(make_request("a", 20, 9))
    driver.add(make_request("b", 20, 9))
    driver.step()
    used = driver.cache.pool.num_active
    driver.abort("a")
    assert driver.cache.pool.num_active < used
    driver.abort("a")
    driver.abort("never seen")
    driver.run()
    assert [request_id for plan in driver.plans for request_id in plan.released] == ["a"]
    assert driver.answers["a"] == expected_answer(driver.requests["a"], len(driver.answers["a"]))


def commit_token(driver: Driver, token_id: int = 0, error: str | None = None) -> None:
    """Plan a step of one request, and commit a token of the test's choice."""
    plan = driver.scheduler.plan(driver.now)
    assert plan is not None
    sampled = SampledToken(plan.chunks[0].request_id, token_id, error=error)
    events = driver.scheduler.commit(plan, StepResult(plan.step_id, (sampled,), 0.01), driver.now)
    driver.scheduler.check_integrity()
    for event in events:
        driver.answers[event.request_id].extend(event.token_ids)
        if event.finish_reason is not None:
            driver.finished[event.request_id] = event


def test_end_of_sequence_ends_an_answer_and_is_part_of_it() -> None:
    driver = Driver()
    driver.add(make_request("a", 4, 8))
    commit_token(driver, 1)
    commit_token(driver, EOS)
    assert driver.answers["a"] == [1, EOS]
    assert driver.finished["a"].finish_reason is FinishReason.STOP
    assert not driver.scheduler.has_work


def test_end_of_sequence_can_be_ignored_but_not_a_stop_token() -> None:
    driver = Driver()
    driver.add(make_request("a", 4, 8, ignore_eos=True, stop_token_ids=(7,)))
    commit_token(driver, EOS)
    assert "a" not in driver.finished
    commit_token(driver, 7)
    assert driver.finished["a"].finish_reason is FinishReason.STOP


def test_an_answer_has_min_tokens_before_anything_stops_it() -> None:
    driver = Driver()
    driver.add(make_request("a", 4, 8, min_tokens=3, stop_token_ids=(7,)))
    for token_id in (EOS, 7, 7):
        assert "a" not in driver.finished
        commit_token(driver, token_id)
    assert driver.finished["a"].finish_reason is FinishReason.STOP


def test_a_position_that_cannot_be_sampled_ends_its_request_alone() -> None:
    driver = Driver()
    driver.add(make_request("a", 4, 8))
    commit_token(driver, error="The logits are not numbers.")
    assert driver.finished["a"].finish_reason is FinishReason.ERROR
    assert driver.finished["a"].error == "The logits are not numbers."
    assert driver.finished["a"].num_cached_tokens == 0
    assert driver.cache.pool.num_active == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "config", "expected"),
    [
        (4, 6, {}, 6),
        (4, 100, {"max_output_tokens": 7}, 7),
        (190, 100, {}, 10),  # the context ends
        (20, 100, {"num_blocks": 8}, 12),  # the KV cache ends
    ],
)
def test_an_answer_is_cut_at_the_nearest_limit(
    prompt: int, max_tokens: int, config: dict[str, int], expected: int
) -> None:
    driver = Driver(**config)  # type: ignore[arg-type]
    driver.add(make_request("a", prompt, max_tokens))
    driver.run()
    assert len(driver.answers["a"]) == expected
    assert driver.finished["a"].finish_reason is FinishReason.LENGTH


def test_requests_that_cannot_be_served_are_refused_and_leave_no_trace() -> None:
    driver = Driver(num_blocks=8)
    with pytest.raises(InvalidRequest, match="empty"):
        driver.add(make_request("a", ()))
    with pytest.raises(InvalidRequest, match="max_tokens"):
        driver.add(make_request("a", 4, -1))
    with pytest.raises(ContextLengthExceeded, match="32 tokens, and this server takes at most 31"):
        driver.add(make_request("a", 32))
    driver.add(make_request("a", 31))
    with pytest.raises(InvalidRequest, match="already"):
        driver.add(make_request("a", 4))
    driver.run()


def test_commits_out_of_order_are_refused() -> None:
    driver = Driver()
    driver.add(make_request("a", 4))
    first = driver.scheduler.plan(0.0)
    second = driver.scheduler.plan(0.0)
    assert first is not None
    assert second is not None
    with pytest.raises(ValueError, match="out of order"):
        driver.scheduler.commit(second, StepResult(second.step_id, (SampledToken("a", 1),), 0.1), 0.0)
    with pytest.raises(ValueError, match="0 samples of 1"):
        driver.scheduler.commit(first, StepResult(first.step_id, (), 0.1), 0.0)


def test_the_first_event_says_how_long_the_request_waited() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(make_request("a", 4, 3))
    driver.add(make_request("b", 4, 3))
    driver.run()
    assert driver.first_events["a"].queue_s == 0.0
    assert driver.first_events["b"].queue_s == pytest.approx(0.03)


def test_stats_follow_the_requests() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(make_request("a", 6, 3))
    driver.add(make_request("b", 9, 3))
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (1, 1, 9)
    assert (stats.num_kv_blocks, stats.num_kv_blocks_used) == (64, 2)
    assert stats.kv_fragmentation == pytest.approx(2 / 8)
    driver.run()
    assert driver.scheduler.stats().kv_fragmentation == 0.0


def test_prompts_that_run_count_until_their_steps_are_committed() -> None:
    driver = Driver(max_num_batched_tokens=4)
    driver.add(make_request("a", 10, 3))
    driver.step()
    assert driver.scheduler.stats().num_prefill_tokens == 6
    assert driver.scheduler.plan(1.0) is not None
    assert driver.scheduler.stats().num_prefill_tokens == 6  # four of them in flight


def test_tokens_stay_inside_the_vocabulary_of_the_fake() -> None:
    assert all(token < VOCABULARY for token in expected_answer(make_request("a"), 50))
