"""Measure how long the work of a step takes: on a CPU by the clock, on a GPU by events on its stream."""

from __future__ import annotations

from typing import Protocol

import torch

from penstock.core.clock import Clock


class StepTimer(Protocol):
    """Measures the time of a step from the construction of the timer on. On a GPU the time begins with `begin`,
    because the GPU is idle while the host prepares a step."""

    def begin(self) -> None:
        """Mark the beginning of the work that is submitted to the device. Only the first call counts."""
        ...

    def stop(self, preparation_s: float = 0.0) -> None:
        """Mark the end of the step's work, all of which has been submitted. `preparation_s` is the time of one-time
        work in this step, and is not counted."""
        ...

    def wait(self) -> float:
        """Wait until the step's work is done. Returns its seconds."""
        ...

    @property
    def preparation_s(self) -> float: ...


class HostTimer:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_s = clock.now()
        self._elapsed_s = 0.0
        self.preparation_s = 0.0

    def begin(self) -> None: ...

    def stop(self, preparation_s: float = 0.0) -> None:
        self._elapsed_s = self._clock.now() - self._started_s - preparation_s
        self.preparation_s = preparation_s

    def wait(self) -> float:
        return self._elapsed_s


class CudaTimer:
    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._has_begun = False
        self.preparation_s = 0.0

    def begin(self) -> None:
        if not self._has_begun:
            self._begin.record()
        self._has_begun = True

    def stop(self, preparation_s: float = 0.0) -> None:
        self._end.record()
        self.preparation_s = preparation_s

    def wait(self) -> float:
        self._end.synchronize()
        elapsed_s = float(self._begin.elapsed_time(self._end)) / 1000.0
        return max(0.0, elapsed_s - self.preparation_s)
