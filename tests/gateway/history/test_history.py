"""Samples of the past: what they count, how they add up, and how those of several processes become one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from penstock.core.messages import EngineStats
from penstock.core.request import Tier
from penstock.gateway.history.history import SPANS, History, HistoryStore, Ring, Span, show
from penstock.gateway.history.samples import (
    EngineUse,
    Sample,
    Sampler,
    Traffic,
    quantile,
    side_by_side,
    together,
)
from penstock.gateway.metrics.gateway import GatewayMetrics
from penstock.gateway.siblings import Siblings
from penstock.gateway.store.database import Database
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.store.ready_made import ready_made_database

NOW = 1_800_000_000


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is not a process that is gone."""
    monkeypatch.setattr("penstock.gateway.siblings.ANSWER_TIMEOUT_S", 60.0)


def answered(metrics: GatewayMetrics, *, is_failure: bool = False, tier: Tier = Tier.DEFAULT) -> None:
    counts = metrics.of("m").latencies(tier)
    counts.prompt_tokens += 10
    counts.output_tokens += 5
    counts.first_token_s.observe(0.02)
    counts.inter_token_s.observe(0.004, 4)
    counts.num_ended += 1
    counts.num_failed += is_failure


class Clock:
    def __init__(self) -> None:
        self.now = float(NOW)

    def __call__(self) -> float:
        return self.now


def history_of(metrics: GatewayMetrics, clock: Clock, siblings: Siblings | None = None) -> History:
    return History(metrics, FakeEngine(), siblings, wall_time=clock)


async def test_the_page_shows_what_happened_in_each_interval() -> None:
    metrics, clock = GatewayMetrics(), Clock()
    history = history_of(metrics, clock)
    answered(metrics)
    answered(metrics, is_failure=True)
    clock.now += 2
    history.take()
    clock.now += 2
    history.take()  # in which nothing happened
    view = await history.view("live")
    assert len(view.points) == SPANS["live"].num_samples
    first, second = view.points[-2:]
    assert (first.requests, first.failures, first.requests_per_s) == (2, 1, 1.0)
    assert (first.prompt_tokens_per_s, first.output_tokens_per_s) == (10.0, 5.0)
    assert first.ttft_p50_s is not None
    assert 0.01 < first.ttft_p50_s <= 0.02
    assert (second.requests, second.ttft_p50_s) == (0, None)
    assert view.points[0].requests is None  # nothing is known of the time before the server
    assert [(row.model, row.requests) for row in view.series] == [("m", 2)]


async def test_longer_spans_add_up_shorter_samples() -> None:
    metrics, clock = GatewayMetrics(), Clock()
    history = history_of(metrics, clock)
    for _ in range(10):  # twenty seconds
        clock.now += 2
        answered(metrics)
        history.take()
    hour = [point for point in (await history.view("hour")).points if point.requests is not None]
    assert [point.requests for point in hour] == [5, 5]
    assert [point.requests_per_s for point in hour] == [0.5, 0.5]
    assert (await history.view("day")).total.requests == 10


async def test_a_model_can_be_picked_out() -> None:
    metrics, clock = GatewayMetrics(), Clock()
    history = history_of(metrics, clock)
    answered(metrics)
    clock.now += 2
    history.take()
    assert (await history.view("live", model="other")).total.requests == 0
    assert (await history.view("live", model="m")).total.requests == 1


async def test_tiers_are_told_apart() -> None:
    metrics, clock = GatewayMetrics(), Clock()
    history = history_of(metrics, clock)
    answered(metrics)
    answered(metrics, tier=Tier.BATCH)
    answered(metrics, tier=Tier.BATCH)
    clock.now += 2
    history.take()
    view = await history.view("live")
    assert view.tiers == ["batch", "default"]
    assert [(row.tier, row.requests) for row in view.series] == [("batch", 2), ("default", 1)]
    assert (await history.view("live", tier="batch")).total.requests == 2


def test_engines_are_seen_once_per_process_and_cache_hits_as_a_share() -> None:
    metrics = GatewayMetrics()
    engine = FakeEngine()
    sampler = Sampler(metrics)
    engine.stats = EngineStats(
        num_running=3,
        num_waiting=1,
        num_kv_blocks=10,
        num_kv_blocks_used=5,
        prefix_cache_queries=100,
        prefix_cache_hits=40,
    )
    metrics.observe_engines(engine)
    (name, use), *more = sampler.take(NOW, 2.0).engines.items()
    assert (use.running, use.waiting, use.kv_usage, use.cache_queries, use.cache_hits) == (3, 1, 0.5, 100, 40)
    assert not more
    engine.stats = EngineStats(num_kv_blocks=10)  # its replica ended, and its counts with it
    metrics.observe_engines(engine)
    after = sampler.take(NOW + 2, 2.0).engines[name]
    assert (after.cache_queries, after.cache_hits) == (0, 0)


def test_processes_add_up_and_their_engines_do_not() -> None:
    use = EngineUse(looks=1, running=4, waiting=2, kv_usage=0.5, cache_queries=10, cache_hits=5)
    one = Sample(NOW, 2.0, {"m": {"default": Traffic(1, 0, 7, 3, [0, 1])}}, {"m": use})
    two = Sample(NOW, 1.9, {"m": {"default": Traffic(2, 1, 5, 4, [0, 0, 2])}}, {"m": use})
    whole = together([one, two])
    assert whole.traffic["m"]["default"] == Traffic(3, 1, 12, 7, [0, 1, 2])
    assert whole.engines["m"] == use


