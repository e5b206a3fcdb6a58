"""Decides who may send requests to one external server now.

A server that cannot be connected to is left alone by all (one circuit breaker). Every other failure may be the
request's own: a prompt can make a server answer 500, hang or crash. Such failures count for the workspace that sent
the request, which has a circuit breaker of its own at the server. So no workspace can close a server to another.

When several workspaces fail and none is served in between, the server itself fails. From the third such workspace on,
every other workspace begins as after a pause, with one or two requests at a time.
"""

from __future__ import annotations

from penstock.dispatch.health import BreakerState, Circuit, CircuitBreaker

NUM_FAILING = 3  # workspaces whose circuits opened, by which a server counts as failing
MAX_STATES = 1024  # workspaces that are remembered for their failures
_CLOSED = BreakerState()


class ServerCircuits:
    """The circuit breakers of one server. A caller that sends a request calls `sent`, and at its end `succeeded`,
    `failed`, `unreachable` or `abandoned`."""

    __slots__ = ("_breaker", "_connecting", "_last_failures", "_opened", "_tenants")

    def __init__(self, breaker: CircuitBreaker) -> None:
        self._breaker = breaker
        self._connecting = _CLOSED
        self._tenants: dict[str, BreakerState] = {}  # whose circuits are not closed, or that failed last
        self._last_failures: dict[str, float] = {}  # when each of these failed last
        self._opened: set[str] = set()  # workspaces whose circuits opened since anybody was served

    @property
    def circuit(self) -> Circuit:
        """Return the circuit as operators see it: open while all requests fail."""
        if self._connecting.circuit is not Circuit.CLOSED:
            return self._connecting.circuit
        return Circuit.OPEN if self._opened else Circuit.CLOSED

    def allows(self, tenant: str, now: float) -> bool:
        if self._connecting.circuit is not Circuit.CLOSED and not self._breaker.allows(self._connecting, now):
            return False
        if not self._tenants:
            return True
        return self._breaker.allows(self._state(tenant), now)

    def sent(self, tenant: str, now: float) -> None:
        if self._connecting.circuit is not Circuit.CLOSED:
            self._connecting = self._breaker.sent(self._connecting, now)
        if self._tenants:
            self._set(tenant, self._breaker.sent(self._state(tenant), now))

    def succeeded(self, tenant: str) -> None:
        """Note an answer, which may be a refusal of the request itself."""
        self.reached()
        if self._tenants:
            self._opened.clear()
            self._set(tenant, self._breaker.succeeded(self._state(tenant)))

    def failed(self, tenant: str, sent_s: float, now: float) -> None:
        """Note a failure that the request may have caused. Requests that were under way together fail together when
        a server ends: they count as one failure."""
        self.reached()
        state = self._state(tenant)
        if state.circuit is Circuit.CLOSED and sent_s < self._last_failures.get(tenant, sent_s):
            return
        self._last_failures[tenant] = now
        self._set(tenant, self._breaker.failed(state, now))
        if self._tenants[tenant].circuit is Circuit.OPEN:
            self._opened.add(tenant)

    def unreachable(self, tenant: str, now: float) -> None:
        """Note that there was no connection: no request has to do with that."""
        self._connecting = self._breaker.failed(self._connecting, now)
        self.abandoned(tenant)

    def reached(self) -> None:
        """Note that the server can be connected to."""
        if self._connecting is not _CLOSED:
            self._connecting = _CLOSED

    def abandoned(self, tenant: str) -> None:
        """Note a request whose end says nothing about the server."""
        self._connecting = self._breaker.abandoned(self._connecting)
        if self._tenants:
            self._set(tenant, self._breaker.abandoned(self._state(tenant)))

    def _state(self, tenant: str) -> BreakerState:
        state = self._tenants.get(tenant)
        if state is not None:
            return state
        return BreakerState(circuit=Circuit.HALF_OPEN) if len(self._opened) >= NUM_FAILING else _CLOSED

    def _set(self, tenant: str, state: BreakerState) -> None:
        if state == _CLOSED:
            self._tenants.pop(tenant, None)
            self._last_failures.pop(tenant, None)
            return
        if tenant not in self._tenants and len(self._tenants) >= MAX_STATES:
            oldest = next(iter(self._tenants))
            del self._tenants[oldest]
            self._last_failures.pop(oldest, None)
        self._tenants[tenant] = state
