"""The metrics of several gateway processes, asked for over their sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from penstock.gateway import siblings
from penstock.gateway.ledger.ledger import TokensPerHour
from penstock.gateway.metrics.table import Metric, metric
from penstock.gateway.siblings import MetricsExchange, Siblings, merge


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is not a process that is gone."""
    monkeypatch.setattr(siblings, "ANSWER_TIMEOUT_S", 60.0)


def page(value: int, num_lines: int = 1) -> bytes:
    lines = [f'penstock_things_total{{number="{number:08d}"}} {value}.0\n' for number in range(num_lines)]
    return (
        "# HELP penstock_things_total Things.\n# TYPE penstock_things_total counter\n" + "".join(lines)
    ).encode()


def total(merged: bytes) -> float:
    lines = [line for line in merged.decode().splitlines() if line.startswith("penstock_things_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def test_a_page_that_does_not_fit_into_one_read_arrives_whole(tmp_path: Path) -> None:
    num_lines = 20_000
    sockets = [str(tmp_path / name) for name in ("0", "1")]
    both = [Siblings(sockets, number) for number in (0, 1)]
    ours, _ = (
        MetricsExchange(each, lambda value=value: page(value, num_lines))  # type: ignore[misc]
        for each, value in zip(both, (1, 2), strict=True)
    )
    async with both[1].serving():
        assert total(await ours.page()) == 3 * num_lines


async def test_whoever_dies_in_mid_sentence_does_not_count(tmp_path: Path) -> None:
    async def die_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(page(2)[:-5])
        writer.close()

    sockets = [str(tmp_path / name) for name in ("0", "1", "2")]
    ours = MetricsExchange(Siblings(sockets, 0), lambda: page(1))
    async with await asyncio.start_unix_server(die_early, f"{sockets[1]}.ask"):
        assert total(await ours.page()) == 1  # and the third never started


def rendered(*families: Metric) -> bytes:
    class Fixed(Collector):
        def collect(self) -> Iterable[Metric]:
            return families

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Fixed())
    return generate_latest(registry)


def values(page: bytes) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_a_million_tokens_cost_the_same_whatever_the_number_of_processes(num_workers: int) -> None:
    dollars_per_hour, tokens_per_hour = Decimal("3.50"), 7_000_000.0
    price = TokensPerHour(0.0, tokens_per_hour / num_workers).dollars_per_million(dollars_per_hour)
    assert price is not None
    pages = [
        rendered(
            metric("accelerator_dollars_per_million_tokens", {"m": price}),
            metric("accelerator_dollars_per_hour", {"m": 3.5}),
            metric("tokens_per_hour", {("m", "output"): tokens_per_hour / num_workers}),
        )
        for _ in range(num_workers)
    ]
    found = values(merge(pages))
    assert found["penstock_accelerator_dollars_per_million_tokens"] == pytest.approx(0.5)
    assert found["penstock_accelerator_dollars_per_hour"] == 3.5
    assert found["penstock_tokens_per_hour"] == tokens_per_hour


def test_a_process_without_tokens_does_not_change_the_price() -> None:
    busy = rendered(metric("accelerator_dollars_per_million_tokens", {"m": 0.5}))
    idle = rendered(metric("accelerator_dollars_per_million_tokens", {}))
    for pages in ([busy, idle], [idle, busy]):
        assert values(merge(pages)) == {"penstock_accelerator_dollars_per_million_tokens": 0.5}


def test_the_process_that_is_worst_off_speaks_for_all() -> None:
    pages = [
        rendered(
            metric("limits_redis_up", is_up),
            metric("settings_applied_timestamp_seconds", applied_at),
            metric("usage_lag_seconds", lag_s),
        )
        for is_up, applied_at, lag_s in ((1, 200.0, 0.0), (0, 100.0, 40.0), (1, 200.0, 3.0))
    ]
    assert values(merge(pages)) == {
        "penstock_limits_redis_up": 0,
        "penstock_settings_applied_timestamp_seconds": 100.0,
        "penstock_usage_lag_seconds": 40.0,
    }
