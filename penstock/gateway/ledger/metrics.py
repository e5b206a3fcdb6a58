"""The ledger's counters, for the gateway's registry of metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.gateway.ledger.journal import Journal
from penstock.gateway.ledger.prices import PICODOLLARS_PER_DOLLAR
from penstock.gateway.ledger.rows import UsageRow
from penstock.gateway.ledger.spend import LedgerSpendTracker
from penstock.gateway.ledger.throughput import TokenMeter
from penstock.gateway.metrics.table import metric_by, metrics


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

    def count(self, row: UsageRow) -> None:
        self.rows[row.model, row.status] += 1
        self.cost_picodollars[row.model] += row.cost_picodollars
        meter = self._meters.get(row.model)
        if meter is None:
            meter = self._meters[row.model] = TokenMeter(self._clock)
        meter.add(row.prompt_tokens - row.cached_tokens, row.completion_tokens)

    def collect(self) -> Iterator[Metric]:
        yield metric_by("usage_rows", self.rows)
        costs = self.cost_picodollars.items()
        yield metric_by("usage_cost_dollars", {model: cost / PICODOLLARS_PER_DOLLAR for model, cost in costs})
        yield from self._speeds()
        yield from metrics(
            (
                ("usage_journal_failures", self.journal_failures),
                ("usage_flush_failures", self.flush_failures),
                ("usage_recovered_rows", self.recovered_rows),
                ("usage_refused_rows", self.refused_rows),
                ("usage_lost_rows", self.lost_rows),
                ("usage_journal_bytes", self._journal.num_bytes),
            )
        )

    def _speeds(self) -> Iterator[Metric]:
        speeds: dict[tuple[str, ...], float] = {}
        prices: dict[str, float] = {}
        for model, meter in self._meters.items():
            rate = meter.rate()
            speeds[model, "input"] = rate.input
            speeds[model, "output"] = rate.output
            dollars_per_hour = self._spending.prices.dollars_per_hour(model)
            if dollars_per_hour is not None and (dollars := rate.dollars_per_million(dollars_per_hour)):
                prices[model] = dollars
        yield metric_by("tokens_per_hour", speeds)
        yield metric_by("accelerator_dollars_per_million_tokens", prices)
