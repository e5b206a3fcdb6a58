"""The order of admission, the bounds of the queue, and deadlines."""

from __future__ import annotations

import pytest

from penstock.core.errors import Overloaded
from penstock.core.plan import Prefill
from penstock.core.request import FinishReason, Tier
from tests.scheduler.strict import Driver, make_request


def order(driver: Driver) -> list[str]:
    """Request ids in the order of their first chunk."""
    return list(
        dict.fromkeys(chunk.request_id for plan in driver.plans for chunk in plan.chunks if chunk.begins)
    )


def one_at_a_time(**config: object) -> Driver:
    """A driver with one seat, taken by a request that nobody may displace."""
    driver = Driver(max_num_seqs=1, **config)
    driver.add(make_request("seated", 4, 3, tier=Tier.PRIORITY))
    driver.step()
    return driver


def test_tiers_go_in_order_of_urgency() -> None:
    driver = one_at_a_time()
    for tier in (Tier.BATCH, Tier.DEFAULT, Tier.PRIORITY):
        driver.add(make_request(tier.value, 4, 1, tier=tier))
    driver.run()
    assert order(driver) == ["seated", "priority", "default", "batch"]


def test_tiers_with_shares_take_turns_in_proportion() -> None:
    driver = one_at_a_time(tier_shares="2,1,1", length_bins="off")
    for index in range(4):
        driver.add(make_request(f"priority{index}", 4, 1, tier=Tier.PRIORITY))
        driver.add(make_request(f"default{index}", 4, 1, tier=Tier.DEFAULT))
    driver.run()
    first_six = order(driver)[1:7]
    assert sum(name.startswith("priority") for name in first_six) == 4
    assert sum(name.startswith("default") for name in first_six) == 2


def test_a_tier_without_a_share_waits_for_all_others() -> None:
    driver = one_at_a_time(tier_shares="1,1,0")
    for tier in (Tier.BATCH, Tier.DEFAULT, Tier.PRIORITY):
        driver.add(make_request(tier.value, 4, 1, tier=tier))
    driver.run()
    assert order(driver)[-1] == "batch"
    assert len(order(driver)) == 4


def test_idle_time_of_a_tier_is_no_credit() -> None:
    driver = one_at_a_time(tier_shares="1,1,1", length_bins="off")
    for index in range(6):
        driver.add(make_request(f"default{index}", 4, 1, tier=Tier.DEFAULT))
    while len(order(driver)) < 4:
        driver.step()
    for index in range(3):
        driver.add(make_request(f"batch{index}", 4, 1, tier=Tier.BATCH))
    driver.run()
    assert order(driver)[4:8].count("batch0") + order(driver)[4:8].count("batch1") == 2
    assert "default3" in order(driver)[4:8]


def test_waiting_makes_more_urgent_one_tier_at_a_time() -> None:
    driver = one_at_a_time(aging_s=10.0)
    driver.add(make_request("old batch", 4, 1, tier=Tier.BATCH))
    driver.now += 10.5
    driver.add(make_request("new default", 4, 1, tier=Tier.DEFAULT))
    driver.add(make_request("new priority", 4, 1, tier=Tier.PRIORITY))
    driver.run()
    assert order(driver) == ["seated", "new priority", "old batch", "new default"]


def test_an_aged_queue_of_one_tenant_does_not_keep_others_of_its_tier_waiting() -> None:
    driver = one_at_a_time(aging_s=10.0)
    for index in range(6):
        driver.add(make_request(f"greedy{index}", 20, 5, tenant="greedy"))
    driver.now += 10.5
    while len(order(driver)) < 3:
        driver.step()
    for index in range(2):
        driver.add(make_request(f"modest{index}", 4, 1, tenant="modest"))
    driver.run()
    assert {"modest0", "modest1"} <= set(order(driver)[3:6])


def test_an_aged_request_goes_before_new_ones_of_its_tenant() -> None:
    driver = one_at_a_time(aging_s=10.0)
    driver.add(make_request("long", 4, 100))
    driver.now += 10.5
    driver.add(make_request("short", 4, 1))
    driver.run()
    assert order(driver) == ["seated", "long", "short"]


