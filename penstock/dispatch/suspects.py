"""Keeps a request that ends its engines from ending all of them. Pure: knows names and times only.

When an engine ends, the requests of many tenants continue on other replicas. A request that has lost two replicas in
succession is suspect, and its next attempt is a test:

1. A replica is set aside for the tenant, which uses that replica only. The requests of others avoid the replica. The
   test begins when other tenants' recent requests have left the replica, or have run for a while without a loss. If
   need be, requests wait for the beginning or the end of a test.
2. If the replica lives, or answers the request, the test is over. If the replica is lost, and no other tenant had
   sent a request just before, the loss counts against the tenant, and all its requests are watched from then on.
3. After two such losses, without a watched request that was served in between, the tenant's circuit opens: its
   requests are refused for a pause. Then one request at a time is tried, alone, until one is served.

A replica counts as lost in succession if it gave a sign of life after the loss before: replicas of one machine that
fail together count once. Nothing happens to requests without a tenant, or while there is only one tenant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import msgspec

from penstock.core.errors import EngineUnavailable
from penstock.core.figures import Count, NotNegative, Positive
from penstock.dispatch.health import BreakerConfig, BreakerState, Circuit, CircuitBreaker

MAX_CIRCUITS = 1024
_NOBODY: frozenset[str] = frozenset()


class SuspectConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_losses: Count = 2  # of a request, from which on it is suspect
    test_s: NotNegative = 2.0
    max_wait_s: NotNegative = 10.0  # for a test; after that, tenants share a replica
    look_again_s: Positive = 0.25
    memory_s: NotNegative = 600.0  # the time for which losses and silent tenants are remembered
    breaker: BreakerConfig = BreakerConfig(max_failures=2, probes=1, first_pause_s=10.0, max_pause_s=600.0)


class _Test(msgspec.Struct):
    replica_id: str
    until_s: float
    looked_s: float = -math.inf  # when other tenants' requests at the replica were last looked for
    is_ready: bool = False  # there were none
    has_begun: bool = False  # a watched request was sent
    is_lost: bool = False


class Suspects:
    def __init__(self, config: SuspectConfig) -> None:
        self.config = config
        self.num_convicted = 0  # tests that the replica did not survive
        self._breaker = CircuitBreaker(config.breaker)
        self._circuits: dict[str, BreakerState] = {}  # by tenant; only tenants with a counted loss
        self._changed_s: dict[str, float] = {}  # when each of these changed last
        self._tests: dict[str, _Test] = {}  # by tenant
        self._last_tenant = ""
        self._several_until_s = 0.0  # until then, there are several tenants

    def is_quiet(self, now: float) -> bool:
        """Return whether no tenant is watched because of earlier losses."""
        if self._tests or self._circuits:
            self._forget_old(now)
        return not self._tests and not self._circuits

    def arrived(self, tenant: str, now: float) -> None:
        """Note the tenant of a new request."""
        if tenant != self._last_tenant:
            if self._last_tenant and tenant:
                self._several_until_s = now + self.config.memory_s
            self._last_tenant = tenant

    def is_watched(self, tenant: str, num_losses: int, now: float) -> bool:
        """Return whether a request of the tenant is sent in a test."""
        if not tenant or now >= self._several_until_s:
            return False
        return num_losses >= self.config.max_losses or tenant in self._circuits

    def refusal(self, tenant: str, now: float) -> EngineUnavailable | None:
        """Return the error of the tenant's requests, while its circuit is open."""
        state = self._circuits.get(tenant)
        if state is None or now >= self._several_until_s or self._breaker.allows(state, now):
            return None
        return EngineUnavailable(
            "Engines ended while they had requests of this workspace, which are refused for a while.",
            hint="Do not repeat the last requests as they are.",
            retry_after_s=max(1.0, state.retry_at_s - now),
        )

    def must_wait(
        self, tenant: str, serving: Collection[str], waited_s: float, now: float, *, is_watched: bool
    ) -> bool:
        """Return whether a request waits for the end of a test. `serving` are the replicas that could take it."""
        if not self._tests or waited_s >= self.config.max_wait_s:
            return False
        self._forget_old(now)
        own = self._tests.get(tenant)
        if own is not None and not own.is_lost:
            return not (is_watched and own.is_ready)
        return bool(serving) and self._tested() >= set(serving)

    def replica_to_clear(
        self, tenant: str, last_sent_s: Callable[[str], float], serving: Collection[str], now: float
    ) -> str | None:
        """Return the replica that other tenants must leave before the test of a tenant begins, and set one aside if
        need be: the one that other tenants have sent nothing for the longest time. Returns None if there is none, if
        the test may begin, or if the replica was looked at just before. `last_sent_s` tells when another tenant sent
        a replica its latest request."""
        self._forget_old(now)
        own = self._tests.get(tenant)
        if own is None or own.is_lost or own.replica_id not in serving:
            free = set(serving) - {test.replica_id for name, test in self._tests.items() if name != tenant}
            if not free:
                return None
            chosen = min(sorted(free), key=last_sent_s)
            own = self._tests[tenant] = _Test(chosen, now + self.config.max_wait_s)
        if own.is_ready or now < own.looked_s + self.config.look_again_s / 2.0:
            return None
        own.looked_s = now
        return own.replica_id

    def cleared(self, tenant: str) -> None:
        """Note that other tenants have left the replica that is set aside for a tenant."""
        self._tests[tenant].is_ready = True

    def avoided(
        self, tenant: str, serving: Collection[str], now: float, *, is_watched: bool
    ) -> frozenset[str]:
        """Return the replicas that a request should not go to, if there are others."""
        if not self._tests:
            return _NOBODY
        self._forget_old(now)
        own = self._tests.get(tenant)
        if is_watched and own is not None and not own.is_lost:
            return frozenset(name for name in serving if name != own.replica_id)
        return frozenset(self._tested())

    def sent(self, tenant: str, replica_id: str, now: float) -> None:
        """Note that a watched request was sent."""
        state = self._circuits.get(tenant)
        if state is not None:
            self._set(tenant, self._breaker.sent(state, now), now)
        own = self._tests.get(tenant)
        if own is None or own.is_lost or own.replica_id != replica_id or not own.has_begun:
            until_s = now + self.config.test_s
            self._tests[tenant] = _Test(replica_id, until_s, is_ready=True, has_begun=True)

    def served(self, tenant: str, now: float) -> None:
        """Note that a watched request was answered to its end."""
        self._tests.pop(tenant, None)
        state = self._circuits.get(tenant)
        if state is not None:
            self._set(tenant, self._breaker.succeeded(state), now)

    def abandoned(self, tenant: str, now: float) -> None:
        """Note that a watched request ended for another reason."""
        state = self._circuits.get(tenant)
        if state is not None:
            self._set(tenant, self._breaker.abandoned(state), now)

    def lost(self, tenant: str, replica_id: str, now: float, *, is_alone: bool) -> None:
        """Note that the replica of a watched request was lost. `is_alone`: no other tenant had sent the replica a
        request during the time of a test."""
        own, state = self._tests.get(tenant), self._circuits.get(tenant)
        is_probe = state is not None and state.circuit is Circuit.HALF_OPEN
        is_tested = own is not None and own.replica_id == replica_id and not own.is_lost and now < own.until_s
        if own is not None and is_tested:
            own.is_lost = True
        if is_alone and (is_tested or is_probe):
            self.num_convicted += 1
            self._set(tenant, self._breaker.failed(state or BreakerState(), now), now)
        else:
            self.abandoned(tenant, now)

    def _set(self, tenant: str, state: BreakerState, now: float) -> None:
        if state == BreakerState():
            self._circuits.pop(tenant, None)
            self._changed_s.pop(tenant, None)
            return
        if tenant not in self._circuits and len(self._circuits) >= MAX_CIRCUITS:
            oldest = next(iter(self._circuits))
            del self._circuits[oldest], self._changed_s[oldest]
        self._circuits[tenant] = state
        self._changed_s[tenant] = now

    def _tested(self) -> set[str]:
        return {test.replica_id for test in self._tests.values() if not test.is_lost}

    def _forget_old(self, now: float) -> None:
        for tenant in [name for name, test in self._tests.items() if now >= test.until_s]:
            del self._tests[tenant]
        for tenant, changed_s in tuple(self._changed_s.items()):
            if now >= max(changed_s, self._circuits[tenant].retry_at_s) + self.config.memory_s:
                del self._circuits[tenant], self._changed_s[tenant]
