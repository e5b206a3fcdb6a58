"""A random life of limiters: requests come, end in every way, time passes, limits change.

`LimiterMachine` holds any number of limiters that share their limits (one local limiter, or several on one Redis) and
checks what must be true of all of them together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.clock import VirtualClock
from penstock.core.errors import QuotaExceeded, RateLimited, RequestExceedsLimit
from penstock.gateway.accounts import Claim, Lease, Outcome
from penstock.gateway.ratelimits.local import RunningLimiter
from penstock.gateway.ratelimits.settings import (
    LimitResolver,
    Limits,
    LimitSettings,
    ScopeLimits,
    Subject,
)
from penstock.gateway.ratelimits.spend import Demand, demand_of, used_by
from tests.gateway.ratelimits.claims import SettableSpend, claim, outcome, reserve

T = TypeVar("T")

BUDGET_MICRODOLLARS = 2000
SETTINGS = (
    LimitSettings(
        key=ScopeLimits(requests_per_minute=6, input_tokens_per_minute=100, concurrent_requests=3),
        workspace=ScopeLimits(output_tokens_per_minute=60, overrides={"ws-2": Limits(concurrent_requests=2)}),
        model=ScopeLimits(input_tokens_per_minute=150, dollars_per_day=BUDGET_MICRODOLLARS / 1e6),
    ),
    LimitSettings(
        key=ScopeLimits(requests_per_minute=3, input_tokens_per_minute=50, concurrent_requests=4),
        workspace=ScopeLimits(
            output_tokens_per_minute=120, overrides={"ws-2": Limits(concurrent_requests=1)}
        ),
        model=ScopeLimits(input_tokens_per_minute=60, dollars_per_day=BUDGET_MICRODOLLARS / 1e6),
        max_reserved_output_tokens=8,
    ),
)

CLAIMS = st.builds(
    claim,
    key=st.sampled_from(["key-1", "key-2"]),
    workspace=st.sampled_from(["ws-1", "ws-2"]),
    input_tokens=st.integers(0, 120),
    max_output_tokens=st.integers(1, 10_000),
)
OUTCOMES = st.one_of(
    st.builds(outcome, st.integers(0, 120), st.integers(0, 40), cached_tokens=st.integers(0, 120)),
    st.builds(
        outcome, st.integers(0, 120), st.just(0), status=st.just("cancelled"), has_begun=st.just(False)
    ),
    st.builds(
        outcome,
        st.integers(0, 120),
        st.just(0),
        status=st.just("failed"),
        error_code=st.sampled_from(["overloaded", "deadline_exceeded"]),
        has_begun=st.just(False),
    ),
)


@dataclass
class Running:
    lease: Lease
    claim: Claim
    reserved: Demand
    subjects: tuple[Subject, ...]


@dataclass
class Taken:
    """Something taken for good, reserved, or given back (below zero)."""

    at_s: float
    subject: Subject
    kind: str
    amount: float


class LimiterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = VirtualClock(1_000_000.0)
        self.spending = SettableSpend()
        self.settings = SETTINGS[0]
        self.resolver = LimitResolver(self.settings)
        self.limiters: list[RunningLimiter] = []
        self.running: list[Running] = []
        self.taken: list[Taken] = []

    def make_limiters(self) -> list[RunningLimiter]:
        raise NotImplementedError

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def settled(self) -> None:
        """Called after everything is given back, for limiters that do it later."""

    def before_change(self) -> None:
        """Called before limits change."""

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    @initialize()
    def begin(self) -> None:
        self.limiters = self.make_limiters()
        for limiter in self.limiters:
            self.do(limiter.start())

    @rule(asked=CLAIMS, choice=st.integers(0, 9), at_once=st.booleans())
    def ask(self, asked: Claim, choice: int, at_once: bool) -> None:
        # Whoever waits as long as told gets further: through the first half, through the second, and through the
        # first again if being held up by tokens had used up the requests.
        for _ in range(4):
            refusal = self.try_to_run(asked, choice, at_once)
            if isinstance(refusal, RequestExceedsLimit):
                assert refusal.retry_after_s is None
                return
            if refusal is None or isinstance(refusal, QuotaExceeded) or "at once" in refusal.message:
                return
            assert refusal.retry_after_s is not None
            assert refusal.retry_after_s > 0
            assert refusal.rate_limits is not None
            self.pass_time(refusal.retry_after_s)
        raise AssertionError(refusal)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 99), ended=OUTCOMES)
    def end(self, index: int, ended: Outcome) -> None:
        self.finish(self.running.pop(index % len(self.running)), ended)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 99), cached_tokens=st.integers(1, 120))
    def find_in_cache(self, index: int, cached_tokens: int) -> None:
        request = self.running[index % len(self.running)]
        request.lease.give_back_cached(cached_tokens)
        given, request.reserved = request.reserved.without_input(cached_tokens)
        self.settled()
        for subject in request.subjects:
            self.note(subject, "input_tokens", -given)

    @rule(asked=CLAIMS, choice=st.integers(0, 9), knows_model=st.booleans())
    def look(self, asked: Claim, choice: int, knows_model: bool) -> None:
        """Which changes nothing: whatever is checked elsewhere still holds."""
        limiter = self.limiters[choice % len(self.limiters)]
        shown = self.do(limiter.peek(asked.principal, asked.model if knows_model else None))
        for state in (shown.requests, shown.input_tokens, shown.output_tokens):
            assert state is None or 0 <= state.remaining <= state.limit

    @rule(seconds=st.sampled_from([0.01, 1.0, 7.3, 60.0, 5000.0]))
    def wait(self, seconds: float) -> None:
        self.pass_time(seconds)

    @rule(settings=st.sampled_from(SETTINGS))
    def change_limits(self, settings: LimitSettings) -> None:
        if settings == self.settings:
            return
        self.before_change()
        self.settings = settings
        self.resolver = LimitResolver(settings)
        self.taken.clear()  # amounts before and after do not add up under one limit
        for limiter in self.limiters:
            limiter.apply(settings)

    @invariant()
    def never_more_money_reserved_than_the_budget(self) -> None:
        reserved = sum(request.reserved.microdollars for request in self.running)
        assert reserved <= BUDGET_MICRODOLLARS

    def try_to_run(self, asked: Claim, choice: int, at_once: bool) -> RateLimited | None:
        limiter = self.limiters[choice % len(self.limiters)]
        limits = self.resolver.limits_of_caller(asked.principal, asked.model)
        demand = demand_of(asked, limits, self.spending)
        subjects = tuple(subject for subject, _ in limits.applying)
        try:
            lease = self.do(limiter.open(asked) if at_once else limiter.admit(asked))
        except RateLimited as refusal:
            self.settled()
            return refusal
        for subject in subjects:
            self.note(subject, "requests", 1)
        if not at_once:
            try:
                lease = self.do(lease.reserve(asked))
            except RateLimited as refusal:
                lease.settle(outcome(0, 0, status="failed", has_begun=False))
                self.settled()
                return refusal
        self.running.append(Running(lease, asked, demand, subjects))
        for subject in subjects:
            self.note(subject, "input_tokens", demand.input_tokens)
            self.note(subject, "output_tokens", demand.output_tokens)
        self.check_that_no_more_was_granted_than_allowed(subjects)
        self.check_that_no_more_run_than_allowed(subjects)
        return None

    def finish(self, request: Running, ended: Outcome) -> None:
        limits = self.resolver.limits_of_caller(request.claim.principal, request.claim.model)
        used = used_by(request.claim, ended, limits, self.spending)
        request.lease.settle(ended)
        self.settled()
        for subject in request.subjects:
            self.note(subject, "input_tokens", used.input_tokens - request.reserved.input_tokens)
            self.note(subject, "output_tokens", used.output_tokens - request.reserved.output_tokens)

    def note(self, subject: Subject, kind: str, amount: float) -> None:
        self.taken.append(Taken(self.clock.now(), subject, kind, amount))

    def check_that_no_more_was_granted_than_allowed(self, subjects: tuple[Subject, ...]) -> None:
        """From any earlier moment until this admission: at most a bucketful and the refill of that time."""
        now = self.clock.now()
        for subject in subjects:
            limits = self.resolver.limits_of(subject)
            for kind in ("requests", "input_tokens", "output_tokens"):
                limit = getattr(limits, f"{kind}_per_minute")
                if limit is None:
                    continue
                total = 0.0
                for taken in reversed(self.taken):
                    if taken.subject == subject and taken.kind == kind:
                        total += taken.amount
                        assert total <= limit * (1 + (now - taken.at_s) / 60) + 1e-3

    def check_that_no_more_run_than_allowed(self, subjects: tuple[Subject, ...]) -> None:
        for subject in subjects:
            limit = self.resolver.limits_of(subject).concurrent_requests
            num_running = sum(subject in request.subjects for request in self.running)
            assert limit is None or num_running <= limit

    def teardown(self) -> None:
        try:
            for request in self.running:
                self.finish(request, outcome(0, 0, status="failed", has_begun=False))
            if self.limiters:
                self.pass_time(100_000.0)
                self.check_that_all_is_whole()
        finally:
            for limiter in self.limiters:
                self.do(limiter.close())
            self.loop.close()

    def check_that_all_is_whole(self) -> None:
        """Every limit can be used to the full again: nothing leaked."""
        for key, workspace in (("key-1", "ws-1"), ("key-2", "ws-2")):
            asked = claim(key, workspace, input_tokens=0, max_output_tokens=1)
            limits = self.resolver.limits_of_caller(asked.principal, asked.model)
            lease = self.do(reserve(self.limiters[0], asked))
            shown = lease.rate_limits
            assert shown.requests is not None
            assert shown.requests.remaining == shown.requests.limit - 1
            assert shown.input_tokens is not None
            assert shown.input_tokens.remaining == shown.input_tokens.limit
            assert (
                shown.output_tokens is None or shown.output_tokens.remaining == shown.output_tokens.limit - 1
            )
            most = [resolved.concurrent_requests for _, resolved in limits.applying]
            for _ in range(min((limit for limit in most if limit is not None), default=2) - 2):
                self.pass_time(60.0)
                self.do(reserve(self.limiters[0], asked))
