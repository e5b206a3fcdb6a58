"""Joins the metrics of all gateway processes of a server into one page. Each process sends its own over a private
socket; the table of metrics says how their values become one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from penstock.gateway.metrics.table import METRICS, PREFIX, VLLM_PREFIX, Join

ANSWER_TIMEOUT_S = 2.0
MAX_PAGE_BYTES = 1 << 24
# The last line of every page on the socket: a page without it was cut off. Parsers take the line for a comment.
_PAGE_END = b"# EOF\n"


class MetricsExchange:
    """Joins the pages of all processes. `sockets` has one path for each process; `number` is this process's place."""

    def __init__(self, sockets: Sequence[str], number: int, render: Callable[[], bytes]) -> None:
        self._sockets = sockets
        self._number = number
        self._render = render

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._tell, self._sockets[self._number])
        async with server:
            yield

    async def page(self) -> bytes:
        """Return the page of all processes that answer in time."""
        others = [path for index, path in enumerate(self._sockets) if index != self._number]
        pages = await asyncio.gather(*map(_ask, others))
        return merge([self._render(), *(page for page in pages if page)])

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(self._render() + _PAGE_END)
            await writer.drain()
            writer.close()
            await writer.wait_closed()


def merge(pages: Sequence[bytes]) -> bytes:
    """Join pages in the Prometheus text format into one page."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], Sample]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page.decode()):
            families.setdefault(family.name, family)
            samples = values.setdefault(family.name, {})
            join = _join_of(family.name)
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                samples[key] = _joined(samples.get(key), sample, join)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families([_filled(family, values[name]) for name, family in families.items()]))
    return generate_latest(registry)


def _join_of(family_name: str) -> Join:
    """Return how values of this metric are joined. `family_name` has the prefix, as on a page."""
    name = family_name.removeprefix(PREFIX).removeprefix(VLLM_PREFIX)
    return METRICS[name].join if name in METRICS else "sum"


def _joined(known: Sample | None, sample: Sample, join: Join) -> Sample:
    if known is None:
        return sample
    return sample._replace(value=_JOINS[join](known.value, sample.value))


def _harmonic(one: float, other: float) -> float:
    return 1 / (1 / one + 1 / other) if one and other else 0.0


_JOINS: dict[Join, Callable[[float, float], float]] = {
    "sum": lambda one, other: one + other,
    "max": max,
    "min": min,
    "harmonic": _harmonic,
}


def _filled(family: Metric, samples: dict[tuple[str, frozenset[tuple[str, str]]], Sample]) -> Metric:
    whole = Metric(family.name, family.documentation, family.type, family.unit)
    whole.samples = list(samples.values())
    return whole


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


async def _ask(path: str) -> bytes:
    """One process's page; empty when the process gives no whole answer, because it is starting or has died."""
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_PAGE_BYTES)
            try:
                return await reader.readuntil(_PAGE_END)
            finally:
                writer.close()
    return b""
