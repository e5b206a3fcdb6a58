"""Figures of a large run, kept as it goes: eight bytes per request and figure, so that a million fit easily."""

from __future__ import annotations

from array import array
from collections import Counter, deque

from penstock.simulator.report import percentile


class Tally:
    def __init__(self, ttft_window_s: float = 20.0) -> None:
        self.ttft_s = array("d")
        self.tpot_s = array("d")  # time per output token after the first, of requests that have several
        self.e2e_s = array("d")
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.ended: Counter[str] = Counter()  # by finish reason or error code
        self.last_end_s = 0.0
        self.num_retries = 0
        self.num_held = 0
        self.reasons: Counter[str] = Counter()  # of routing decisions
        self._window_s = ttft_window_s
        self._recent: deque[tuple[float, float]] = deque()  # when, and the time to first token

    def first_token(self, now: float, ttft_s: float) -> None:
        self.ttft_s.append(ttft_s)
        self._recent.append((now, ttft_s))

    def end(self, how: str, now: float) -> None:
        self.ended[how] += 1
        self.last_end_s = now

    @property
    def num_ended(self) -> int:
        return self.ended.total()

    def recent_ttft_p95_s(self, now: float) -> float | None:
        while self._recent and self._recent[0][0] < now - self._window_s:
            self._recent.popleft()
        if not self._recent:
            return None
        return percentile(sorted(ttft_s for _, ttft_s in self._recent), 95)
