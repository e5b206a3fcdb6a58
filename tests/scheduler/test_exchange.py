"""Blocks that other engines fill or read: found when they are filled, kept while they are read, never lost."""

from __future__ import annotations

from tests.scheduler.strict import Driver, make_request

PROMPT = tuple(range(3, 33))  # seven blocks of four, and two tokens


def test_what_has_landed_is_reused() -> None:
    driver = Driver()
    request = make_request("r", PROMPT)
    assert driver.scheduler.exchange.num_missing(request) == 7
    driver.begin_import(request)
    driver.finish_import(7)
    assert driver.scheduler.exchange.num_missing(request) == 0
    driver.add(request)
    driver.run()
    assert driver.first_events["r"].num_cached_tokens == 28


def test_what_did_not_come_is_computed() -> None:
    driver = Driver()
    request = make_request("r", PROMPT)
    driver.begin_import(request)
    driver.finish_import(3)
    driver.add(request)
    driver.run()
    assert driver.first_events["r"].num_cached_tokens == 12


def test_room_is_left_for_those_that_run() -> None:
    driver = Driver(num_blocks=16)
    driver.add(make_request("running", 20, max_tokens=40))
    driver.step()
    driver.begin_import(make_request("r", PROMPT))
    assert not driver.imports, "the running request is expected to need it"
    driver.run()
    driver.begin_import(make_request("r", PROMPT))
    assert driver.imports
    driver.finish_import(0)


def test_a_request_that_would_need_lent_blocks_waits_for_them() -> None:
    """Also the most senior one, which otherwise always gets a block."""
    driver = Driver(num_blocks=10)
    kept = make_request("kept", PROMPT, max_tokens=1)
    driver.add(kept)
    driver.run()
    driver.export(kept)
    driver.add(make_request("grows", 9, max_tokens=20))
    for _ in range(40):
        driver.step()
    assert "grows" not in driver.finished
    assert driver.scheduler.stats().num_running == 0
    driver.finish_export()
    driver.run()
    assert len(driver.answers["grows"]) == 20


def test_only_what_is_cached_is_lent() -> None:
    driver = Driver()
    driver.add(make_request("first", PROMPT[:17], max_tokens=1))
    driver.run()
    export = driver.scheduler.exchange.export_prefix(make_request("r", PROMPT))
    assert len(export.block_ids) == 4
    driver.scheduler.check_integrity()
    driver.scheduler.exchange.finish_export(export.number)
    driver.scheduler.check_integrity()
