"""The planner's formulas against worked examples of the field and against what was measured."""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.commands import penstock
from penstock.core.engine_config import CacheConfig, SchedulerConfig
from penstock.core.errors import UsageError
from penstock.planner.capacity import (
    Targets,
    Traffic,
    attained,
    best_layout,
    estimate,
    fleet_of,
    least_number,
    plan_replicas,
    under_load,
)
from penstock.planner.hardware import HARDWARE, KV_FORMATS, WEIGHT_FORMATS, device_from_text
from penstock.planner.roofline import Layout, RooflineCost
from penstock.planner.shapes import KNOWN_MODELS, known_shape, shape_from_config
from penstock.planner.traffic import parse_lengths, read_trace
from penstock.simulator import Fixed, ReplicaConfig, SimulationConfig, Uniform, Workload, simulate
from penstock.simulator.cost import StepWork

GB = 1e9


def layout(model: str, hardware: str = "h200", weights: str = "bfloat16", ranks: int = 1) -> Layout:
    shape = known_shape(model)
    assert shape is not None
    return Layout(shape, HARDWARE[hardware], WEIGHT_FORMATS[weights], KV_FORMATS["bfloat16"], ranks)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama-2-7b", 6.74),
        ("llama-3.1-8b", 8.03),
        ("llama-2-70b", 68.98),
        ("llama-3.1-405b", 405.85),
        ("mixtral-8x7b", 46.70),
        ("qwen3-30b-a3b", 30.53),
        ("gpt-oss-20b", 20.91),
        ("deepseek-v3", 671.0),
        ("qwen3-next-80b-a3b", 79.67),
        ("granite-4.0-h-small", 32.2),
    ],
)
def test_parameters_are_those_that_makers_state(model: str, billions: float) -> None:
    shape = known_shape(model)
    assert shape is not None
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_worked_examples_of_memory() -> None:
    assert layout("llama-2-7b").weight_bytes / GB == pytest.approx(13.5, abs=0.1)  # 7B in 16 bits: 14 GB
    assert layout("llama-2-70b").weight_bytes / GB == pytest.approx(138, abs=1)
    # 2 × 32 layers × 32 heads × 128 × 2 bytes, and with 8 KV heads a quarter of it.
    assert layout("llama-2-7b").kv_bytes_per_token == 524_288
    assert layout("llama-3.1-8b").kv_bytes_per_token == 131_072
    assert layout("llama-3.1-70b").kv_bytes_per_token == 327_680
    assert layout("llama-3.1-70b").contexts(4096) == 0  # 141 GB of weights fill one H200
    assert layout("llama-3.1-70b", ranks=2).contexts(4096) > 50
    assert layout("deepseek-v3").kv_bytes_per_token == 61 * 576 * 2  # latents, not heads


def test_latents_are_kept_by_every_device() -> None:
    assert layout("deepseek-v3", ranks=8).kv_bytes_per_token == 8 * 61 * 576 * 2
    assert layout("llama-3.1-70b", ranks=8).kv_bytes_per_token == 327_680  # one KV head for each device
    assert layout("qwen3-30b-a3b", ranks=8).kv_bytes_per_token == 2 * 48 * 2 * 4 * 128 * 2  # each twice