async def test_all_processes_are_asked_and_a_dead_one_is_left_out(tmp_path: Path) -> None:
    sockets = [str(tmp_path / name) for name in ("0", "1", "2")]
    clock = Clock()
    ours, theirs = (Siblings(sockets, number) for number in (0, 1))
    histories = []
    for siblings in (ours, theirs):
        metrics = GatewayMetrics()
        history = history_of(metrics, clock, siblings)
        answered(metrics)
        histories.append((history, metrics))
    clock.now += 2
    for history, _ in histories:
        history.take()
    async with ours.serving(), theirs.serving():
        assert (await histories[0][0].view("live")).total.requests == 2


async def test_a_question_that_is_none_is_not_answered(tmp_path: Path) -> None:
    siblings = Siblings([str(tmp_path / "0")], 0)
    async with siblings.serving():
        for question in (b"nonsense\n", b"\xff\xfe\n", b"x" * 10_000 + b"\n"):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "0.ask"))
            writer.write(question)
            assert await reader.read() == b""
            writer.close()


def test_a_ring_forgets_the_oldest() -> None:
    ring = Ring(Span(10, 3))
    for second in range(2, 102, 2):
        ring.add(Sample(NOW + second, 2.0))
    assert [sample.at - NOW for sample in ring.samples] == [80, 90, 100]
    assert [sample.seconds for sample in ring.samples] == [10.0, 10.0, 10.0]


def test_quantiles_of_a_histogram() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile(bounds, [], 0.5) is None
    assert quantile(bounds, [0, 10], 0.5) == 1.5
    assert quantile(bounds, [0, 0, 0, 5], 0.5) == 4.0
    assert quantile(bounds, [10, 0, 10], 0.99) == 2.0 + 2.0 * 9.8 / 10


def test_samples_survive_the_wire() -> None:
    sample = Sample(
        NOW, 2.0, {"m": {"": Traffic(1, 0, 2, 3, [1], [2])}}, {"m": EngineUse(1, 2, 3, 0.5, 4, 5)}
    )
    assert msgspec.json.decode(msgspec.json.encode(sample), type=Sample) == sample


def test_nothing_known_is_an_empty_page() -> None:
    view = show({}, "day", NOW, None, None)
    assert (view.models, view.series, view.total.requests) == ([], [], None)
    assert len(view.points) == SPANS["day"].num_samples


async def test_the_past_survives_a_restart_and_is_not_counted_twice(tmp_path: Path) -> None:
    database, clock = ready_made_database(tmp_path), Clock()
    store = HistoryStore(database)
    metrics = GatewayMetrics()
    before = History(metrics, FakeEngine(), store=store, wall_time=clock)
    for _ in range(10):
        clock.now += 2
        answered(metrics)
        before.take()
    await before.save()
    assert (await before.view("hour")).total.requests == 10
    clock.now += 0.5
    answered(metrics)  # after the last sample
    await before.save(is_last=True)
    after = History(GatewayMetrics(), FakeEngine(), store=store, wall_time=clock)
    assert (await after.view("hour")).total.requests == 11
    assert (await after.view("live")).total.requests is None  # only longer spans are kept
    clock.now += 2 * 86_400
    await after.save()
    clock.now -= 2 * 86_400
    assert (await after.view("hour")).total.requests is None  # what was too old is gone
    database.close()


async def test_history_goes_on_without_its_database(tmp_path: Path) -> None:
    database, clock, metrics = (
        Database(f"sqlite:///{tmp_path}"),
        Clock(),
        GatewayMetrics(),
    )  # a folder is no file
    history = History(metrics, FakeEngine(), store=HistoryStore(database), wall_time=clock)
    answered(metrics)
    clock.now += 2
    history.take()
    await history.save(is_last=True)
    assert (await history.view("hour")).total.requests == 1
    database.close()


def test_servers_stand_side_by_side() -> None:
    samples = [
        Sample(NOW, 10.0, {"m": {"default": Traffic(requests=1)}}, {"m": EngineUse(5, 10, 5, 2.5, 8, 4)}),
        Sample(NOW, 10.0, {"m": {"default": Traffic(requests=2)}}, {"m": EngineUse(2, 2, 0, 0.2, 2, 0)}),
    ]
    whole = side_by_side(samples)
    assert whole.traffic["m"]["default"].requests == 3
    assert whole.engines["m"] == EngineUse(1, 3, 1, 0.5, 10, 4)


async def test_refusals_are_shown_by_reason_and_outlive_a_merge() -> None:
    metrics, clock = GatewayMetrics(), Clock()
    history = history_of(metrics, clock)
    metrics.refusals["401", "invalid_api_key"] += 1
    metrics.refusals["429", "rate_limit_exceeded"] += 3
    clock.now += 2
    history.take()
    metrics.refusals["401", "invalid_api_key"] += 1
    clock.now += 2
    history.take()
    view = await history.view("live")
    assert [point.refused for point in view.points[-2:]] == [4, 1]
    assert [(each.status, each.reason, each.count) for each in view.refusals] == [
        (429, "rate_limit_exceeded", 3),
        (401, "invalid_api_key", 2),
    ]
    assert (view.total.refused, view.total.refused_per_s) == (5, 1.25)
    narrow = await history.view("live", model="m")
    assert (narrow.refusals, narrow.total.refused) == ([], None)
    both = together([Sample(2, refusals={"401 a": 1}), Sample(2, refusals={"401 a": 2, "403 b": 1})])
    assert both.refusals == {"401 a": 3, "403 b": 1}
    old = msgspec.json.decode(b"[2,1.0,{},{}]", type=Sample)  # as a server without refusals kept it
    assert old.refusals == {}
