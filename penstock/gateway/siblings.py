"""Asks all gateway processes of a server one question, such as for their samples, and gathers the answers.

Each process listens on a private Unix socket. A question is one line; the answer is what follows, until the end of
the connection, with a last line that says that the answer is whole. A server of one process asks only itself.

`MetricsExchange` joins the metrics of all processes into one page. The table of metrics says how their values become
one.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from penstock.gateway.metrics.table import METRICS, PREFIX, VLLM_PREFIX, Join

ANSWER_TIMEOUT_S = 2.0
MAX_QUESTION_BYTES = 1 << 12
MAX_ANSWER_BYTES = 1 << 26
_END = b"\n# whole\n"

Answer = Callable[[str], bytes]  # of what follows the topic in a question


class Siblings:
    """`sockets` has one path for each process; `number` is this process's place. `answers` has one function for each
    topic, which must not block or raise."""

    def __init__(self, sockets: Sequence[str] = (), number: int = 0) -> None:
        self._sockets = [f"{path}.ask" for path in sockets]
        self.number = number
        self.num_processes = max(1, len(sockets))
        # A private folder of these processes, for what they share; None for a server of one process.
        self.folder = Path(sockets[0]).parent if len(sockets) > 1 else None
        # Names of this server and of this process, for what is kept in a database.
        self.server = Path(sockets[0]).parent.name[:64] if sockets else secrets.token_hex(8)
        self.process = secrets.token_hex(8)
        self.answers: dict[str, Answer] = {}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        if not self._sockets:
            yield
            return
        server = await asyncio.start_unix_server(
            self._tell, self._sockets[self.number], limit=MAX_QUESTION_BYTES
        )
        async with server:
            yield

    async def ask(self, topic: str, detail: str = "") -> list[bytes]:
        """The answers of this process, and of all others that answer in time."""
        others = [path for index, path in enumerate(self._sockets) if index != self.number]
        question = f"{topic} {detail}\n".encode()
        answers = await asyncio.gather(*(_ask(path, question) for path in others))
        return [self.answers[topic](detail), *(answer for answer in answers if answer is not None)]

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, TimeoutError, ValueError):
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    topic, _, detail = (await reader.readline()).decode().strip().partition(" ")
                    answer = self.answers.get(topic)
                    if answer is not None:
                        writer.write(answer(detail) + _END)
                        await writer.drain()
        finally:
            writer.close()


async def _ask(path: str, question: bytes) -> bytes | None:
    """One process's answer; None when there is no whole answer, because the process is starting or has died."""
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_ANSWER_BYTES)
            try:
                writer.write(question)
                return (await reader.readuntil(_END))[: -len(_END)]
            finally:
                writer.close()
    return None


TOPIC = "metrics"


class MetricsExchange:
    """Joins the pages of all processes."""

    def __init__(self, siblings: Siblings, render: Callable[[], bytes]) -> None:
        self._siblings = siblings
        siblings.answers[TOPIC] = lambda _: render()

    async def page(self) -> bytes:
        """Return the page of all processes that answer in time."""
        return merge(await self._siblings.ask(TOPIC))


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