def test_states_do_not_grow_with_the_context() -> None:
    next_80b = layout("qwen3-next-80b-a3b")
    assert next_80b.model.num_attention_layers == 12
    assert next_80b.kv_bytes_per_token == 2 * 12 * 2 * 256 * 2
    # 36 layers of 32 × 128 × 128 numbers, and three columns of a convolution, in 32 bits.
    assert next_80b.model.state_bytes == 36 * 4 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))
    assert next_80b.context_bytes(2000) - next_80b.context_bytes(1000) == 1000 * next_80b.kv_bytes_per_token
    mamba = {"model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "head_dim": 64,
             "state_size": 128, "vocab_size": 50_288, "tie_word_embeddings": True}  # fmt: skip
    shape = shape_from_config("mamba2-2.7b", mamba)
    assert shape.num_parameters / 1e9 == pytest.approx(2.7, rel=0.01)
    alone = replace(next_80b, model=shape)
    assert alone.contexts(1) == alone.contexts(100_000) > 100
    mamba = {"model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64, "expand": 2, "state_size": 16,
             "conv_kernel": 4, "time_step_rank": 160, "vocab_size": 50_280, "tie_word_embeddings": True}  # fmt: skip
    shape = shape_from_config("mamba-2.8b", mamba)
    assert shape.num_parameters / 1e9 == pytest.approx(2.77, rel=0.01)
    assert shape.state_bytes == 64 * 4 * (5120 * 16 + 3 * 5120)
    jamba = {"model_type": "jamba", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8, "intermediate_size": 14_336, "num_experts": 16, "num_experts_per_tok": 2,
             "attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1,
             "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256,
             "vocab_size": 65_536}  # fmt: skip
    shape = shape_from_config("jamba-v0.1", jamba)
    assert shape.num_parameters / 1e9 == pytest.approx(51.6, rel=0.01)
    assert shape.num_attention_layers == 4
    nemotron = {"model_type": "nemotron_h", "hidden_size": 4096, "num_hidden_layers": 52, "num_attention_heads": 32,
                "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21_504, "mlp_hidden_act": "relu2",
                "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
                "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
                "vocab_size": 131_072}  # fmt: skip
    assert shape_from_config("n", nemotron).num_parameters / 1e9 == pytest.approx(8.1, rel=0.02)


def test_stages_add_memory_and_share_the_requests() -> None:
    one, two = layout("llama-3.1-70b", ranks=2), replace(layout("llama-3.1-70b"), pipeline_parallel=2)
    assert (two.num_devices, two.name, two.kv_memory_bytes) == (2, "2×1×h200", one.kv_memory_bytes)
    assert two.dollars_per_hour == one.dollars_per_hour
    cost = RooflineCost(two)
    # A step of two requests, one in each stage, takes as long as a step of one request; devices that share each
    # layer are faster.
    assert cost.decode_s(2, 500) == pytest.approx(cost.decode_s(1, 500), rel=0.01)
    assert cost.decode_s(1, 500) > 1.5 * RooflineCost(one).decode_s(1, 500)


def test_narrower_formats_hold_more_and_are_faster() -> None:
    wide, fp8 = layout("llama-3.1-8b"), layout("llama-3.1-8b", weights="fp8")
    int4, small_kv = layout("llama-3.1-8b", weights="int4"), replace(wide, kv=KV_FORMATS["fp8"])
    assert int4.weight_bytes < fp8.weight_bytes < wide.weight_bytes
    assert small_kv.contexts(4096) == pytest.approx(2 * wide.contexts(4096), abs=1)
    assert RooflineCost(small_kv).decode_s(256, 2000) < RooflineCost(wide).decode_s(256, 2000)
    # Without fp8 products, fp8 weights save bandwidth and nothing else.
    a100 = [RooflineCost(layout("llama-3.1-8b", "a100", weights)) for weights in ("bfloat16", "fp8")]
    assert a100[1].decode_s(1, 500) < 0.65 * a100[0].decode_s(1, 500)
    assert a100[1].prefill_s(8000) == pytest.approx(a100[0].prefill_s(8000), rel=0.05)


def test_windows_bound_the_cache() -> None:
    shape = known_shape("gemma-3-27b")
    assert shape is not None
    assert shape.num_window_layers == 52
    short, long = shape.kv_bytes(1024, 2.0), shape.kv_bytes(32_768, 2.0)
    assert long / short == pytest.approx((10 * 32 + 52) / 62)
    gemma = layout("gemma-3-27b")
    assert gemma.kv_tokens(32_768) > 4 * gemma.kv_tokens(1024), "blocks of windows are given back"


