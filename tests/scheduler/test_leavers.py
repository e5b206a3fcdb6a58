"""Clients that leave at any point, on a tiny cache with host memory: long random runs against the strict executor."""

from __future__ import annotations

import contextlib
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ContextLengthExceeded, Overloaded
from penstock.core.request import CacheBreakpoint, Grammar, Request, Tier
from tests.scheduler.strict import Driver, Faults, make_request

NUM_ACTIONS = 150
SHARED_TOKENS = tuple(index * 7 % 50 for index in range(200))


def random_driver(rng: random.Random) -> Driver:
    num_blocks = rng.choice([6, 12, 20, 40])
    driver = Driver(
        num_blocks=num_blocks,
        depth=rng.choice([1, 1, 2, 3]),
        max_num_seqs=rng.choice([2, 5, 16]),
        max_num_batched_tokens=rng.choice([4, 16, 64]),
        itl_target_ms=rng.choice([None, 5.0]),
        aging_s=rng.choice([0.05, 1.0]),
        queue_timeout_s=rng.choice([None, 2.0]),
        prefix_caching=rng.random() < 0.9,
        max_pinned_fraction=rng.choice([0.0, 0.5, 1.0]),
        num_host_blocks=rng.choice([0, 2, num_blocks, 3 * num_blocks]),
        block_copy_s=rng.choice([None, 0.0, 1e-4]),
        halves_blocks=rng.random() < 0.7,
        max_draft_tokens=rng.choice([0, 2, 12]),
        draft_share=rng.choice([0.3, 1.0]),
        spoiled_share=rng.choice([0.0, 0.2]),
        num_spare_states=rng.choice([None, None, 0, 3]),
        num_host_states=rng.choice([0, 2]),
    )
    driver.executor.faults = Faults(
        rng,
        late_share=rng.choice([0.0, 0.5]),
        end_share=0.05,
        error_share=rng.choice([0.0, 0.02]),
        random_times=rng.random() < 0.5,
    )
    if rng.random() < 0.7:
        driver.expect_short_answers()
    return driver


def random_request(rng: random.Random, number: int, now: float) -> Request:
    prompt = SHARED_TOKENS[: rng.choice([0, 3, 8, 16, 30, 80])]
    prompt += tuple(rng.randrange(50) for _ in range(rng.randint(0, 6)))
    return make_request(
        f"r{number}",
        prompt or (1,),
        rng.choice([1, 5, 20, 60]),
        tenant=rng.choice(["", "a"]),
        tier=rng.choice(list(Tier)),
        deadline_s=now + rng.random() if rng.random() < 0.15 else None,
        breakpoints=tuple(
            CacheBreakpoint(len(prompt), rng.choice([0.1, 5.0]), ()) for _ in range(rng.random() < 0.2)
        ),
        grammar=Grammar("json") if rng.random() < 0.25 else None,
        stop=("x",) if rng.random() < 0.2 else (),
    )


def someone(rng: random.Random, driver: Driver) -> str | None:
    live = [each for each in driver.requests if each not in driver.finished and each not in driver.aborted]
    return rng.choice(live) if live else None


def act(rng: random.Random, driver: Driver, action: str, number: int) -> None:
    if action == "add":
        with contextlib.suppress(Overloaded, ContextLengthExceeded):
            driver.add(random_request(rng, number, driver.now))
    elif action == "leave":
        leaver = someone(rng, driver)
        if leaver is not None:
            driver.abort(leaver)
    elif action == "plan":
        if driver.num_in_flight < 3:
            driver.plan()
    elif action == "commit":
        if driver.num_in_flight:
            driver.commit()
    elif action == "lack memory":
        if driver.num_in_flight < 3 and driver.plan() is not None:
            driver.fail_latest_plan(rng.randrange(8))
    elif action == "wait":
        driver.now += rng.choice([0.1, 1.0, 130.0])
    else:
        driver.step()


def run(seed: int) -> Driver:
    """One random life of a scheduler; raises when any record, slot or answer is wrong."""
    rng = random.Random(seed)
    driver = random_driver(rng)
    actions = {
        "add": rng.choice([0.1, 0.3]),
        "leave": rng.choice([0.03, 0.2, 0.4]),
        "plan": 0.15,
        "commit": 0.05,
        "lack memory": rng.choice([0.0, 0.01]),
        "wait": 0.02,
        "step": rng.choice([0.3, 1.0]),
    }
    chosen = rng.choices(list(actions), list(actions.values()), k=NUM_ACTIONS)
    for number, action in enumerate(chosen):
        act(rng, driver, action, number)
    driver.run()
    return driver


@settings(max_examples=settings.default.max_examples // 3, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_clients_that_leave_at_any_point_break_nothing(seed: int) -> None:
    run(seed)
