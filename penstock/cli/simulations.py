"""Runs simulations for the commands, with the limits of gateways, and prints how far long runs are."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.cli.console import stderr_console
from penstock.core.errors import UsageError

if TYPE_CHECKING:
    from penstock.core.request import Request
    from penstock.gateway.ratelimits.meters import CallerMeters
    from penstock.gateway.ratelimits.spend import Demand
    from penstock.simulator import Report, SimulationConfig
    from penstock.simulator.driver import Admission
    from penstock.simulator.report import Outcome

PROGRESS_S = 2.0  # between two lines


class SimulationRuns:
    """Runs one or more simulations of equally many requests. A long run prints a line every few seconds."""

    def __init__(self, title: str, config: SimulationConfig, most_runs: int = 1) -> None:
        self._title = title
        self.num_requests = config.workload.num_requests
        self._most_runs = most_runs
        self._num_runs = 0
        self._began_s = self._shown_s = time.monotonic()

    def simulate(
        self,
        config: SimulationConfig,
        on_outcome: Callable[[Outcome], None] | None = None,
        admission: Admission | None = None,
    ) -> Report:
        from penstock.simulator import simulate

        # A run makes no reference cycles, and searching its many live objects for cycles again and again takes time.
        gc.disable()
        try:
            return simulate(config, self._tell, on_outcome, admission=admission)
        finally:
            gc.enable()
            self._num_runs += 1

    def _tell(self, num_ended: int, now: float) -> None:
        moment_s = time.monotonic()
        if moment_s - self._shown_s < PROGRESS_S:
            return
        self._shown_s = moment_s
        done = self._num_runs * self.num_requests + num_ended
        left = self._most_runs * self.num_requests - done
        remaining = duration((moment_s - self._began_s) * max(0, left) / done) if done else "unknown time"
        title = self._title
        if self._most_runs > 1:
            title += f", simulation {self._num_runs + 1} of at most {self._most_runs}"
        stderr_console().print(
            f"{title}: {num_ended:,} of {self.num_requests:,} requests, {now:,.0f} s of virtual time, "
            f"{remaining} left"
        )


class GatewayLimits:
    """The limits of a scenario, counted by the meters that serve. Implements `simulator.driver.Admission`."""

    def __init__(self, settings: dict[str, Any], name: str) -> None:
        from penstock.gateway.ratelimits.meters import Meters
        from penstock.gateway.ratelimits.settings import LimitSettings

        try:
            self._settings = msgspec.convert(settings, LimitSettings)
        except msgspec.ValidationError as error:
            raise UsageError(f"The limits of {name} are wrong: {error}.") from error
        self._settings.check()
        self._meters = Meters(self._settings)
        self._leases: dict[str, tuple[CallerMeters, Demand]] = {}

    def admit(self, request: Request, now: float) -> str | None:
        from penstock.core.errors import RateLimited
        from penstock.core.identity import Principal
        from penstock.gateway.ratelimits.spend import Demand

        caller = Principal(workspace_id=request.tenant, key_id=request.tenant)
        meters = self._meters.of_caller(caller, request.model or None, now)
        if meters.limits.has_budget:
            raise UsageError(
                "Budgets in dollars are not simulated.", hint="Leave dollars_per_day and _month out."
            )
        most = min(request.sampling.max_tokens, meters.limits.max_reserved_output_tokens)
        demand = Demand(len(request.prompt_token_ids), most, 0.0)
        if not meters.admits(now) or not meters.fits(demand, now):
            return RateLimited.code
        meters.admit()
        meters.take(demand)
        self._leases[request.id] = meters, demand
        return None

    def ended(self, outcome: Outcome, now: float) -> None:
        from penstock.gateway.ratelimits.spend import Demand

        lease = self._leases.pop(outcome.arrival.request.id, None)
        if lease is not None:
            meters, reserved = lease
            num_prompt = len(outcome.arrival.request.prompt_token_ids) - outcome.num_cached_tokens
            used = Demand(num_prompt if outcome.queue_s is not None else 0, len(outcome.token_ids), 0.0)
            meters.settle(reserved, used, now)


def duration(seconds: float) -> str:
    """Return a duration in words."""
    for unit, size in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:.0f} s"