@pytest.mark.parametrize(
    ("model", "batch", "measured_ms", "within"),
    [  # docs/performance.md, contexts of 512 to 616 tokens
        ("llama-3.1-8b", 1, 4.16, 0.1),
        ("llama-3.1-8b", 8, 4.76, 0.1),
        ("llama-3.1-8b", 32, 5.08, 0.1),
        ("llama-3.1-8b", 128, 7.51, 0.1),
        ("llama-3.1-8b", 256, 11.77, 0.1),
        ("qwen3-0.6b", 1, 0.80, 0.1),
        ("qwen3-0.6b", 256, 5.38, 0.1),
        ("qwen3-30b-a3b", 1, 3.13, 0.1),
        ("qwen3-30b-a3b", 32, 14.87, 0.1),
        ("qwen3-30b-a3b", 256, 21.8, 0.1),
    ],
)
def test_decode_steps_as_measured(model: str, batch: int, measured_ms: float, within: float) -> None:
    predicted_ms = RooflineCost(layout(model)).decode_s(batch, 544) * 1e3
    assert predicted_ms == pytest.approx(measured_ms, rel=within)


@pytest.mark.parametrize(("batch", "measured_ms"), [(1, 2.49), (32, 3.43), (256, 10.33)])
def test_decode_steps_in_fp8_as_measured(batch: int, measured_ms: float) -> None:
    predicted_ms = RooflineCost(layout("llama-3.1-8b", weights="fp8")).decode_s(batch, 544) * 1e3
    assert predicted_ms == pytest.approx(measured_ms, rel=0.1)


@pytest.mark.parametrize(
    ("model", "streams", "prompt", "output", "measured"),
    [  # tokens/s over HTTP on one H200; of these, two constants were fitted on the rows with 64 streams and more
        ("llama-3.1-8b", 64, 2048, 256, 3090),
        ("llama-3.1-8b", 128, 64, 512, 17_267),
        ("llama-3.1-8b", 16, 8192, 128, 464),
        ("llama-3.1-8b", 16, 16_000, 256, 378),
        ("qwen3-0.6b", 1, 128, 256, 1204),
        ("qwen3-0.6b", 64, 128, 256, 29_854),
        ("qwen3-0.6b", 256, 128, 256, 51_733),
    ],
)
def test_served_streams_as_measured(
    model: str, streams: int, prompt: int, output: int, measured: int
) -> None:
    cost = RooflineCost(layout(model), serves=True)
    served = under_load(cost, traffic(1.0, prompt, output), streams)
    assert streams / served.step_s == pytest.approx(measured, rel=0.12)


def test_offline_throughput_as_measured() -> None:
    """256 prompts of 100 to 1,024 tokens in and out: 10,750 to 11,120 tokens/s on one H200."""
    each = layout("llama-3.1-8b")
    report = simulate(
        SimulationConfig(
            workload=Workload(
                num_requests=256,
                requests_per_s=1e9,
                prompt_tokens=Uniform(100, 1024),
                output_tokens=Uniform(100, 1024),
            ),
            replica=ReplicaConfig(
                num_blocks=each.kv_tokens(1024) // 16,
                cost=RooflineCost(each),
                scheduler=SchedulerConfig(
                    itl_target_ms=None, max_num_seqs=256, max_num_batched_tokens=16_384
                ),
            ),
        )
    )
    assert report.output_tokens / report.duration_s == pytest.approx(10_935, rel=0.1)


def traffic(rate: float, prompt: int = 512, output: int = 24) -> Traffic:
    return Traffic(
        requests_per_s=rate,
        prompt_tokens=Fixed(prompt),
        output_tokens=Fixed(output),
        mean_prompt=prompt,
        mean_output=output,
    )


