"""How many tokens per hour a model really makes, over the last hour, and what each then costs.

The other direction of `prices.AcceleratorCost`: that turns a measured speed into a price list, this says what tokens
cost at the speed and load of now. Knows nothing of requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

WINDOW_MINUTES = 60


@dataclass(slots=True)
class _Minute:
    number: int
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokensPerHour:
    input: float  # without what the KV cache already had
    output: float

    def dollars_per_million(self, dollars_per_hour: Decimal) -> float | None:
        """Both kinds together; None while nothing runs, because an idle hour has no price per token."""
        total = self.input + self.output
        return float(dollars_per_hour) * 1e6 / total if total else None


class TokenMeter:
    """One model's tokens by minute. `clock` never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_at = clock()
        self._minutes: deque[_Minute] = deque(maxlen=WINDOW_MINUTES)

    def add(self, input_tokens: int, output_tokens: int) -> None:
        number = int(self._clock() // 60)
        if not self._minutes or self._minutes[-1].number != number:
            self._minutes.append(_Minute(number))
        minute = self._minutes[-1]
        minute.input_tokens += input_tokens
        minute.output_tokens += output_tokens

    def rate(self) -> TokensPerHour:
        """Until an hour has passed, as if it went on as in the time so far, of which a minute is the least."""
        now = self._clock()
        first = int(now // 60) - WINDOW_MINUTES + 1
        recent = [minute for minute in self._minutes if minute.number >= first]
        covered_s = min(WINDOW_MINUTES * 60.0, max(60.0, now - self._started_at))
        hours = covered_s / 3600
        return TokensPerHour(
            sum(minute.input_tokens for minute in recent) / hours,
            sum(minute.output_tokens for minute in recent) / hours,
        )