def test_tenants_take_turns_by_the_service_they_received() -> None:
    driver = one_at_a_time()
    for index in range(4):
        driver.add(make_request(f"greedy{index}", 4, 2, tenant="greedy"))
    for index in range(2):
        driver.add(make_request(f"modest{index}", 4, 2, tenant="modest"))
    driver.run()
    assert order(driver)[1:5] == ["greedy0", "modest0", "greedy1", "modest1"]


def test_a_heavy_tenant_waits_until_the_others_had_as_much() -> None:
    driver = one_at_a_time()
    driver.add(make_request("heavy0", 100, 50, tenant="heavy"))
    driver.add(make_request("heavy1", 4, 50, tenant="heavy"))
    for index in range(5):
        driver.add(make_request(f"light{index}", 4, 1, tenant="light"))
    driver.run()
    assert order(driver)[1:] == ["heavy0", "light0", "light1", "light2", "light3", "light4", "heavy1"]


def test_idle_time_is_no_credit() -> None:
    driver = Driver(max_num_seqs=1)
    for index in range(3):
        driver.add(make_request(f"busy{index}", 100, 16, tenant="busy"))
    for _ in range(16):
        driver.step()
    for index in range(3):
        driver.add(make_request(f"new{index}", 100, 16, tenant="new"))
    driver.run()
    assert order(driver) == ["busy0", "busy1", "new0", "busy2", "new1", "new2"]


def test_shorter_answers_go_first_within_a_bounded_time() -> None:
    driver = one_at_a_time(aging_s=14.0)  # one second for each bin of length
    driver.add(make_request("long", 4, 128))  # three bins past the shortest
    driver.now += 2.0
    driver.add(make_request("short", 4, 8))
    driver.now += 2.0
    driver.add(make_request("short but late", 4, 8))
    driver.run()
    assert order(driver) == ["seated", "short", "long", "short but late"]


def test_the_queue_is_bounded_by_requests_beyond_the_free_seats() -> None:
    driver = Driver(max_num_seqs=2, max_queue_requests=3)
    for index in range(5):
        driver.add(make_request(f"r{index}"))
    with pytest.raises(Overloaded, match="5 waiting requests") as refused:
        driver.add(make_request("one too many"))
    assert refused.value.retry_after_s == 1.0
    driver.step()
    with pytest.raises(Overloaded):
        driver.add(make_request("still too many"))
    driver.run()
    assert len(driver.finished) == 5


def test_a_queue_without_room_still_lets_an_idle_engine_work() -> None:
    driver = Driver(max_num_seqs=1, max_queue_requests=0, max_queue_tokens=0)
    driver.add(make_request("a", 40))
    with pytest.raises(Overloaded):
        driver.add(make_request("b"))
    driver.run()


def test_the_queue_is_bounded_by_prompt_tokens() -> None:
    driver = Driver(max_queue_tokens=30)
    driver.add(make_request("a", 20))
    driver.add(make_request("b", 10))
    with pytest.raises(Overloaded, match="30 waiting prompt tokens"):
        driver.add(make_request("c", 1))
    driver.step()
    driver.add(make_request("c", 1))
    driver.run()


def test_a_tenant_leaves_a_part_of_the_queue_to_others() -> None:
    driver = Driver(max_num_seqs=1, max_queue_requests=15)
    for index in range(12):
        driver.add(make_request(f"greedy{index}", 4, 1, tenant="greedy"))
    with pytest.raises(Overloaded, match="kept for other workspaces: this one has 12 waiting requests"):
        driver.add(make_request("one too many", 4, 1, tenant="greedy"))
    for index in range(3):
        driver.add(make_request(f"late{index}", 4, 1, tenant="late"))
    with pytest.raises(Overloaded):
        driver.add(make_request("greedy again", 4, 1, tenant="greedy"))
    driver.run()
    assert len(driver.finished) == 15


def test_a_tenant_leaves_a_part_of_the_waiting_tokens_to_others() -> None:
    driver = Driver(max_num_seqs=1, max_queue_tokens=40)
    for index in range(3):
        driver.add(make_request(f"greedy{index}", 10, 1, tenant="greedy"))
    with pytest.raises(Overloaded, match="kept for other workspaces"):
        driver.add(make_request("one too many", 1, 1, tenant="greedy"))
    driver.add(make_request("late", 10, 1, tenant="late"))
    driver.run()


