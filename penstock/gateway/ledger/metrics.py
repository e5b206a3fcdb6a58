"""The ledger's counters, and the tokens per hour that a model generated in the last hour, for `/metrics`.

`TokenMeter` is the reverse of `prices.AcceleratorCost`, which turns a measured speed into a price list: the meter
says what tokens cost at the present speed and load.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.gateway.ledger.journal import Journal
from penstock.gateway.ledger.prices import PICODOLLARS_PER_DOLLAR
from penstock.gateway.ledger.rows import UsageRow
from penstock.gateway.ledger.spend import LedgerSpendTracker
from penstock.gateway.metrics.table import metric_by, metrics

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
        """Return the cost of a million input and output tokens together; None while nothing runs, since an idle hour
        has no price per token."""
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
        """Tokens per hour. In the first hour the rate is estimated from the time so far, at least one minute."""
        now = self._clock()
        first = int(now // 60) - WINDOW_MINUTES + 1
        recent = [minute for minute in self._minutes if minute.number >= first]
        covered_s = min(WINDOW_MINUTES * 60.0, max(60.0, now - self._started_at))
        hours = covered_s / 3600
        return TokensPerHour(
            sum(minute.input_tokens for minute in recent) / hours,
            sum(minute.output_tokens for minute in recent) / hours,
        )


class LedgerMetrics(Collector):
    """Written by the ledger on the event loop, read by a scrape. `spending` knows the prices of the moment."""

    def __init__(self, journal: Journal, spending: LedgerSpendTracker, clock: Callable[[], float]) -> None:
        self._journal = journal
        self._spending = spending
        self._clock = clock
        self._meters: dict[str, TokenMeter] = {}
        self.rows: Counter[tuple[str, str]] = Counter()  # by model and status
        self.cost_picodollars: Counter[str] = Counter()  # by model
        self.journal_failures = 0
        self.flush_failures = 0
        self.recovered_rows = 0
        self.refused_rows = 0
        self.lost_rows = 0
        self.num_settled = 0
        self._num_written = 0  # of those
        self._written_until = clock()

    def count(self, row: UsageRow) -> None:
        self.num_settled += 1
        self.rows[row.model, row.status] += 1
        self.cost_picodollars[row.model] += row.cost_picodollars
        meter = self._meters.get(row.model)
        if meter is None:
            meter = self._meters[row.model] = TokenMeter(self._clock)
        meter.add(row.prompt_tokens - row.cached_tokens, row.completion_tokens)

    def note_written(self, num_settled: int, until: float) -> None:
        """The database has the first `num_settled` rows of this process: all that were settled before `until`."""
        self._num_written = num_settled
        self._written_until = until

    def collect(self) -> Iterator[Metric]:
        yield metric_by("usage_rows", self.rows)
        costs = self.cost_picodollars.items()
        yield metric_by("usage_cost_dollars", {model: cost / PICODOLLARS_PER_DOLLAR for model, cost in costs})
        yield from self._speeds()
        num_unwritten = self.num_settled - self._num_written
        yield from metrics(
            (
                ("usage_journal_failures", self.journal_failures),
                ("usage_flush_failures", self.flush_failures),
                ("usage_recovered_rows", self.recovered_rows),
                ("usage_refused_rows", self.refused_rows),
                ("usage_lost_rows", self.lost_rows),
                ("usage_journal_bytes", self._journal.num_bytes),
                ("usage_unwritten_rows", num_unwritten),
                (
                    "usage_lag_seconds",
                    max(0.0, self._clock() - self._written_until) if num_unwritten else 0.0,
                ),
            )
        )

    def _speeds(self) -> Iterator[Metric]:
        speeds: dict[tuple[str, ...], float] = {}
        prices: dict[str, float] = {}
        hours: dict[str, float] = {}
        for model, meter in self._meters.items():
            rate = meter.rate()
            speeds[model, "input"] = rate.input
            speeds[model, "output"] = rate.output
            dollars_per_hour = self._spending.prices.dollars_per_hour(model)
            if dollars_per_hour is None:
                continue
            hours[model] = float(dollars_per_hour)
            if dollars := rate.dollars_per_million(dollars_per_hour):
                prices[model] = dollars
        yield metric_by("tokens_per_hour", speeds)
        yield metric_by("accelerator_dollars_per_million_tokens", prices)
        yield metric_by("accelerator_dollars_per_hour", hours)
