"""The circuit breaker of a replica: a replica that keeps failing gets no requests, then a few. Pure state machine.

    state      on                                        becomes
    closed     `max_failures` in a row                   open
    open       the pause is over, and a request is sent  half open
    half open  a probe fails                             open, with twice the pause
    half open  `probes` succeed                          closed, with the first pause again

While half open, at most `probes` requests are let through at a time.
"""

from __future__ import annotations

import enum

import msgspec
from msgspec.structs import replace


class BreakerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_failures: int = 5
    probes: int = 2
    first_pause_s: float = 1.0
    max_pause_s: float = 60.0


class Circuit(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerState(msgspec.Struct, frozen=True, kw_only=True):
    circuit: Circuit = Circuit.CLOSED
    failures: int = 0  # in a row
    opens: int = 0  # in a row, without having closed in between
    retry_at_s: float = 0.0  # when open
    probing: int = 0  # let through while half open, outcome unknown
    succeeded: int = 0  # probes


class CircuitBreaker:
    def __init__(self, config: BreakerConfig) -> None:
        self.config = config

    def allows(self, state: BreakerState, now: float) -> bool:
        """Whether a request may be sent. A caller that sends one must call `sent`."""
        if state.circuit is Circuit.CLOSED:
            return True
        if state.circuit is Circuit.OPEN:
            return now >= state.retry_at_s
        return state.probing + state.succeeded < self.config.probes

    def sent(self, state: BreakerState, now: float) -> BreakerState:
        if state.circuit is Circuit.OPEN and now >= state.retry_at_s:
            state = replace(state, circuit=Circuit.HALF_OPEN, probing=0, succeeded=0)
        if state.circuit is Circuit.HALF_OPEN:
            return replace(state, probing=state.probing + 1)
        return state

    def succeeded(self, state: BreakerState) -> BreakerState:
        if state.circuit is Circuit.CLOSED:
            return replace(state, failures=0) if state.failures else state
        if state.circuit is Circuit.OPEN:  # the request was sent before the circuit opened
            return state
        if state.succeeded + 1 >= self.config.probes:
            return BreakerState()
        return replace(state, succeeded=state.succeeded + 1, probing=max(0, state.probing - 1))

    def failed(self, state: BreakerState, now: float) -> BreakerState:
        if state.circuit is Circuit.OPEN:
            return state
        failures = state.failures + 1
        if state.circuit is Circuit.CLOSED and failures < self.config.max_failures:
            return replace(state, failures=failures)
        pause_s = min(self.config.max_pause_s, self.config.first_pause_s * 2.0 ** min(state.opens, 32))
        return BreakerState(
            circuit=Circuit.OPEN, failures=failures, opens=state.opens + 1, retry_at_s=now + pause_s
        )

    def abandoned(self, state: BreakerState) -> BreakerState:
        """A request ended in a way that says nothing about the replica, for example because its client left."""
        return replace(state, probing=max(0, state.probing - 1)) if state.probing else state
