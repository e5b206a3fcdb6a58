"""Replicas one by one on the metrics page, and on that of several gateways."""

from __future__ import annotations

from penstock.cluster.fleet import Fleet
from penstock.core.errors import EngineUnavailable
from penstock.core.messages import DrafterStats, EngineStats
from penstock.gateway.metrics.gateway import GatewayMetrics, ReplicaMetrics
from penstock.gateway.siblings import merge
from tests.cluster.engines import send
from tests.cluster.fake_replicas import FakeReplicas, make_request, member


async def page(server: str | None = None) -> bytes:
    fakes = FakeReplicas()
    fleet = Fleet(seed=0, connect=fakes.connect)
    fleet.update([member("one"), member("two")])
    stats = EngineStats(
        num_running=3,
        num_kv_blocks=10,
        num_kv_blocks_used=4,
        prefix_cache_hits=7,
        gpu_memory_bytes=100,
        gpu_memory_used_bytes=60,
        drafters=(DrafterStats("lookup", (3, 2), (2, 1)),),
    )
    fakes["one"].stats = stats
    fakes["one"].tell_stats(stats)
    send(fleet, make_request("a"))
    first = fakes.holder_of("a")
    fakes[first].reject("a", EngineUnavailable("broken"))
    fakes[fakes.holder_of("a")].finish_all()
    whole = GatewayMetrics()
    whole.register(ReplicaMetrics(fleet, server))
    rendered = whole.render()
    fleet.close()
    return rendered


def value(page: bytes, name: str, *labels: str) -> float:
    (line,) = (
        line
        for line in page.decode().splitlines()
        if line.startswith(name) and all(label in line for label in labels)
    )
    return float(line.rsplit(" ", 1)[1])


async def test_each_replica_has_figures_of_its_own() -> None:
    metrics = await page()
    assert value(metrics, "penstock_replica_ready", 'replica="one"') == 1
    assert value(metrics, "penstock_replica_requests_running", 'replica="one"') == 3
    assert value(metrics, "penstock_replica_kv_cache_usage_perc", 'replica="one"') == 0.4
    assert value(metrics, "penstock_replica_gpu_memory_bytes", 'replica="one"') == 100
    assert value(metrics, "penstock_replica_gpu_memory_used_bytes", 'replica="one"') == 60
    assert b'gpu_memory_bytes{model_name="echo",region="",replica="two"' not in metrics, "it has no GPU"
    assert value(metrics, "penstock_replica_drafts_total", 'replica="one"') == 3
    assert value(metrics, "penstock_replica_draft_tokens_total", 'replica="one"') == 5
    assert value(metrics, "penstock_replica_accepted_tokens_total", 'replica="one"') == 3
    sent = [value(metrics, "penstock_replica_requests_total", f'replica="{name}"') for name in ("one", "two")]
    assert sent == [1, 1]
    assert value(metrics, "penstock_failed_attempts_total", 'verdict="restart"') == 1
    assert value(metrics, "penstock_routed_prompt_tokens_total") == 16


async def test_gateways_add_up_what_they_counted_and_repeat_what_they_heard() -> None:
    merged = merge([await page(), await page()])
    assert value(merged, "penstock_replica_requests_running", 'replica="one"') == 3
    assert value(merged, "penstock_replica_prefix_cache_hits_total", 'replica="one"') == 7
    assert value(merged, "penstock_replica_requests_total", 'replica="one"') == 2
    assert value(merged, "penstock_failed_attempts_total", 'verdict="restart"') == 2


async def test_replicas_of_separate_servers_have_different_names() -> None:
    metrics = await page("gpu7:8000")
    assert value(metrics, "penstock_replica_ready", 'replica="gpu7:8000/one"') == 1