def test_replicas_follow_the_traffic() -> None:
    each, targets = layout("llama-3.1-8b", "a100"), Targets(0.3, 0.05)
    guess = estimate(each, RooflineCost(each), traffic(1.0), targets)
    needed = [
        plan_replicas(each, guess, traffic(rate), targets) for rate in (1.0, 3.5 * guess.requests_per_s)
    ]
    assert needed[0].num_replicas == 1
    assert 3 <= needed[1].num_replicas <= 5
    assert needed[1].reached.share >= targets.share
    assert needed[1].dollars_per_month == pytest.approx(1.70 * 730 * needed[1].num_replicas)
    fleet = fleet_of(each, RooflineCost(each), traffic(3.5 * guess.requests_per_s), targets, 2)
    assert attained(fleet, targets, 2).share < needed[1].reached.share


def test_no_more_replicas_are_proposed_than_needed() -> None:
    """An estimate that is far too low leads to a number of replicas of which one less would miss the targets."""
    each, targets = layout("llama-3.1-8b", "a100"), Targets(0.3, 0.05)
    guess = estimate(each, RooflineCost(each), traffic(1.0), targets)
    optimistic = replace(guess, requests_per_s=4.0 * guess.requests_per_s)
    plan = plan_replicas(each, optimistic, traffic(12.0 * guess.requests_per_s), targets)
    before = next(point for point in plan.curve if point.num_replicas == plan.num_replicas - 1)
    assert before.share < targets.share <= plan.reached.share


def test_traffic_is_simulated_until_an_overload_shows() -> None:
    """The requests that come faster than they are answered wait for longer and longer, at first within the target."""
    each, targets = layout("llama-3.1-8b", "a100"), Targets(1.0, 0.05)
    guess = estimate(each, RooflineCost(each), traffic(1.0), targets)
    busy = traffic(1.5 * guess.requests_per_s)  # the estimate leaves a fifth of the largest rate
    fleet = fleet_of(each, RooflineCost(each, serves=True), busy, targets, 1)
    assert attained(fleet, targets, 1).share < 0.5
    few = replace(fleet, workload=replace(fleet.workload, num_requests=120))
    assert attained(few, targets, 1).share > targets.share
    assert fleet_of(each, RooflineCost(each), traffic(0.1), targets, 1).workload.num_requests == 120
    many = fleet_of(each, RooflineCost(each), traffic(1e6), targets, 1)
    assert many.workload.num_requests == 600


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_decodes_cost_the_sum_of_their_parts(model: str, ranks: int) -> None:
    """What steps of the same size have in common is computed once, and changes no bit of the sum."""
    cost = RooflineCost(layout(model, ranks=ranks), serves=True)
    for batch in (1, 7, 7, 256):
        for context in (1, 300, 20_000):
            work = StepWork.decodes(batch, batch * context)
            assert cost.step_s(work) == cost.times(work).total_s


@pytest.mark.parametrize("stages", [1, 2])
def test_the_middle_of_a_prompt_needs_no_logits(stages: int) -> None:
    cost = RooflineCost(replace(layout("llama-3.1-8b"), pipeline_parallel=stages))
    last = StepWork.prompt(512)
    middle = replace(last, samples=0)
    assert cost.times(middle).products_s < cost.times(last).products_s
    decode = StepWork.decodes(1, 500)
    cost.step_s(decode)  # decodes of one size share their parts
    unsampled = replace(decode, samples=0)
    assert cost.step_s(unsampled) == cost.times(unsampled).total_s


@pytest.mark.parametrize("needed", [1, 2, 13, 99, 100, 101, 160, 1000])
@pytest.mark.parametrize("guess", [1, 7, 100])
def test_the_least_number_is_found_in_few_attempts(needed: int, guess: int) -> None:
    tried: list[int] = []

    def is_enough(number: int) -> bool:
        tried.append(number)
        return number >= needed

    assert least_number(guess, is_enough) == needed
    assert min(tried) >= 1
    assert len(tried) < 24


def test_no_number_is_found_where_none_is_enough() -> None:
    assert least_number(4, lambda number: False) is None


