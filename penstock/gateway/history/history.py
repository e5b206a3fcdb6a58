"""Keeps samples of a server's recent past in three bounded rings, and shows them: the last minutes, hour and day."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from sqlalchemy import Connection, delete, select

from penstock.cluster.replica import EngineClient
from penstock.core.errors import StoreUnavailable
from penstock.gateway.history.samples import (
    EngineUse,
    Sample,
    Sampler,
    Traffic,
    first_token_s,
    inter_token_s,
    side_by_side,
    together,
)
from penstock.gateway.metrics.gateway import GatewayMetrics
from penstock.gateway.siblings import Siblings
from penstock.gateway.store.database import Database, insert_into
from penstock.gateway.store.tables import history_samples

logger = logging.getLogger(__name__)

_decode_sample = msgspec.json.Decoder(Sample).decode
Stored = dict[tuple[str, str, int], Sample]  # by server, process and time


class HistoryStore:
    """Keeps samples in the database, so that the console has a past after a restart. Each process writes its own
    rows."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def save(
        self, server: str, process: str, samples: Mapping[str, Sequence[Sample]], oldest: Mapping[str, int]
    ) -> bool:
        """Write samples by span, and delete what is older than `oldest`. Returns whether that was possible."""
        rows = [
            {
                "server": server,
                "process": process,
                "span": span,
                "at": each.at,
                "body": msgspec.json.encode(each),
            }
            for span, of_span in samples.items()
            for each in of_span
        ]

        def work(connection: Connection) -> None:
            for row in rows:
                statement = insert_into(connection, history_samples).values(row)
                keys = ["process", "span", "at"]
                connection.execute(
                    statement.on_conflict_do_update(index_elements=keys, set_={"body": row["body"]})
                )
            for span, at in oldest.items():
                old = history_samples.c.span == span, history_samples.c.at < at
                connection.execute(delete(history_samples).where(*old))

        try:
            await self._database.run(work)
        except StoreUnavailable:
            return False  # the database has logged it; the samples stay in memory and are written later
        return True

    async def load(self, span: str, start: int) -> Stored:
        """Return all samples of a span since `start`, of all processes. Empty while the database is away."""
        columns = history_samples.c
        query = select(columns.server, columns.process, columns.at, columns.body)
        query = query.where(columns.span == span, columns.at >= start)
        try:
            rows = await self._database.run(
                lambda connection: connection.execute(query).all(), reads_only=True
            )
        except StoreUnavailable:
            return {}
        found: Stored = {}
        for server, process, at, body in rows:
            try:
                found[server, process, at] = _decode_sample(body)
            except msgspec.MsgspecError:
                logger.warning("a sample of another version of Penstock is passed over")
        return found


TOPIC = "history"
SpanName = Literal["live", "hour", "day"]


class Span(NamedTuple):
    interval_s: int
    num_samples: int


SPANS: dict[SpanName, Span] = {"live": Span(2, 150), "hour": Span(10, 360), "day": Span(300, 288)}
TICK_S = SPANS["live"].interval_s

SAVE_INTERVAL_S = 60.0
KEPT: tuple[SpanName, ...] = ("hour", "day")  # in the database, where the operator wants that


class ProcessSamples(msgspec.Struct, frozen=True):
    """The samples of one process."""

    process: str
    samples: list[Sample]


_decode = msgspec.json.Decoder(ProcessSamples).decode


