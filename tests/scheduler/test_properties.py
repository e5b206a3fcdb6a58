"""Random operations on a tiny cache, executed by the strict executor: nothing is lost, doubled, wrong or stuck."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ContextLengthExceeded, Overloaded
from penstock.core.plan import WindowGroup
from penstock.core.request import CacheBreakpoint, FinishReason, Request, Tier
from penstock.scheduler.scheduler import Scheduler
from tests.scheduler.strict import VOCABULARY, Driver, expected_answer, make_request

PREFIXES = tuple(tuple((start * 7 + index * 3) % VOCABULARY for index in range(120)) for start in range(3))

requests = st.fixed_dictionaries(
    {
        "prefix": st.sampled_from(PREFIXES),
        "num_prefix": st.integers(0, 120),
        "suffix": st.lists(st.integers(0, 3), max_size=6),
        "max_tokens": st.integers(0, 40),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
        "tenant": st.sampled_from(["", "a", "bb"]),
        "tier": st.sampled_from(list(Tier)),
        "timeout_s": st.one_of(st.none(), st.none(), st.floats(0.0, 0.5)),
        "stop_token_ids": st.one_of(st.just(()), st.tuples(st.integers(0, VOCABULARY - 1))),
        "min_tokens": st.integers(0, 3),
        "num_begun": st.one_of(st.just(0), st.just(0), st.integers(0, 40)),
        "breakpoints": st.one_of(
            st.just([]),
            st.lists(st.tuples(st.integers(0, 130), st.sampled_from([0.3, 5.0])), min_size=1, max_size=4),
        ),
    }
)
prefixes = st.builds(
    lambda prefix, count, tenant: make_request("prefix", prefix[:count], tenant=tenant),
    st.sampled_from(PREFIXES),
    st.integers(1, 120),
    st.sampled_from(["", "a"]),
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests),
        st.tuples(st.just("add"), requests),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("plan"), st.just(None)),
        st.tuples(st.just("commit"), st.just(None)),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("wait"), st.floats(0.0, 2.0)),
        st.tuples(st.just("pin"), st.sampled_from(PREFIXES)),
        st.tuples(st.just("expect short answers"), st.none()),
        st.tuples(st.just("begin import"), prefixes),
        st.tuples(st.just("finish import"), st.integers(0, 30)),
        st.tuples(st.just("export"), prefixes),
        st.tuples(st.just("finish export"), st.none()),
    ),
    min_size=15,
    max_size=60,
)
configs = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(6, 60),
        "depth": st.integers(1, 3),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([1, 4, 17, 40, 48]),
        "itl_target_ms": st.sampled_from([None, 5.0, 20.0]),
        "aging_s": st.sampled_from([0.05, 1.0]),
        "queue_timeout_s": st.sampled_from([None, 5.0]),
        "max_queue_requests": st.integers(0, 20),
        "prefix_caching": st.sampled_from([True, True, False]),
        "max_pinned_fraction": st.sampled_from([0.0, 0.2, 0.5, 1.0]),
        "num_host_blocks": st.sampled_from([0, 3, 40]),
        "block_copy_s": st.sampled_from([None, 0.0]),
        "min_cacheable_tokens": st.sampled_from([1, 20]),
        "halves_blocks": st.booleans(),
        "num_spare_states": st.sampled_from([None, None, 0, 2, 20]),
        "num_host_states": st.sampled_from([0, 2]),
        "windows": st.sampled_from(
            [
                (),
                (),
                (WindowGroup(1),),
                (WindowGroup(9, 2),),
                (WindowGroup(16, 3, in_chunks=True),),
                (WindowGroup(8), WindowGroup(30, 2)),
            ]
        ),
        "num_window_blocks": st.sampled_from([None, None, 40, 90]),
        "max_draft_tokens": st.sampled_from([0, 1, 3, 12]),
        "draft_share": st.sampled_from([0.5, 1.0]),
        "spoiled_share": st.sampled_from([0.0, 0.2, 1.0]),
        "starts_late": st.booleans(),
        "late_share": st.sampled_from([None, 0.5, 1.0]),
    }
)


def perform(driver: Driver, operation: str, argument: Any, number: int) -> None:
    if operation == "add":
        # Ids come back into use, also while a step of their former owner is in flight.
        request_id = f"r{number % 7}" if f"r{number % 7}" not in live(driver) else f"r{number}"
        prompt = (*argument["prefix"][: argument["num_prefix"]], *argument["suffix"]) or (1,)
        timeout_s = argument["timeout_s"]
        request = make_request(
            request_id,
            prompt,
            argument["max_tokens"],
            tenant=argument["tenant"],
            tier=argument["tier"],
            deadline_s=None if timeout_s is None else driver.now + timeout_s,
            stop_token_ids=argument["stop_token_ids"],
            min_tokens=argument["min_tokens"],
            prompt_logprobs=argument["prompt_logprobs"],
            breakpoints=breakpoints_of(argument["breakpoints"], len(prompt)),
        )
        request = begun_elsewhere(driver, request, argument["num_begun"])
        try:
            driver.add(request)
        except Overloaded:
            stats = driver.scheduler.stats()
            assert stats.num_running + stats.num_waiting >= driver.config.max_num_seqs
        except ContextLengthExceeded:
            assert len(prompt) + min(1, argument["max_tokens"]) > driver.cache.longest_context()
    elif operation == "abort":
        driver.abort(f"r{argument}")
    elif operation == "plan":
        if driver.num_in_flight < 4:
            driver.plan()
    elif operation == "commit":
        if driver.num_in_flight:
            driver.commit()
    elif operation == "step":
        for _ in range(argument):
            driver.step()
    elif operation == "wait":
        driver.now += argument
    elif operation == "pin":
        driver.pin(argument)
    elif operation == "expect short answers":
        driver.expect_short_answers()
    elif operation == "begin import":
        driver.begin_import(argument)
    elif operation == "finish import":
        if driver.imports:
            driver.finish_import(argument)
    elif operation == "export":
        if not driver.num_in_flight:  # else blocks may be found whose contents are still being computed
            driver.export(argument)
    elif operation == "finish export" and driver.exports:
        driver.finish_export()


def end_transfers(driver: Driver) -> None:
    while driver.imports:
        driver.finish_import(0)
    while driver.exports:
        driver.finish_export()


def begun_elsewhere(driver: Driver, request: Request, num_tokens: int) -> Request:
    """With the first tokens of its answer, none of which ends it."""
    output = expected_answer(request, min(num_tokens, max(0, driver.length_of(request))))
    ends = [at for at, token_id in enumerate(output) if token_id in request.sampling.stop_token_ids]
    return msgspec.structs.replace(request, output_token_ids=tuple(output[: ends[0] if ends else None]))


def breakpoints_of(marks: list[tuple[int, float]], num_prompt: int) -> tuple[CacheBreakpoint, ...]:
    """In ascending order, each with the one before it as an earlier position."""
    positions = sorted({(min(position, num_prompt), ttl_s) for position, ttl_s in marks})
    return tuple(
        CacheBreakpoint(position, ttl_s, tuple(earlier for earlier, _ in positions[:index]))
        for index, (position, ttl_s) in enumerate(positions)
    )


def check_cache_use(driver: Driver) -> None:
    """Whatever happened, usage adds up, and claims no more than was reused."""
    for request_id, event in driver.first_events.items():
        request, use = driver.requests[request_id], event.cache_use
        if not event.token_ids:
            continue
        assert (use is None) == (not request.cache_breakpoints)
        if use is not None:
            assert event.num_cached_tokens is not None
            assert use.read_tokens <= event.num_cached_tokens
            assert len(use.written_tokens) == len(request.cache_breakpoints)
            assert min(use.written_tokens) >= 0
            last = request.cache_breakpoints[-1].num_tokens
            assert use.read_tokens + sum(use.written_tokens) <= last
            assert (use.read_tokens + sum(use.written_tokens)) % driver.cache.block_size == 0


def live(driver: Driver) -> set[str]:
    return {i for i in driver.requests if i not in driver.finished and i not in driver.aborted}


@settings(max_examples=settings.default.max_examples * 3 // 4, deadline=None)
@given(config=configs, script=operations)
def test_random_operations_keep_every_promise(config: dict[str, Any], script: list[tuple[str, Any]]) -> None:
    driver = Driver(**config)
    for number, (operation, argument) in enumerate(script):
        perform(driver, operation, argument, number)
    end_transfers(driver)
    driver.run()
    check_cache_use(driver)
    for request_id, event in driver.finished.items():
        request = driver.requests[request_id]
        answer = driver.answers[request_id]
        if event.finish_reason is FinishReason.STOP:
            assert answer[-1] in request.sampling.stop_token_ids
            assert len(answer) >= request.sampling.min_tokens
        stops = [t for t in answer[:-1] if t in request.sampling.stop_token_ids]
        assert len(stops) < max(1, request.sampling.min_tokens), "an answer went on after a stop token"


@settings(max_examples=25, deadline=None)
@given(config=configs, script=operations)
def test_the_same_calls_give_the_same_plans(config: dict[str, Any], script: list[tuple[str, Any]]) -> None:
    def plans() -> list[Any]:
        driver = Driver(**config)
        for number, (operation, argument) in enumerate(script):
            perform(driver, operation, argument, number)
        end_transfers(driver)
        driver.run()
        return driver.plans

    with patch.object(Scheduler, "check_integrity", lambda self: None):  # the test above checks that
        assert plans() == plans()


def busy_driver(depth: int = 2) -> Driver:
    """A driver that was given far more than its cache holds, from two tenants and all tiers."""
    driver = Driver(num_blocks=10, depth=depth, max_num_seqs=6, max_num_batched_tokens=16, aging_s=0.5)
    driver.expect_short_answers()
    for index in range(30):
        tier = list(Tier)[index % 3]
        driver.add(
            make_request(f"r{index}", 3 + index % 9, 8 + index % 17, tier=tier, tenant=f"t{index % 2}")
        )
        driver.step()
    driver.run()
    return driver


def test_plans_do_not_depend_on_how_python_hashes_strings() -> None:
    program = (
        "from tests.scheduler.test_properties import busy_driver; import msgspec, hashlib;"
        "print(hashlib.sha256(msgspec.json.encode(busy_driver().plans)).hexdigest())"
    )
    digests = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout)
    assert len(digests) == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_load_far_beyond_the_cache_ends_with_every_answer_complete(depth: int) -> None:
    driver = busy_driver(depth)
    assert driver.scheduler.stats().num_preemptions > 0
    assert all(event.finish_reason is FinishReason.LENGTH for event in driver.finished.values())
    assert len(driver.finished) == 30