def test_prompts_that_share_nothing_need_no_prefix_cache() -> None:
    """A fleet is simulated without the cache where the cache could not matter, with the same figures."""
    each, targets = layout("llama-3.1-8b", "a100"), Targets(1.0, 0.05)
    fleet = fleet_of(each, RooflineCost(each), traffic(20.0, prompt=2000), targets, 3)
    assert not fleet.replica.cache.enable_prefix_caching
    cached = replace(fleet, replica=replace(fleet.replica, cache=CacheConfig(enable_prefix_caching=True)))
    assert attained(fleet, targets, 3) == attained(cached, targets, 3)
    shared = replace(traffic(20.0, prompt=2000), prefix_share=0.5)
    assert fleet_of(each, RooflineCost(each), shared, targets, 3).replica.cache.enable_prefix_caching


def test_long_contexts_are_simulated_with_fewer_blocks_of_the_same_memory() -> None:
    each, targets = layout("llama-3.1-8b"), Targets(60.0, 0.05)
    short = fleet_of(each, RooflineCost(each), traffic(1.0, prompt=2000), targets, 2).replica
    asked = traffic(1.0, prompt=100_000)
    long = fleet_of(each, RooflineCost(each), asked, targets, 2).replica
    shared = fleet_of(each, RooflineCost(each), replace(asked, prefix_share=0.5), targets, 2).replica
    assert short.cache.block_size == shared.cache.block_size == 16
    assert 128 <= 100_024 / long.cache.block_size < 192
    assert long.num_blocks == shared.num_blocks * 16 // long.cache.block_size


def test_a_long_plan_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.simulations.PROGRESS_S", 0.0)
    monkeypatch.setattr("penstock.planner.capacity._REQUESTS_PER_REPLICA", 4)
    arguments = ["plan", "llama-3.1-8b", "--hardware", "h200", "--rate", "0.5", "--output-len", "2000"]
    arguments += ["--ttft-ms", "400"]  # the traffic of 20 times this target is 4 requests, too
    told = " ".join(CliRunner().invoke(penstock, arguments).stderr.split())
    assert "h200, replicas: 1: 0 of 4 requests, 5 s of virtual time, unknown time left" in told
    assert "h200, replicas: 1: 4 of 4 requests, " in told


def test_the_cheapest_layout_that_fits_is_chosen() -> None:
    layouts = [layout("llama-3.1-70b", "h100", ranks=ranks) for ranks in (1, 2, 4, 8)]
    best = best_layout(layouts, traffic(1.0), Targets(2.0, 0.05))
    assert best is not None
    assert best[0].tensor_parallel in (2, 4)  # one H100 cannot hold it
    assert best_layout(layouts[:1], traffic(1.0), Targets(2.0, 0.05)) is None


def test_reads_sizes_of_nested_and_strange_configs(tmp_path: Path) -> None:
    config = dict(KNOWN_MODELS["llama-3.1-8b"])
    assert shape_from_config("x", {"text_config": config}).num_parameters == 8_029_995_008
    with pytest.raises(UsageError, match="no hidden_size"):
        shape_from_config("x", {})
    with pytest.raises(UsageError, match="hidden_size = 'big'"):
        shape_from_config("x", {**config, "hidden_size": "big"})
    with pytest.raises(UsageError, match="without layers"):
        shape_from_config("x", {**config, "num_hidden_layers": 0})
    with pytest.raises(UsageError, match="layers of the kind 'rwkv'"):
        shape_from_config("x", {**config, "layer_types": ["full_attention", "rwkv"]})
    assert shape_from_config("x", {**config, "num_attention_heads": 0}).num_heads == 1


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:56.0000000,100,7
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1024, "output_length": 50, "hash_ids": [1, 2]}
{"timestamp": 2000, "input_length": 1024, "output_length": 150, "hash_ids": [1, 3]}
"""


def test_reads_published_traces(tmp_path: Path) -> None:
    (tmp_path / "azure.csv").write_text(AZURE)
    (tmp_path / "mooncake.jsonl").write_text(MOONCAKE)
    azure = read_trace(tmp_path / "azure.csv").traffic()
    assert azure.mean_prompt == 290
    assert azure.requests_per_s == pytest.approx(2 / 9.3, rel=0.01)
    mooncake = read_trace(tmp_path / "mooncake.jsonl").traffic()
    assert (mooncake.mean_output, mooncake.requests_per_s, mooncake.prefix_share) == (100, 0.5, 0.25)


def test_times_of_a_trace_do_not_depend_on_the_time_zone_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In New York, an hour came twice in this night. Times without a zone are UTC, as those with one may be."""
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-05 01:59:00,1,1\n2023-11-05 02:01:00.5000000,1,1\n"
        "2023-11-05 02:01:01+00:00,1,1\n2023-11-05T02:01:02.250000Z,1,1\n"
    )
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        times_s = [line.time_s for line in read_trace(path).lines]
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [each - times_s[0] for each in times_s] == [0.0, 120.5, 121.0, 122.25]


