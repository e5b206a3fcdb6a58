"""Room that tenants share: waiting requests, connections, bytes.

A tenant may take more while it has less than three times what is left. One tenant alone so gets three quarters, two
get three sevenths each, and there is always room for a tenant that comes later.
"""

from __future__ import annotations

from penstock.core.errors import RateLimited

_FACTOR = 3
RETRY_AFTER_S = 5.0


class Shares:
    """Counts what each tenant has. Requests without a tenant (an empty name) are bounded only by the capacity."""

    __slots__ = ("_by_tenant", "capacity", "used")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._by_tenant: dict[str, int] = {}

    def of(self, tenant: str) -> int:
        return self._by_tenant.get(tenant, 0)

    def is_full_for(self, tenant: str, *, more: int = 0) -> bool:
        """Return whether the tenant has its share. `more` is added to the capacity."""
        own = self._by_tenant.get(tenant, 0)
        return bool(tenant and own) and own >= _FACTOR * (self.capacity + more - self.used)

    def is_over_for(self, tenant: str) -> bool:
        """Return whether all have more than the capacity, or the tenant more than its share."""
        return self.used > self.capacity or self.is_full_for(tenant)

    def take(self, tenant: str, amount: int) -> bool:
        """Add what fits the tenant's share, or is all that the tenant has. Returns whether it was added."""
        self.add(tenant, amount)
        fits = not self.is_over_for(tenant) or self.of(tenant) == amount
        if not fits:
            self.add(tenant, -amount)
        return fits

    def add(self, tenant: str, amount: int = 1) -> None:
        """Count more, or less for a negative amount."""
        self.used += amount
        own = self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + amount
        if not own:
            del self._by_tenant[tenant]


class Holding:
    """What one request takes of room that tenants share, until its end. `refusal` is the sentence for a tenant that
    has its share."""

    __slots__ = ("_amount", "_refusal", "_shares", "_tenant")

    def __init__(self, shares: Shares, tenant: str, refusal: str) -> None:
        self._shares = shares
        self._tenant = tenant
        self._refusal = refusal
        self._amount = 0

    def take(self, amount: int) -> None:
        """Raises RateLimited."""
        if not self._shares.take(self._tenant, amount):
            raise RateLimited(self._refusal, retry_after_s=RETRY_AFTER_S)
        self._amount += amount

    def release(self, amount: int | None = None) -> None:
        """Give back an amount, by default all."""
        amount = self._amount if amount is None else amount
        self._amount -= amount
        self._shares.add(self._tenant, -amount)
