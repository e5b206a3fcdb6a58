"""Runs simulations for the commands, and prints how far long runs are."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.cli.console import stderr_console

if TYPE_CHECKING:
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


def duration(seconds: float) -> str:
    """Return a duration in words."""
    for unit, size in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:.0f} s"