def test_a_trace_with_too_many_requests_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of it would pass for the whole."""
    monkeypatch.setattr("penstock.planner.traffic._MOST_REQUESTS", 2)
    for name, text, row in (
        ("trace.jsonl", MOONCAKE, MOONCAKE.splitlines()[0] + "\n"),
        ("azure.csv", "".join(AZURE.splitlines(keepends=True)[:3]), AZURE.splitlines()[1] + "\n"),
    ):
        path = tmp_path / name
        path.write_text(text)
        assert len(read_trace(path).lines) == 2
        path.write_text(text + row)
        with pytest.raises(UsageError, match="more than 2 requests"):
            read_trace(path)


def test_damaged_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE * 20 + '{"timestamp": 1\n')
    assert len(read_trace(path).damaged) == 1
    path.write_text(MOONCAKE + '{"timestamp": "x"}\n{"a": {}}\n')
    with pytest.raises(UsageError, match=r"2 of the 4 requests of .* cannot be read: lines 3, 4\."):
        read_trace(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="TIMESTAMP"):
        read_trace(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a text file in UTF-8"):
        read_trace(path)
    path.write_text("\n")
    with pytest.raises(UsageError, match="holds no requests"):
        read_trace(path)
    path.write_bytes(gzip.compress(MOONCAKE.encode())[:-9])
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(path)
    path.write_text(AZURE + "x" * 200_000 + ",1,1\n")
    with pytest.raises(UsageError, match="cannot be read: field larger than"):
        read_trace(path)


@pytest.mark.parametrize(
    "stored",
    [
        MOONCAKE.encode("utf-8-sig"),
        MOONCAKE.replace("\n", "\r\n").encode(),
        f"\n  {MOONCAKE}".encode(),
        gzip.compress(MOONCAKE.encode()),
        "".join(reversed(MOONCAKE.splitlines(keepends=True))).encode(),
    ],
    ids=["byte-order-mark", "carriage-returns", "blank-lines", "gzip", "reversed"],
)
def test_traces_as_other_programs_store_them(stored: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(stored)
    read = read_trace(path)
    assert [(line.time_s, line.output_tokens) for line in read.lines] == [(0.0, 50), (2.0, 150)]
    assert not read.damaged


@pytest.mark.parametrize("text", ["", "0", "5:2", "a", "1:2:3", "-4"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="neither a number"):
        parse_lengths(text, "--input-len")


def run(*arguments: str) -> tuple[int, str]:
    """Return the exit code and the output. Progress of a command that succeeds, on stderr, is left out."""
    result = CliRunner().invoke(penstock, ["plan", *arguments])
    return result.exit_code, result.output if result.exit_code else result.stdout


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(KNOWN_MODELS["qwen3-8b"])))
    code, output = run(str(tmp_path), "--hardware", "h100", "--rate", "2", "--output-len", "32", "--json")
    assert code == 0, output
    [plan] = json.loads(output)["plans"]
    assert (plan["replicas"], plan["devices_per_replica"]) == (1, 1)
    assert plan["simulated"][0]["share"] >= 0.95
    code, output = run("llama-3.1-8b", "--simulate", "none")
    assert code == 0
    assert all(name in output for name in HARDWARE)


def test_devices_that_are_not_in_the_table() -> None:
    h20 = "name=H20,memory=96,bandwidth=4.0,tflops=148,fp8_tflops=296,link=450,price=2.10"
    code, output = run(
        *("meta-llama/Llama-3.1-8B-Instruct", "--device", h20, "--device", "name=l4,memory=48", "--hardware", "L4"),
        *("--price", "H20=1", "--simulate", "none", "--json"),
    )  # fmt: skip
    assert code == 0, output
    first, second = json.loads(output)["plans"]
    assert (first["hardware"], second["hardware"]) == ("l4", "h20")
    assert first["contexts"] > layout("llama-3.1-8b", "l4").contexts(768)
    assert second["dollars_per_hour"] == second["replicas"]
    device = device_from_text(h20)
    assert (device.memory_bytes, device.bytes_per_s, device.fp8_flops_per_s) == (96e9, 4e12, 296e12)
    assert device_from_text("name=l4,memory=48") == replace(HARDWARE["l4"], memory_bytes=48e9)


def test_a_gguf_file_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03")
    code, output = run(str(tmp_path / "model.gguf"))
    assert code != 0
    assert "plans are made from a config.json" in " ".join(output.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing-like-it"], "There is no model nothing-like-it."),
        (["llama-3.1-8b", "--hardware", "abacus"], "The hardware abacus is not known."),
        (["llama-3.1-8b", "--device", "name=h20,memory=96"], "lacks bandwidth, tflops, price."),
        (["llama-3.1-8b", "--device", "memory=96"], "The device memory=96 lacks"),
        (["llama-3.1-8b", "--device", "name=l4,memory=0"], "memory=0 is no positive number."),
        (["llama-3.1-8b", "--device", "name=l4,memory=nan"], "memory=nan is no positive number."),
        (["llama-3.1-8b", "--device", "name=l4,cores=2"], "has no figure 'cores'."),
        (["llama-3.1-8b", "--format", "int1"], "The format int1 is not known."),
        (["llama-3.1-8b", "--price", "h200=free"], "--price h200=free is not NAME=DOLLARS."),
        (["llama-3.1-405b", "--hardware", "l4"], "No layout serves llama-3.1-405b"),
        (["llama-3.1-8b", "--itl-ms", "0.01"], "No layout serves llama-3.1-8b"),
        (["llama-3.1-8b", "--rate", "nan"], "--rate nan is not a number."),
        (["llama-3.1-8b", "--rate", "inf"], "inf is not in the range"),
        (["llama-3.1-8b", "--share", "nan"], "--share nan is not a number."),
        (["llama-3.1-8b", "--itl-ms", "inf"], "inf is not in the range"),
        (["llama-3.1-8b", "--tensor-parallel", "3"], "cannot be cut over 3 devices"),
        (["llama-3.1-8b", "--pipeline-parallel", "17"], "17 is not in the range"),
        (["smollm2-135m", "--measure", "--hardware", "h200"], "takes neither --hardware nor a layout"),
        (["smollm2-135m", "--measure", "--price", "cpu=1"], "plans for this machine, and --price names cpu"),
        (["llama-3.1-8b", "--plot", "no-such-folder/x.png"], "There is no folder for the picture"),
        (["llama-3.1-8b", "--plot", "x.png", "--simulate", "none"], "simulates nothing"),
        (["llama-2-7b", "--input-len", "8000"], "takes contexts of 4,096 tokens"),
        (["llama-3.1-8b", "--tensr-parallel", "2"], "No such option"),
    ],
)
def test_bad_input_is_a_sentence(arguments: list[str], sentence: str) -> None:
    code, output = run(*arguments)
    assert code != 0
    assert sentence in " ".join(output.split())
