"""Clocks that count the CPU time of this process: time in which other processes had the core does not count."""

from __future__ import annotations

import time
from collections import deque
from statistics import mean, median

import torch

_HIDDEN, _INNER, _LAYERS = 256, 704, 4  # of the matrix products of a probe: those of a small model


class CpuClock:
    """Counts the CPU time of this process, and time that is skipped."""

    def __init__(self) -> None:
        self._skipped_s = -time.process_time()

    def now(self) -> float:
        return time.process_time() + self._skipped_s

    def skip_to(self, now: float) -> None:
        self._skipped_s += max(0.0, now - self.now())


class SteadyClock(CpuClock):
    """Also counts as if the speed of the core never changed, and only the time of steps."""

    def __init__(self) -> None:
        super().__init__()
        self._usual_s: float | None = None  # of a probe
        self._probes_s: deque[float] = deque(maxlen=4)
        self._weights = [(torch.randn(_HIDDEN, _INNER), torch.randn(_INNER, _HIDDEN)) for _ in range(_LAYERS)]

    def end_step(self, began_s: float) -> float:
        """Scale the seconds of a step that has just ended by the speed of the core. Returns the time of its end."""
        elapsed_s = self.now() - began_s
        self._probes_s.append(self.probe_s())
        usual_s = self._usual_s or self._probes_s[-1]
        ended_s = began_s + elapsed_s * usual_s / mean(self._probes_s)
        self.set(ended_s)
        return ended_s

    def set(self, now: float) -> None:
        """Go on from this time, so that what was done since then takes none."""
        self._skipped_s += now - self.now()

    def set_usual_speed(self) -> None:
        self._usual_s = median(self.probe_s() for _ in range(200))

    @torch.inference_mode()
    def probe_s(self) -> float:
        """Time matrix products as long as those of a small step, and some Python, as a step has both."""
        began_s = time.process_time()
        rows = torch.ones(8, _HIDDEN)
        for up, down in self._weights:
            rows = torch.tanh(rows @ up) @ down
        total = 0
        for number in range(6000):
            total += number & 3
        return time.process_time() - began_s
