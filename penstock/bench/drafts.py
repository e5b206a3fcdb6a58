"""Reads from a server's /metrics how many drafted tokens were verified and accepted, and reports them for one run.

A Penstock server counts by drafter and position. Other servers with vLLM's metrics count drafts, and accepted tokens
by position: their drafts count as one drafter, and as if each had been of the longest length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import zip_longest

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.table import Table

from penstock.bench.http import ProtocolError, exchange
from penstock.bench.load import Target
from penstock.core.errors import UsageError
from penstock.core.messages import HEARTBEAT_INTERVAL_S

SETTLING_S = 2 * HEARTBEAT_INTERVAL_S  # engines report at least that often
_PREFIX = "vllm:spec_decode_num_"


class DrafterReport(msgspec.Struct, frozen=True):
    """Counts of one drafter's tokens, by position in a draft."""

    drafter: str
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def num_drafts(self) -> int:
        return self.drafted[0] if self.drafted else 0

    def since(self, before: DrafterReport) -> DrafterReport:
        return DrafterReport(
            self.drafter, _minus(self.drafted, before.drafted), _minus(self.accepted, before.accepted)
        )


def _minus(after: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    return tuple(late - early for late, early in zip_longest(after, before, fillvalue=0))


async def read_drafters(target: Target, *, settles: bool = False) -> dict[str, DrafterReport]:
    """Return a server's counts so far, by drafter. With `settles`, wait until the metrics know of all that has ended.
    Raises UsageError if the metrics have no such counts."""
    if settles:
        await asyncio.sleep(SETTLING_S)
    try:
        status, body = await exchange(target.endpoint, target.endpoint.request("GET", "/metrics"))
    except (OSError, ProtocolError) as error:
        raise UsageError(f"{target.name} has no readable /metrics: {error}.") from error
    if status != 200:
        raise UsageError(f"{target.name} answered /metrics with status {status}.")
    return parse_drafters(body.decode(), target)


def parse_drafters(page: str, target: Target) -> dict[str, DrafterReport]:
    # By metric, then by drafter, then by position.
    counts: dict[str, dict[str, dict[int, int]]] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = sample.labels
                if sample.name.endswith("_total") and labels.get("model_name") == target.model:
                    by_position = counts.setdefault(sample.name, {}).setdefault(labels.get("drafter", ""), {})
                    position = int(labels.get("position", 0))
                    by_position[position] = by_position.get(position, 0) + int(sample.value)
    except ValueError as error:
        raise UsageError(f"The metrics of {target.name} cannot be read: {error}.") from error
    if f"{_PREFIX}drafts_total" not in counts:
        raise UsageError(
            f"The metrics of {target.name} have no counts of drafts for {target.model}.",
            hint="Leave out --speculate-report, or turn on speculation in that server.",
        )
    accepted = counts.get("penstock_drafter_accepted_tokens_total", {})
    drafters = {
        name: DrafterReport(name, _in_order(drafted), _in_order(accepted.get(name, {})))
        for name, drafted in counts.get("penstock_drafter_draft_tokens_total", {}).items()
    }
    num_drafts = counts[f"{_PREFIX}drafts_total"][""][0]
    if not drafters and num_drafts:
        right = _in_order(counts.get(f"{_PREFIX}accepted_tokens_per_pos_total", {}).get("", {}))
        drafters["all"] = DrafterReport("all", (num_drafts,) * max(1, len(right)), right)
    return drafters


def _in_order(by_position: dict[int, int]) -> tuple[int, ...]:
    return tuple(by_position[position] for position in sorted(by_position))


def reports_since(
    before: dict[str, DrafterReport], after: dict[str, DrafterReport]
) -> tuple[DrafterReport, ...]:
    """Return the counts of a run: of the drafters whose drafts were verified in it."""
    nothing = DrafterReport("", (), ())
    reports = (report.since(before.get(name, nothing)) for name, report in after.items())
    return tuple(report for report in reports if report.num_drafts > 0)


def drafts_table(reports: Sequence[DrafterReport]) -> Table:
    table = Table(
        title="Drafts that were verified" if reports else "No draft was verified in this run",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("drafter", no_wrap=True)
    for heading in ("drafts", "tokens", "accepted", "tokens/step"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("accepted by position, %")
    for report in reports:
        drafted, accepted = sum(report.drafted), sum(report.accepted)
        shares = zip_longest(report.accepted, report.drafted, fillvalue=0)
        table.add_row(
            report.drafter,
            f"{report.num_drafts:,}",
            f"{drafted:,}",
            f"{accepted / drafted:.0%}",
            f"{1 + accepted / report.num_drafts:.2f}",
            " ".join(f"{100 * right / tried:.0f}" if tried else "–" for right, tried in shares),
        )
    return table
