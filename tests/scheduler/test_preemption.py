"""Running out of blocks, urgent arrivals, and why both come to an end."""

from __future__ import annotations

import pytest

from penstock.core.request import FinishReason, Tier
from tests.scheduler.strict import Driver, make_request


def step_until_preempted(driver: Driver, times: int) -> None:
    for _ in range(200):
        if driver.scheduler.stats().num_preemptions >= times:
            return
        driver.step()
    raise AssertionError("nobody was preempted")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_growth_preempts_the_junior_and_never_the_most_senior(depth: int) -> None:
    driver = Driver(num_blocks=18, depth=depth)
    driver.expect_short_answers()
    for name in ("senior", "middle", "junior"):
        driver.add(make_request(name, 8, 40))
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    begins = [chunk.request_id for plan in driver.plans for chunk in plan.chunks if chunk.begins]
    assert begins.count("senior") == 1
    assert all(event.finish_reason is FinishReason.LENGTH for event in driver.finished.values())


def test_a_resumed_request_keeps_its_tokens_and_finds_blocks_that_survived() -> None:
    driver = Driver(num_blocks=18)
    driver.expect_short_answers()
    driver.add(make_request("a", 8, 40))
    driver.add(make_request("b", 24, 30))
    step_until_preempted(driver, 1)
    num_kept = len(driver.answers["b"])
    assert num_kept > 0
    driver.run()
    resumed = [
        chunk for plan in driver.plans for chunk in plan.chunks if chunk.begins and chunk.request_id == "b"
    ]
    assert len(resumed) == 2
    assert 0 < resumed[1].start < 24 + num_kept
    assert len(driver.answers["b"]) == 30


def test_the_cheapest_victim_is_taken_least_urgent_first() -> None:
    driver = Driver(num_blocks=30)
    driver.expect_short_answers()
    driver.add(make_request("batch", 16, 40, tier=Tier.BATCH))
    driver.add(make_request("first", 8, 40))
    driver.add(make_request("short", 8, 40))
    driver.add(make_request("long", 16, 40))
    step_until_preempted(driver, 1)
    assert driver.plans[-1].released == ("batch",)
    step_until_preempted(driver, 2)
    assert driver.plans[-1].released == ("short",)
    driver.run()


def test_a_request_that_outgrows_its_prediction_gets_a_new_one() -> None:
    driver = Driver()
    driver.expect_short_answers()
    driver.add(make_request("a", 8, 100))
    sequence = driver.scheduler._sequences["a"]
    assert sequence.predicted_length == 8 + 1
    for _ in range(30):
        driver.step()
    assert sequence.predicted_length > sequence.num_known
    driver.run()


def test_a_request_that_lacked_blocks_starts_as_soon_as_some_come_free() -> None:
    driver = Driver(num_blocks=20)
    for name in ("a", "b", "c"):
        driver.add(make_request(name, 28, 4))
    driver.step()
    assert driver.scheduler.stats().num_waiting == 1
    driver.abort("a")
    driver.step()
    assert [chunk.request_id for chunk in driver.plans[-1].chunks] == ["b", "c"]
    driver.run()


def test_a_request_that_lacked_blocks_is_tried_again_now_and_then() -> None:
    driver = Driver(num_blocks=20)
    pinned = make_request("pinned", 24, 1)
    driver.add(pinned)
    driver.run()
    driver.pin(pinned.prompt_token_ids, seconds=0.05)
    driver.add(make_request("running", 4, 24))
    driver.step()
    driver.add(make_request("waiting", 40, 2))
    driver.step()
    assert driver.scheduler.stats().num_waiting == 1
    for _ in range(15):
        driver.step()
    assert driver.answers["waiting"]
    assert "running" not in driver.finished
    driver.run()


