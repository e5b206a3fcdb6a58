"""The metrics of several gateway processes, asked for over their sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.gateway.metrics.table import MetricsExchange


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
    ours, theirs = (
        MetricsExchange(sockets, number, lambda value=value: page(value, num_lines))  # type: ignore[misc]
        for number, value in enumerate((1, 2))
    )
    async with theirs.serving():
        assert total(await ours.page()) == 3 * num_lines


async def test_whoever_dies_in_mid_sentence_does_not_count(tmp_path: Path) -> None:
    async def die_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(page(2)[:-5])
        writer.close()

    sockets = [str(tmp_path / name) for name in ("0", "1", "2")]
    ours = MetricsExchange(sockets, 0, lambda: page(1))
    async with await asyncio.start_unix_server(die_early, sockets[1]):
        assert total(await ours.page()) == 1  # and the third never started
