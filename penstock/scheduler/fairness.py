"""Fairness between tenants: counts how much service each has received. Knows no requests and no tiers.

Each tenant has a virtual counter of the service it received. Within a tier, the tenant with the smallest counter
goes first. A tenant that becomes active starts at no less than the smallest counter of those already active, so
that idle time is not credit; one that leaves keeps its counter, so that pausing does not wipe out a debt.
"""

from __future__ import annotations

from penstock.scheduler.keyed_heap import KeyedHeap

# An output token costs about twice a prompt token: it is computed alone instead of in a batch with its neighbours.
PROMPT_TOKEN_WEIGHT = 1
OUTPUT_TOKEN_WEIGHT = 2
_MAX_IDLE_TENANTS = 4096


class TenantAccount:
    """`service` only ever grows. `num_active` counts the tenant's requests that wait or run."""

    __slots__ = ("num_active", "number", "service", "tenant")

    def __init__(self, tenant: str, number: int) -> None:
        self.tenant = tenant
        self.number = number
        self.service = 0
        self.num_active = 0


class TenantAccounts:
    def __init__(self) -> None:
        self._active: dict[str, TenantAccount] = {}
        self._idle: dict[
            str, TenantAccount
        ] = {}  # in the order they became idle; the oldest is forgotten first
        self._by_service: KeyedHeap[TenantAccount] = (
            KeyedHeap()
        )  # active ones; a key may lag behind `service`
        self._num_tenants = 0

    def enter(self, tenant: str) -> TenantAccount:
        """Count one more request of this tenant."""
        account = self._active.get(tenant)
        if account is None:
            account = self._idle.pop(tenant, None)
            if account is None:
                self._num_tenants += 1
                account = TenantAccount(tenant, self._num_tenants)
            least = least_served(self._by_service)
            if least is not None:
                account.service = max(account.service, least.service)
            self._active[tenant] = account
            self._by_service.push(account.number, account.service, account)
        account.num_active += 1
        return account

    def leave(self, account: TenantAccount) -> None:
        """Count one request less."""
        account.num_active -= 1
        if account.num_active:
            return
        del self._active[account.tenant]
        self._by_service.discard(account.number)
        self._idle[account.tenant] = account
        if len(self._idle) > _MAX_IDLE_TENANTS:
            del self._idle[next(iter(self._idle))]


def least_served(accounts: KeyedHeap[TenantAccount]) -> TenantAccount | None:
    """The account with the least service, from a heap whose keys may be too small because service grew since."""
    while (account := accounts.first()) is not None:
        if accounts.first_key() == account.service:
            return account
        accounts.push(account.number, account.service, account)
    return None