def test_after_a_preemption_for_growth_nobody_is_admitted_in_the_same_plan() -> None:
    def crowded() -> Driver:
        driver = Driver(num_blocks=20)
        driver.expect_short_answers()
        for name, num_prompt in (("a", 8), ("b", 8), ("c", 24)):
            driver.add(make_request(name, num_prompt, 16))
        return driver

    rehearsal = crowded()
    step_until_preempted(rehearsal, 1)
    driver = crowded()
    for _ in rehearsal.plans[:-1]:
        driver.step()
    driver.add(make_request("urgent", 2, 2, tier=Tier.PRIORITY))
    driver.step()
    assert driver.plans[-1].released
    assert not any(chunk.begins for chunk in driver.plans[-1].chunks)
    driver.step()
    assert any(chunk.begins for chunk in driver.plans[-1].chunks)
    driver.run()


def test_a_pinned_prefix_makes_way_when_nothing_else_can() -> None:
    driver = Driver(num_blocks=8)
    pinned = make_request("pinned", 16, 1)
    driver.add(pinned)
    driver.run()
    driver.pin(pinned.prompt_token_ids, seconds=1e6)
    assert driver.cache.pool.num_pinned == 4
    driver.add(make_request("at admission", 24, 2))
    driver.run()
    driver.pin(make_request("at admission", 24).prompt_token_ids, seconds=1e6)
    assert driver.cache.pool.num_pinned == 4
    driver.add(make_request("while growing", 8, 20))
    driver.run()
    assert len(driver.answers["while growing"]) == 20


def test_an_urgent_request_displaces_a_batch_one_for_a_seat() -> None:
    driver = Driver(max_num_seqs=2)
    driver.add(make_request("batch", 8, 40, tier=Tier.BATCH))
    driver.add(make_request("default", 8, 40))
    driver.step()
    driver.add(make_request("urgent", 8, 4, tier=Tier.PRIORITY))
    plan = driver.step()
    assert plan is not None
    assert plan.released == ("batch",)
    assert {chunk.request_id for chunk in plan.chunks} == {"default", "urgent"}
    driver.add(make_request("late", 8, 4, tier=Tier.PRIORITY))
    assert driver.step().released == ()  # type: ignore[union-attr]  # nobody left whom it may displace
    driver.run()
    assert len(driver.answers["batch"]) == 40


def test_an_urgent_request_displaces_batch_ones_for_blocks() -> None:
    driver = Driver(num_blocks=16)
    driver.add(make_request("batch", 28, 20, tier=Tier.BATCH))
    driver.add(make_request("batch too", 20, 20, tier=Tier.BATCH))
    driver.step()
    driver.add(make_request("urgent", 40, 4))
    driver.step()
    driver.step()
    assert "urgent" in {chunk.request_id for chunk in driver.plans[-1].chunks}
    driver.run()


def test_batch_requests_keep_their_place_where_preemption_is_off() -> None:
    driver = Driver(max_num_seqs=1, preempt_batch=False)
    driver.add(make_request("batch", 8, 20, tier=Tier.BATCH))
    driver.step()
    driver.add(make_request("urgent", 8, 4))
    for _ in range(5):
        driver.step()
    assert driver.scheduler.stats().num_preemptions == 0
    driver.run()
    assert len(driver.answers["urgent"]) == 4


def test_a_batch_request_displaces_nobody_however_long_it_waited() -> None:
    driver = Driver(max_num_seqs=1, aging_s=1.0)
    driver.add(make_request("first", 8, 40, tier=Tier.BATCH))
    driver.step()
    driver.add(make_request("second", 8, 4, tier=Tier.BATCH))
    driver.now += 10.0
    driver.step()
    assert driver.scheduler.stats().num_preemptions == 0
    driver.run()


def test_a_batch_request_that_aged_is_not_displaced_any_more() -> None:
    driver = Driver(max_num_seqs=1, aging_s=1.0)
    driver.add(make_request("first", 8, 4))
    driver.step()
    driver.add(make_request("batch", 8, 40, tier=Tier.BATCH))
    driver.now += 1.5
    for _ in range(6):
        driver.step()
    assert driver.answers["batch"]
    driver.add(make_request("urgent", 8, 4, tier=Tier.PRIORITY))
    driver.step()
    assert driver.scheduler.stats().num_preemptions == 0
    driver.run()


