"""Checks the limits of gateways while a simulation runs: none may be exceeded, and no request may be refused that all
limits allow. Implements the rules of docs/limits.md a second time, without the buckets of the gateway.

A limit per minute allows the amount of one minute at once, and refills evenly over time. The use beyond the refill is
added up, and may not exceed the amount of one minute when a request is admitted. A running request counts with the
reserved tokens, and an ended request with the used tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from penstock.core.request import Request
from penstock.simulator.driver import Admission
from penstock.simulator.report import Outcome

_SECONDS = 60.0
_TOLERANCE = 1e-3  # of a request or token: sums are rounded
_MAX_RESERVED_OUTPUT_TOKENS = 1024


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of every tenant, as the settings of a gateway name them; None is no limit."""

    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    concurrent_requests: int | None = None

    def reserved(self, request: Request) -> tuple[int, int, int]:
        """Return the requests, input tokens and output tokens that a request reserves."""
        most = _MAX_RESERVED_OUTPUT_TOKENS
        if self.output_tokens_per_minute is not None:
            most = min(most, max(1, self.output_tokens_per_minute // 4))
        return 1, len(request.prompt_token_ids), min(request.sampling.max_tokens, most)


@dataclass(slots=True)
class _Used:
    """The use of a tenant beyond the refill, for each limit per minute."""

    amounts: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    num_running: int = 0
    at_s: float = 0.0


class CheckedLimits:
    """Passes every request on to the limits of a gateway, and notes decisions that are wrong."""

    def __init__(self, limits: TenantLimits, gateway: Admission, wrong: list[str]) -> None:
        self._limits = limits
        self._per_minute = (
            limits.requests_per_minute,
            limits.input_tokens_per_minute,
            limits.output_tokens_per_minute,
        )
        self._gateway = gateway
        self._wrong = wrong
        self._used: dict[str, _Used] = {}
        self._running: dict[str, tuple[int, int, int]] = {}  # what each request reserved

    def admit(self, request: Request, now: float) -> str | None:
        refusal = self._gateway.admit(request, now)
        used = self._at(request.tenant, now)
        reserved = self._limits.reserved(request)
        if refusal is None:
            exceeded = self._exceeded(used, reserved, _TOLERANCE)
            if exceeded is not None:
                self._wrong.append(f"{request.id} was admitted beyond {exceeded} of {request.tenant}")
            self._add(used, reserved)
            used.num_running += 1
            self._running[request.id] = reserved
        elif self._exceeded(used, reserved, -_TOLERANCE) is None:
            self._wrong.append(f"{request.id} was refused within all limits of {request.tenant}")
        return refusal

    def ended(self, outcome: Outcome, now: float) -> None:
        self._gateway.ended(outcome, now)
        request = outcome.arrival.request
        reserved = self._running.pop(request.id, None)
        if reserved is None:
            return
        used = self._at(request.tenant, now)
        used.num_running -= 1
        has_begun = outcome.queue_s is not None
        num_input = len(request.prompt_token_ids) - outcome.num_cached_tokens if has_begun else 0
        self._add(used, (0, num_input - reserved[1], len(outcome.token_ids) - reserved[2]))

    def _at(self, tenant: str, now: float) -> _Used:
        used = self._used.setdefault(tenant, _Used(at_s=now))
        for place, limit in enumerate(self._per_minute):
            if limit is not None:
                share = limit * (now - used.at_s) / _SECONDS
                used.amounts[place] = max(0.0, used.amounts[place] - share)
        used.at_s = now
        return used

    def _exceeded(self, used: _Used, reserved: tuple[int, int, int], slack: float) -> str | None:
        """Return the limit that one more request would exceed by more than `slack`, in words."""
        most = self._limits.concurrent_requests
        if most is not None and used.num_running >= most:
            return f"{most} concurrent requests"
        names = ("requests", "input tokens", "output tokens")
        for name, limit, amount, more in zip(names, self._per_minute, used.amounts, reserved, strict=True):
            if limit is not None and amount + more > limit + slack:
                return f"{limit} {name} per minute"
        return None

    def _add(self, used: _Used, amounts: tuple[int, int, int]) -> None:
        used.amounts = [max(0.0, amount + more) for amount, more in zip(used.amounts, amounts, strict=True)]
