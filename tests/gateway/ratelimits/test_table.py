"""Limits that several processes of a server share through a mapped file. Here each process is a limiter."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from penstock.core.clock import VirtualClock
from penstock.core.errors import RateLimited
from penstock.gateway.ratelimits import local as table_module
from penstock.gateway.ratelimits.local import LocalLimiter, MeterTable, RunningLimiter
from penstock.gateway.ratelimits.settings import LimitSettings, ScopeLimits
from tests.gateway.ratelimits.claims import SettableSpend, claim, outcome, reserve
from tests.gateway.ratelimits.machine import SETTINGS, LimiterMachine

NUM_PROCESSES = 3


class SharedMachine(LimiterMachine):
    """Limits hold for all processes together, whichever gets a request."""

    def make_limiters(self) -> list[RunningLimiter]:
        self.folder = tempfile.TemporaryDirectory()
        self.tables = [
            MeterTable(Path(self.folder.name) / "limits", NUM_PROCESSES, number)
            for number in range(NUM_PROCESSES)
        ]
        return [
            LocalLimiter(SETTINGS[0], self.clock, spending=self.spending, table=table)
            for table in self.tables
        ]

    def teardown(self) -> None:
        super().teardown()
        for table in self.tables:
            table.close()
        self.folder.cleanup()


TestSharedMachine = SharedMachine.TestCase
TestSharedMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

CLOCK = VirtualClock(1_000_000.0)
TWO_AT_ONCE = LimitSettings(key=ScopeLimits(requests_per_minute=6, concurrent_requests=2))


def limiter(
    path: Path,
    number: int,
    limits: LimitSettings = TWO_AT_ONCE,
    *,
    num_slots: int = 64,
    spending: SettableSpend | None = None,
) -> LocalLimiter:
    return LocalLimiter(
        limits, CLOCK, spending=spending, table=MeterTable(path, 2, number, num_slots=num_slots)
    )


async def test_a_limit_holds_for_all_processes_together(tmp_path: Path) -> None:
    first, second = (limiter(tmp_path / "limits", number) for number in range(2))
    lease = await reserve(first, claim())
    await reserve(second, claim())
    with pytest.raises(RateLimited, match="at once"):
        await reserve(first, claim())
    lease.settle(outcome())
    third = await reserve(second, claim())
    assert third.rate_limits.requests is not None
    assert third.rate_limits.requests.remaining == 3


async def test_a_process_that_was_stopped_in_a_decision_undoes_no_other(tmp_path: Path) -> None:
    first, second = (limiter(tmp_path / "limits", number) for number in range(2))
    (await reserve(first, claim())).settle(outcome())
    stopped = first._meters.of_caller(claim().principal, claim().model, CLOCK.now())
    with stopped:
        for _ in range(3):
            (await reserve(second, claim())).settle(outcome())
        stopped.admit()
    shown = await second.peek(claim().principal, claim().model)
    assert shown.requests is not None
    assert shown.requests.remaining == 2
    await reserve(second, claim())
    with pytest.raises(RateLimited, match="at once"):  # the place of the stopped decision counts
        await reserve(second, claim())


async def test_a_process_that_starts_again_gives_back_the_places_of_its_predecessor(tmp_path: Path) -> None:
    first, second = (limiter(tmp_path / "limits", number) for number in range(2))
    await reserve(first, claim())
    await reserve(first, claim())
    with pytest.raises(RateLimited, match="at once"):
        await reserve(second, claim())
    limiter(tmp_path / "limits", 0)
    shown = await second.peek(claim().principal, "llama")
    assert shown.requests is not None
    assert shown.requests.remaining == 4  # requests that were made still count
    await reserve(second, claim())


async def test_running_requests_of_other_processes_count_for_a_budget(tmp_path: Path) -> None:
    budget = LimitSettings(key=ScopeLimits(dollars_per_day=50 / 1e6))
    spending = SettableSpend()
    first, second = (limiter(tmp_path / "limits", number, budget, spending=spending) for number in range(2))
    asked = claim(input_tokens=10, max_output_tokens=20)  # 30 micro-dollars
    lease = await reserve(first, asked)
    with pytest.raises(RateLimited):
        await reserve(second, asked)
    lease.settle(outcome(0, 0))
    await reserve(second, asked)


async def test_a_process_that_stopped_with_the_lock_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "LOCK_TIMEOUT_S", 0.001)
    path = tmp_path / "limits"
    running = limiter(path, 0)
    stopped = os.open(path, os.O_RDWR)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    await reserve(running, claim())
    await reserve(running, claim())
    with pytest.raises(RateLimited):
        await reserve(running, claim())
    os.close(stopped)
    with pytest.raises(RateLimited):  # it was counted all the same
        await reserve(limiter(path, 1), claim())


async def test_processes_with_different_settings_agree_on_how_full_a_bucket_is(tmp_path: Path) -> None:
    more = LimitSettings(key=ScopeLimits(requests_per_minute=60))
    before, after = limiter(tmp_path / "limits", 0), limiter(tmp_path / "limits", 1, more)
    for _ in range(3):
        (await reserve(before, claim())).settle(outcome())
    shown = await after.peek(claim().principal, "llama")
    assert shown.requests is not None
    assert shown.requests.remaining == 30
    again = await before.peek(claim().principal, "llama")
    assert again.requests is not None
    assert again.requests.remaining == 3


async def test_slots_of_subjects_that_are_whole_are_used_again(tmp_path: Path) -> None:
    first, second = (limiter(tmp_path / "limits", number, num_slots=4) for number in range(2))
    for number in range(40):
        asked = claim(key=f"key-{number}")
        (await reserve(first, asked)).settle(outcome())
        CLOCK.advance(61.0)
        shown = await second.peek(asked.principal, "llama")
        assert shown.requests is not None
        assert shown.requests.remaining == 6


async def test_without_a_free_slot_a_process_counts_for_itself(tmp_path: Path) -> None:
    first, second = (limiter(tmp_path / "limits", number, num_slots=2) for number in range(2))
    for number in range(2):
        await reserve(first, claim(key=f"key-{number}"))
    asked = claim(key="one-too-many")
    for process in (first, second):
        await reserve(process, asked)
        await reserve(process, asked)
        with pytest.raises(RateLimited):
            await reserve(process, asked)