def test_retry_after_follows_the_rate_at_which_the_queue_drains() -> None:
    driver = Driver(max_num_seqs=1, max_queue_requests=20)
    for index in range(21):
        driver.add(make_request(f"r{index}", 4, 1))
    for _ in range(10):
        driver.step(seconds=2.0)
    for index in range(10):
        driver.add(make_request(f"s{index}", 4, 1))
    with pytest.raises(Overloaded) as refused:
        driver.add(make_request("one too many", 4, 1))
    assert refused.value.retry_after_s == pytest.approx(40.0, rel=0.2)


def test_retry_after_of_a_queue_that_nobody_has_left_is_what_they_have_waited() -> None:
    driver = Driver(max_num_seqs=1, max_queue_requests=1)
    for index in range(2):
        driver.add(make_request(f"r{index}"))
    driver.now += 9.0
    with pytest.raises(Overloaded) as refused:
        driver.add(make_request("one too many"))
    assert refused.value.retry_after_s == pytest.approx(9.0)
    driver.run()


def test_deadlines_hold_while_waiting_and_while_running() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(make_request("running", 4, 100, deadline_s=0.055))
    driver.add(make_request("waiting", 4, 100, deadline_s=0.025))
    assert driver.scheduler.next_wakeup(0.0) == 0.025
    driver.run()
    assert driver.finished["waiting"].finish_reason is FinishReason.DEADLINE
    assert driver.answers["waiting"] == []
    assert driver.finished["running"].finish_reason is FinishReason.DEADLINE
    assert 4 <= len(driver.answers["running"]) <= 7
    assert driver.scheduler.next_wakeup(0.0) is None


def test_a_deadline_ends_a_prompt_that_is_still_being_computed() -> None:
    driver = Driver(max_num_batched_tokens=4, depth=2)
    driver.add(make_request("a", 100, 5, deadline_s=0.05))
    driver.run()
    assert driver.finished["a"].finish_reason is FinishReason.DEADLINE
    assert driver.cache.pool.num_active == 0


def test_a_commit_after_the_deadline_delivers_its_token_and_ends() -> None:
    driver = Driver()
    driver.add(make_request("a", 4, 5, deadline_s=1.0))
    driver.plan()
    driver.now = 2.0
    (event,) = driver.commit()
    assert event.finish_reason is FinishReason.DEADLINE
    assert len(event.token_ids) == 1


def test_the_queue_timeout_ends_only_what_never_started() -> None:
    driver = Driver(max_num_seqs=1, queue_timeout_s=0.1)
    driver.add(make_request("running", 4, 30))
    driver.add(make_request("waiting", 4, 30))
    driver.run()
    assert driver.finished["running"].finish_reason is FinishReason.LENGTH
    assert driver.finished["waiting"].finish_reason is FinishReason.ERROR
    assert "in the queue" in (driver.finished["waiting"].error or "")


def prefills(driver: Driver) -> dict[str, Prefill]:
    return {name: event.prefill for name, event in driver.first_events.items() if event.prefill is not None}


def test_the_first_token_says_what_a_request_waited_for_and_in_which_chunks_it_was_computed() -> None:
    driver = one_at_a_time(max_num_batched_tokens=64)
    driver.add(make_request("long", 100, 2))
    driver.run()
    told = prefills(driver)
    assert told["seated"].waited_for is None
    assert told["long"].waited_for == "seats"
    assert [num_tokens for _, num_tokens in told["long"].chunks] == [64, 36]
    assert told["long"].chunks[0][0] == 0.0
    assert 0.0 < told["long"].chunks[1][0] <= told["long"].seconds


def test_a_request_without_room_for_its_prompt_waits_for_tokens_or_blocks() -> None:
    driver = Driver(max_num_batched_tokens=64)
    driver.add(make_request("first", 120, 2))
    driver.add(make_request("second", 60, 2))
    driver.run()
    assert prefills(driver)["second"].waited_for == "tokens"
    driver = Driver(num_blocks=8, max_num_batched_tokens=64)
    driver.add(make_request("first", 16, 8))
    driver.step()
    driver.add(make_request("second", 24, 2))
    driver.run()
    assert prefills(driver)["second"].waited_for == "blocks"