class Ring:
    """The samples of one span. The last one is still growing."""

    def __init__(self, span: Span) -> None:
        self._interval_s = span.interval_s
        self.samples: deque[Sample] = deque(maxlen=span.num_samples)

    def add(self, sample: Sample) -> None:
        at = -(-sample.at // self._interval_s) * self._interval_s
        if self.samples and self.samples[-1].at == at:
            self.samples[-1] = self.samples[-1].then(sample)
        else:
            self.samples.append(msgspec.structs.replace(sample, at=at))


class Figures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The figures of a sample for people. None: unknown."""

    requests: int | None = None
    failures: int | None = None
    refused: int | None = None  # None also where one model or tier is shown: a refused request has neither
    requests_per_s: float | None = None
    failures_per_s: float | None = None
    refused_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    ttft_p99_s: float | None = None
    itl_p50_s: float | None = None
    itl_p95_s: float | None = None
    itl_p99_s: float | None = None
    num_running: float | None = None
    num_waiting: float | None = None
    kv_usage: float | None = None
    cached_share: float | None = None  # of prompt tokens that engines looked up


class Point(Figures, frozen=True, kw_only=True, omit_defaults=True):
    at: int  # Unix seconds: the end of the interval


class SeriesFigures(Figures, frozen=True, kw_only=True):
    model: str
    tier: str


class Refusal(msgspec.Struct, frozen=True):
    """Requests that were refused with the same status and for the same reason."""

    status: int
    reason: str
    count: int


class HistoryView(msgspec.Struct, frozen=True, kw_only=True):
    span: SpanName
    interval_s: int
    models: list[str]  # that had traffic in this time, or have engines
    tiers: list[str]
    points: list[Point]  # one for each interval; one without figures is a time of which nothing is known
    total: Figures  # of the whole time
    series: list[SeriesFigures]  # of the whole time, by model and tier
    refusals: list[Refusal]  # of the whole time, the most frequent first
    object: Literal["history"] = "history"


class History:
    """Samples one process's counters while `run` runs, and shows the samples of all processes."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        engine: EngineClient,
        siblings: Siblings | None = None,
        store: HistoryStore | None = None,
        *,
        wall_time: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._store = store
        self._saved_until = dict.fromkeys(KEPT, 0)
        self._engine = engine
        self._sampler = Sampler(metrics)
        self._wall_time = wall_time
        self._sampled_at = wall_time()
        self._rings = {name: Ring(span) for name, span in SPANS.items()}
        self._siblings = siblings or Siblings()
        self._siblings.answers[TOPIC] = self._encoded

    async def run(self) -> None:
        """Take a sample at every even second, so that all processes sample the same intervals."""
        while True:
            await asyncio.sleep(TICK_S - self._wall_time() % TICK_S)
            self.take()

    def take(self) -> None:
        """Sample what happened since the last sample."""
        now = self._wall_time()
        at = round(now / TICK_S) * TICK_S
        seconds = min(max(now - self._sampled_at, 0.0), 10.0 * TICK_S)
        self._sampled_at = now
        self._metrics.observe_engines(self._engine)
        sample = self._sampler.take(at, seconds)
        for ring in self._rings.values():
            ring.add(sample)

    async def view(self, span: SpanName, model: str | None = None, tier: str | None = None) -> HistoryView:
        found = {}
        if self._store is not None and span in KEPT:
            found = await self._store.load(span, self._oldest(span))
        server = self._siblings.server
        for told in map(_decode, await self._siblings.ask(TOPIC, span)):
            # The samples in a process's memory are newer than those that it wrote.
            found |= {(server, told.process, sample.at): sample for sample in told.samples}
        by_server: dict[int, dict[str, list[Sample]]] = {}
        for (name, _, at), sample in found.items():
            by_server.setdefault(at, {}).setdefault(name, []).append(sample)
        samples = {
            at: side_by_side([together(of_server) for of_server in servers.values()])
            for at, servers in by_server.items()
        }
        return show(samples, span, int(self._wall_time()), model, tier)

    async def keep_saving(self) -> None:
        while True:
            await asyncio.sleep(SAVE_INTERVAL_S)
            await self.save()

    async def save(self, *, is_last: bool = False) -> None:
        """Write the samples that are complete and not written yet. The last time, take one more sample, and write the
        growing ones too."""
        if self._store is None:
            return
        if is_last:
            self.take()
        new: dict[str, list[Sample]] = {}
        for span in KEPT:
            samples = list(self._rings[span].samples)
            complete = samples if is_last else samples[:-1]
            new[span] = [sample for sample in complete if sample.at > self._saved_until[span]]
        oldest: dict[str, int] = {span: self._oldest(span) for span in KEPT}
        if await self._store.save(self._siblings.server, self._siblings.process, new, oldest):
            for span in KEPT:
                self._saved_until[span] = max([self._saved_until[span], *(sample.at for sample in new[span])])

    def _oldest(self, span: SpanName) -> int:
        interval_s, num_samples = SPANS[span]
        return int(self._wall_time()) - interval_s * num_samples

    def _encoded(self, span: str) -> bytes:
        ring = next((ring for name, ring in self._rings.items() if name == span), None)
        return msgspec.json.encode(ProcessSamples(self._siblings.process, list(ring.samples) if ring else []))


def show(
    samples: dict[int, Sample], span: SpanName, now: int, model: str | None, tier: str | None
) -> HistoryView:
    interval_s, count = SPANS[span]
    end = -(-now // interval_s) * interval_s
    if end not in samples and end - interval_s in samples:
        end -= interval_s  # the next sample is not taken yet
    times = range(end - (count - 1) * interval_s, end + 1, interval_s)
    known = [samples[at] for at in times if at in samples]
    chosen = [_narrowed(sample, model, tier) for sample in known]
    series = _series(chosen)
    models = {name for sample in known for name in (*sample.traffic, *sample.engines)}
    tiers = {name for sample in known for tiers in sample.traffic.values() for name in tiers}
    points = [
        Point(at=at, **_figures(_narrowed(samples[at], model, tier))) if at in samples else Point(at=at)
        for at in times
    ]
    return HistoryView(
        span=span,
        interval_s=interval_s,
        models=sorted(models),
        tiers=sorted(tiers),
        points=points,
        total=Figures(**_figures(_whole(chosen))) if chosen else Figures(),
        series=series,
        refusals=_refusals(_whole(chosen)),
    )


def _narrowed(sample: Sample, model: str | None, tier: str | None) -> Sample:
    """Return the part of a sample that is about one model, or one tier, or both. Engines have no tiers, and refusals
    have neither."""
    if model is None and tier is None:
        return sample
    traffic = {
        name: {own: each for own, each in tiers.items() if tier is None or own == tier}
        for name, tiers in sample.traffic.items()
        if model is None or name == model
    }
    engines = {name: use for name, use in sample.engines.items() if model is None or name == model}
    return Sample(sample.at, sample.seconds, traffic, engines)


def _whole(samples: Iterable[Sample]) -> Sample:
    whole = Sample(0)
    for sample in samples:
        whole = whole.then(sample)
    return whole


def _series(samples: list[Sample]) -> list[SeriesFigures]:
    whole = _whole(samples)
    return [
        SeriesFigures(
            model=model, tier=tier, **_figures(Sample(0, whole.seconds, {model: {tier: traffic}}, {}))
        )
        for model, tiers in sorted(whole.traffic.items())
        for tier, traffic in sorted(tiers.items())
    ]


def _refusals(sample: Sample) -> list[Refusal]:
    ordered = sorted(sample.refusals.items(), key=lambda kind: (-kind[1], kind[0]))
    return [Refusal(int(name[:3]), name[4:], count) for name, count in ordered]


def _figures(sample: Sample) -> dict[str, Any]:
    total = sum((each for tiers in sample.traffic.values() for each in tiers.values()), Traffic())
    seconds = sample.seconds or 1.0
    figures: dict[str, Any] = {
        "requests": total.requests,
        "failures": total.failures,
        "requests_per_s": _rounded(total.requests / seconds),
        "failures_per_s": _rounded(total.failures / seconds),
        "prompt_tokens_per_s": _rounded(total.prompt_tokens / seconds),
        "output_tokens_per_s": _rounded(total.output_tokens / seconds),
    }
    if sample.refusals:
        refused = sum(sample.refusals.values())
        figures |= {"refused": refused, "refused_per_s": _rounded(refused / seconds)}
    for percent in (50, 95, 99):
        figures[f"ttft_p{percent}_s"] = _rounded(first_token_s(total, percent / 100))
        figures[f"itl_p{percent}_s"] = _rounded(inter_token_s(total, percent / 100))
    uses = [use for use in sample.engines.values() if use.looks]
    if uses:
        figures |= _engine_figures(uses)
    return figures


def _engine_figures(uses: list[EngineUse]) -> dict[str, Any]:
    queries = sum(use.cache_queries for use in uses)
    return {
        "num_running": _rounded(sum(use.running / use.looks for use in uses)),
        "num_waiting": _rounded(sum(use.waiting / use.looks for use in uses)),
        "kv_usage": _rounded(max(use.kv_usage / use.looks for use in uses)),
        "cached_share": _rounded(sum(use.cache_hits for use in uses) / queries) if queries else None,
    }


def _rounded(value: float | None) -> float | None:
    """Four significant digits: a page of points stays small."""
    return None if value is None else float(f"{value:.4g}")
