"""How long a step occupied its device, which is not how long the host waited for it."""

from __future__ import annotations

from typing import Protocol

import torch

from penstock.core.clock import Clock


class StepTimer(Protocol):
    """Starts when it is made."""

    def stop(self) -> None:
        """All of the step's work has been submitted."""
        ...

    def wait(self) -> float:
        """Wait until that work is done; the seconds it took."""
        ...


class HostTimer:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_s = clock.now()
        self._elapsed_s = 0.0

    def stop(self) -> None:
        self._elapsed_s = self._clock.now() - self._started_s

    def wait(self) -> float:
        return self._elapsed_s


class CudaTimer:
    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._begin.record()

    def stop(self) -> None:
        self._end.record()

    def wait(self) -> float:
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000.0