def test_a_stream_of_urgent_requests_cannot_starve_a_batch_request() -> None:
    driver = Driver(max_num_seqs=1, aging_s=0.5, num_blocks=12)
    driver.add(make_request("batch", 8, 20, tier=Tier.BATCH))
    for index in range(400):
        if index % 3 == 0:
            driver.add(make_request(f"u{index}", 4, 3, tier=Tier.PRIORITY))
        driver.step()
        if "batch" in driver.finished:
            break
    assert driver.finished["batch"].finish_reason is FinishReason.LENGTH
    driver.run()


def started(driver: Driver) -> list[str]:
    return [chunk.request_id for plan in driver.plans for chunk in plan.chunks if chunk.begins]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_tenant_that_holds_all_seats_gives_some_to_others(depth: int) -> None:
    driver = Driver(max_num_seqs=4, aging_s=2.0, num_blocks=400, max_model_len=300, depth=depth)
    for index in range(9):
        driver.add(make_request(f"a{index}", 8, 200, tenant="a"))
    driver.step()
    for index in range(3):
        driver.add(make_request(f"b{index}", 8, 20, tenant="b"))
    driver.step()
    assert driver.scheduler.stats().num_preemptions == 0, "they have not waited yet"
    for _ in range(20):
        driver.step()
    assert {"b0", "b1"} <= set(started(driver))
    assert "b2" not in started(driver), "both tenants run as many"
    assert driver.scheduler.stats().num_preemptions == 2
    assert started(driver).count("a0") == 1, "the most senior request stays"
    driver.run()
    assert max(started(driver).count(f"b{index}") for index in range(3)) == 1


def test_requests_that_aged_in_the_queue_give_way_to_other_tenants() -> None:
    """A long queue of one tenant ages, and would be ahead of everybody, running or preempted."""
    driver = Driver(max_num_seqs=4, aging_s=0.5, num_blocks=60, max_model_len=120)
    driver.expect_short_answers()
    for index in range(40):
        driver.add(make_request(f"a{index}", 8, 90, tenant="a"))
    while driver.scheduler.stats().num_preemptions < 3 or driver.now < 3.0:
        driver.step()
    driver.add(make_request("b", 8, 4, tenant="b"))
    for _ in range(20):
        driver.step()
    assert "b" in driver.finished
    driver.run()


@pytest.mark.parametrize("num_blocks", [36, 41, 60])
def test_a_tenant_that_holds_all_blocks_gives_some_to_others(num_blocks: int) -> None:
    driver = Driver(max_num_seqs=16, aging_s=1.0, num_blocks=num_blocks, max_model_len=80)
    for index in range(8):
        driver.add(make_request(f"a{index}", 8, 60, tenant="a"))
    for _ in range(12):
        driver.step()
    assert driver.scheduler.stats().num_waiting
    driver.add(make_request("b", 30, 4, tenant="b"))
    for _ in range(30):
        driver.step()
    assert "b" in driver.finished
    driver.run()


def test_a_request_of_a_less_urgent_tier_displaces_nobody_of_a_busier_tenant() -> None:
    driver = Driver(max_num_seqs=2, aging_s=1.0)
    for index in range(2):
        driver.add(make_request(f"a{index}", 8, 40, tenant="a"))
    driver.step()
    driver.add(make_request("b", 8, 4, tenant="b", tier=Tier.BATCH))
    driver.now += 0.2
    for _ in range(10):
        driver.step()
    assert driver.scheduler.stats().num_preemptions == 0
    driver.run()


def test_a_burst_of_long_requests_neither_thrashes_nor_idles_the_cache() -> None:
    driver = Driver(num_blocks=100, max_num_seqs=64, max_num_batched_tokens=512)
    for index in range(60):
        driver.add(make_request(f"r{index}", 12, 64))
    usage = []
    for _ in range(2000):
        driver.step()
        if driver.scheduler.stats().num_waiting:
            usage.append(driver.cache.usage)
    assert len(driver.finished) == 60
    assert driver.scheduler.stats().num_preemptions <= 6
    assert sum(usage) / len(usage) > 0.5
