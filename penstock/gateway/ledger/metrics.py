"""The ledger's counters, for the gateway's registry of metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.gateway.ledger.journal import Journal
from penstock.gateway.ledger.prices import PICODOLLARS_PER_DOLLAR
from penstock.gateway.ledger.rows import UsageRow
from penstock.gateway.ledger.spend import LedgerSpendBook
from penstock.gateway.ledger.throughput import TokenMeter


class LedgerMetrics(Collector):
    """Written by the ledger on the event loop, read by a scrape. `book` knows the prices of the moment."""

    def __init__(self, journal: Journal, book: LedgerSpendBook, clock: Callable[[], float]) -> None:
        self._journal = journal
        self._book = book
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
        rows = CounterMetricFamily(
            "penstock_usage_rows", "Requests in the usage ledger.", labels=("model_name", "status")
        )
        for (model, status), count in self.rows.items():
            rows.add_metric([model, status], count)
        yield rows
        cost = CounterMetricFamily(
            "penstock_usage_cost_dollars", "What they cost at the configured prices.", labels=("model_name",)
        )
        for model, picodollars in self.cost_picodollars.items():
            cost.add_metric([model], picodollars / PICODOLLARS_PER_DOLLAR)
        yield cost
        yield from self._speeds()
        for name, help_text, value in (
            ("journal_failures", "Lines that the usage journal did not take.", self.journal_failures),
            ("flush_failures", "Times that the database did not take usage rows.", self.flush_failures),
            ("recovered_rows", "Rows recovered from journals of stopped processes.", self.recovered_rows),
            ("refused_rows", "Rows dropped because the database will never take them.", self.refused_rows),
            ("lost_rows", "Rows lost: no disk, no database, no memory.", self.lost_rows),
        ):
            yield CounterMetricFamily(f"penstock_usage_{name}", help_text, value=value)
        yield GaugeMetricFamily(
            "penstock_usage_journal_bytes",
            "Bytes of usage rows that are in the journal, written to the database or not.",
            value=self._journal.num_bytes,
        )

    def _speeds(self) -> Iterator[Metric]:
        speed = GaugeMetricFamily(
            "penstock_tokens_per_hour",
            "Tokens of finished requests in the last hour; input without cached tokens.",
            labels=("model_name", "kind"),
        )
        price = GaugeMetricFamily(
            "penstock_accelerator_dollars_per_million_tokens",
            "The accelerators' hour divided by the tokens that this process made of it.",
            labels=("model_name",),
        )
        for model, meter in self._meters.items():
            rate = meter.rate()
            speed.add_metric([model, "input"], rate.input)
            speed.add_metric([model, "output"], rate.output)
            dollars_per_hour = self._book.prices.dollars_per_hour(model)
            if dollars_per_hour is not None and (dollars := rate.dollars_per_million(dollars_per_hour)):
                price.add_metric([model], dollars)
        yield speed
        yield price
