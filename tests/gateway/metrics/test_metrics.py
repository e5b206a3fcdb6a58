from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.core.clock import VirtualClock
from penstock.core.gateway_config import GatewayConfig
from penstock.core.messages import DrafterStats, EngineStats
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Tier
from penstock.gateway.gateway import Gateway
from penstock.gateway.metrics.gateway import Histogram
from penstock.gateway.prompts import GenerationRequest, SamplingOptions, TextPrompt
from tests.gateway.fake_engine import FakeEngine

HISTOGRAMS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
}
GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
COUNTERS = {
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
}


def samples(gateway: Gateway) -> dict[str, float]:
    """Every sample, under its name or name/label for labels other than the model's."""
    found = {}
    for family in text_string_to_metric_families(gateway.render_own_metrics().decode()):
        for sample in family.samples:
            if sample.name.startswith(
                "vllm:"
            ):  # parts of the gateway that know no model add metrics of their own
                assert sample.labels["model_name"] == "bytes"
            detail = sample.labels.get("le") or sample.labels.get("finished_reason")
            found[f"{sample.name}/{detail}" if detail else sample.name] = sample.value
    return found


@pytest.mark.parametrize("prefix", ["vllm:", "penstock_"])
def test_every_promised_name_is_there(prefix: str) -> None:
    found = samples(Gateway(FakeEngine(), GatewayConfig()))
    for name in HISTOGRAMS:
        assert f"{prefix}{name}_count" in found
        assert f"{prefix}{name}_bucket/+Inf" in found
    assert {prefix + name for name in GAUGES} <= found.keys()
    for name in COUNTERS - {"request_success"}:
        assert f"{prefix}{name}_total" in found
    for reason in FinishReason:
        assert f"{prefix}request_success_total/{reason}" in found


async def test_a_request_is_counted() -> None:
    engine, clock = FakeEngine(), VirtualClock()
    gateway = Gateway(engine, GatewayConfig(), clock)
    request = GenerationRequest(prompts=(TextPrompt("hey"),), sampling=SamplingOptions())
    generation = await gateway.submit(request)
    stream = engine.streams[engine.added[0].id]
    clock.advance(0.5)
    stream.on_event(TokenEvent(stream.request.id, (97,), queue_s=0.125))
    clock.advance(0.25)
    engine.emit(stream.request.id, 98)
    clock.advance(0.5)
    engine.emit(stream.request.id, 99, 100, finish_reason=FinishReason.LENGTH)
    await generation.collect()
    found = samples(gateway)
    assert found["vllm:prompt_tokens_total"] == 3
    assert found["vllm:generation_tokens_total"] == 4
    assert found["vllm:request_success_total/length"] == 1
    assert found["vllm:time_to_first_token_seconds_sum"] == 0.5
    assert found["vllm:inter_token_latency_seconds_sum"] == 0.75, "0.25 s, then 0.25 s for each of two tokens"
    assert found["vllm:inter_token_latency_seconds_count"] == 3
    assert found["vllm:e2e_request_latency_seconds_sum"] == 1.25
    assert found["vllm:request_queue_time_seconds_sum"] == 0.125
    assert found["vllm:request_prefill_time_seconds_sum"] == 0.375
    assert found["vllm:request_decode_time_seconds_sum"] == 0.75
    assert found["vllm:request_generation_tokens_sum"] == 4
    assert found["vllm:request_prompt_tokens_sum"] == 3


async def test_latencies_are_told_by_tier() -> None:
    engine, clock = FakeEngine(), VirtualClock()
    gateway = Gateway(engine, GatewayConfig(), clock)
    for tier, waited_s in ((Tier.PRIORITY, 0.5), (Tier.BATCH, 4.0)):
        request = GenerationRequest(prompts=(TextPrompt("hey"),), sampling=SamplingOptions(), tier=tier)
        generation = await gateway.submit(request)
        clock.advance(waited_s)
        engine.emit(engine.added[-1].id, 97, finish_reason=FinishReason.LENGTH)
        await generation.collect()
    page = gateway.render_own_metrics().decode()
    name = "time_to_first_token_seconds_sum"
    for labels, total in (("priority", 0.5), ("batch", 4.0), ("default", 0.0)):
        assert f'penstock_{name}{{model_name="bytes",tier="{labels}"}} {total}\n' in page
    assert f'vllm:{name}{{model_name="bytes"}} 4.5\n' in page, "of all tiers"


def test_the_engines_figures_are_shown() -> None:
    engine = FakeEngine()
    gateway = Gateway(engine, GatewayConfig())
    engine.stats = EngineStats(
        num_running=3,
        num_waiting=2,
        num_kv_blocks=64,
        num_kv_blocks_used=16,
        kv_fragmentation=0.02,
        prefix_cache_queries=100,
        prefix_cache_hits=40,
        num_preemptions=1,
        num_steps=4,
        tokens_computed=400,
    )
    found = samples(gateway)
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:num_requests_waiting"] == 2
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert found["vllm:prefix_cache_queries_total"] == 100
    assert found["vllm:prefix_cache_hits_total"] == 40
    assert found["vllm:num_preemptions_total"] == 1
    assert found["vllm:iteration_tokens_total_count"] == 4
    assert found["vllm:iteration_tokens_total_sum"] == 400
    assert found["penstock_kv_fragmentation"] == 0.02
    assert samples(gateway) == found, "a second look counts nothing twice"


def test_speculation_is_counted_by_drafter_and_position() -> None:
    engine = FakeEngine()
    gateway = Gateway(engine, GatewayConfig())
    engine.stats = EngineStats(
        drafters=(DrafterStats("lookup", (10, 8, 5), (7, 4, 1)), DrafterStats("heads", (3, 2), (2, 2)))
    )
    page = gateway.render_own_metrics().decode()
    for name, labels, value in (
        ("vllm:spec_decode_num_drafts", "", 13),
        ("vllm:spec_decode_num_draft_tokens", "", 28),
        ("vllm:spec_decode_num_accepted_tokens", "", 16),
        ("vllm:spec_decode_num_accepted_tokens_per_pos", ',position="0"', 9),
        ("vllm:spec_decode_num_accepted_tokens_per_pos", ',position="1"', 6),
        ("vllm:spec_decode_num_accepted_tokens_per_pos", ',position="2"', 1),
        ("penstock_spec_decode_num_drafts", "", 13),
        ("penstock_drafter_draft_tokens", ',drafter="lookup",position="2"', 5),
        ("penstock_drafter_accepted_tokens", ',drafter="heads",position="1"', 2),
    ):
        labels = ",".join(sorted(f'model_name="bytes"{labels}'.split(",")))
        assert f"{name}_total{{{labels}}} {float(value)}\n" in page, (name, labels)


def test_histogram_buckets_are_cumulative_and_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]


def test_requests_that_faults_ended_are_counted() -> None:
    engine = FakeEngine()
    gateway = Gateway(engine, GatewayConfig())
    engine.stats = EngineStats(num_nan_logits=2, num_out_of_memory=3, num_swapped=4)
    found = samples(gateway)
    assert found["penstock_nan_logits_total"] == 2
    assert found["penstock_out_of_memory_total"] == 3
    assert found["penstock_num_swapped_total"] == 4
