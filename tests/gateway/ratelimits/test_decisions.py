"""Compiled decisions on limits, beside the Python that defines them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.clock import VirtualClock
from penstock.core.errors import RateLimited
from penstock.core.identity import RateLimits
from penstock.gateway.accounts import Lease
from penstock.gateway.ratelimits import local
from penstock.gateway.ratelimits.decisions import CompiledDecisions, load_decisions
from penstock.gateway.ratelimits.local import LocalLimiter, MeterTable, RunningLimiter
from penstock.gateway.ratelimits.settings import LimitSettings, ScopeLimits
from tests.gateway.ratelimits.claims import claim, outcome, reserve
from tests.gateway.ratelimits.machine import SETTINGS, LimiterMachine
from tests.gateway.ratelimits.test_table import SharedMachine

pytestmark = pytest.mark.skipif(load_decisions() is None, reason="the decisions are not compiled")

LIMITS = LimitSettings(
    key=ScopeLimits(requests_per_minute=6, input_tokens_per_minute=100, concurrent_requests=3),
    workspace=ScopeLimits(requests_per_minute=9, output_tokens_per_minute=80),
)


class PlainSharedMachine(SharedMachine):
    """Processes of which some have no compiled code."""

    def make_limiters(self) -> list[RunningLimiter]:
        first, *others = super().make_limiters()
        assert isinstance(first, LocalLimiter)
        first._meters._make_caller = _without_compiled(first)
        return [first, *others]


def _without_compiled(limiter: LocalLimiter):  # type: ignore[no-untyped-def]
    make = limiter._meters._make_caller

    def made(*arguments):  # type: ignore[no-untyped-def]
        caller = make(*arguments)
        caller._compiled = None  # type: ignore[attr-defined]
        return caller

    return made


class LonelyMachine(LimiterMachine):
    """A process alone, whose table is in its own memory."""

    def make_limiters(self) -> list[RunningLimiter]:
        table = MeterTable.made(None, 1, 0)
        assert table is not None
        return [LocalLimiter(SETTINGS[0], self.clock, spending=self.spending, table=table)]


TestPlainSharedMachine = PlainSharedMachine.TestCase
TestPlainSharedMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLonelyMachine = LonelyMachine.TestCase
TestLonelyMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


STEPS = st.one_of(
    st.tuples(st.just("open"), st.integers(0, 60), st.integers(0, 60)),
    st.tuples(st.just("admit"), st.integers(0, 60), st.integers(0, 60)),
    st.tuples(st.just("settle"), st.integers(0, 80), st.integers(0, 80)),
    st.tuples(st.just("cached"), st.integers(0, 80), st.just(0)),
    st.tuples(st.just("wait"), st.sampled_from([0, 1, 13, 70]), st.just(0)),
)


@given(steps=st.lists(STEPS, max_size=40))
@settings(max_examples=150, deadline=None)
async def test_both_decide_the_same(steps: list[tuple[str, int, int]]) -> None:
    clock = VirtualClock(1_000_000.0)
    compiled, plain = (
        LocalLimiter(LIMITS, clock, table=MeterTable(None, 1, 0, num_slots=64)) for _ in range(2)
    )
    plain._meters._make_caller = _without_compiled(plain)
    running: list[tuple[Lease, Lease]] = []
    for kind, first, second in steps:
        if kind == "wait":
            clock.advance(first)
        elif kind in ("open", "admit"):
            asked = claim(input_tokens=first, max_output_tokens=second)
            take = LocalLimiter.open if kind == "open" else reserve
            leases = []
            refusals = []
            for limiter in (compiled, plain):
                try:
                    leases.append(await take(limiter, asked))
                except RateLimited as refusal:
                    refusals.append(refusal)
            assert len(leases) in (0, 2)
            assert [each.message for each in refusals[:1]] == [each.message for each in refusals[1:]]
            if leases:
                _check_same(leases[0].rate_limits, leases[1].rate_limits)
                running.append((leases[0], leases[1]))
        elif running and kind == "settle":
            for lease in running.pop(0):
                lease.settle(outcome(first, second))
        elif running:
            for lease in running[0]:
                lease.give_back_cached(first)
        _check_same(*[await limiter.peek(claim().principal, "llama") for limiter in (compiled, plain)])


def _check_same(first: RateLimits, second: RateLimits) -> None:
    for one, other in zip(msgspec.structs.astuple(first), msgspec.structs.astuple(second), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert msgspec.structs.astuple(one) == pytest.approx(msgspec.structs.astuple(other))


async def test_compiled_code_leaves_a_lock_that_another_process_holds_to_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "LOCK_TIMEOUT_S", 0.001)
    clock = VirtualClock(1_000_000.0)
    tables = [MeterTable(tmp_path / "limits", 2, number) for number in range(2)]
    limiter = LocalLimiter(LIMITS, clock, table=tables[0])
    (await limiter.open(claim())).settle(outcome())
    tables[1].lock()
    lease = await limiter.open(claim())
    assert lease.rate_limits.requests is not None
    assert lease.rate_limits.requests.remaining == 4
    tables[1].unlock()


async def test_requests_are_decided_by_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = LocalLimiter(LIMITS, VirtualClock(1_000_000.0), table=MeterTable.made(None, 1, 0))
    (await limiter.open(claim())).settle(outcome())  # finds the slots
    decided = []
    decide = CompiledDecisions.take
    monkeypatch.setattr(
        CompiledDecisions, "take", lambda *arguments: decided.append(found := decide(*arguments)) or found
    )
    await limiter.open(claim())
    await reserve(limiter, claim())
    assert decided == [True, True, True]
