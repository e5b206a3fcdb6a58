"""The planner's formulas against worked examples of the field and against what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.app import penstock
from penstock.core.engine_config import SchedulerConfig
from penstock.core.errors import UsageError
from penstock.planner.capacity import Targets, Traffic, attained, best_layout, estimate, plan_replicas
from penstock.planner.hardware import HARDWARE, KV_FORMATS, WEIGHT_FORMATS
from penstock.planner.roofline import Layout, RooflineCost
from penstock.planner.shapes import KNOWN_MODELS, known_shape, shape_from_config
from penstock.planner.traffic import parse_lengths, read_trace
from penstock.simulator import Fixed, ReplicaConfig, SimulationConfig, Uniform, Workload, simulate

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


def test_windows_bound_the_cache() -> None:
    shape = known_shape("gemma-3-27b")
    assert shape is not None
    assert shape.num_window_layers == 52
    short, long = shape.kv_bytes(1024, 2.0), shape.kv_bytes(32_768, 2.0)
    assert long / short == pytest.approx((10 * 32 + 52) / 62)


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
        ("qwen3-30b-a3b", 32, 14.87, 0.1),
        ("qwen3-30b-a3b", 256, 21.8, 0.1),
    ],
)
def test_decode_steps_as_measured(model: str, batch: int, measured_ms: float, within: float) -> None:
    predicted_ms = RooflineCost(layout(model)).decode_s(batch, 544) * 1e3
    assert predicted_ms == pytest.approx(measured_ms, rel=within)


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
                num_blocks=each.kv_tokens // 16,
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
    each, targets = layout("llama-3.1-8b", "a100"), Targets(1.0, 0.05)
    guess = estimate(each, RooflineCost(each), traffic(1.0), targets)
    needed = [
        plan_replicas(each, guess, traffic(rate), targets) for rate in (1.0, 3.5 * guess.requests_per_s)
    ]
    assert needed[0].num_replicas == 1
    assert 3 <= needed[1].num_replicas <= 5
    assert needed[1].reached.share >= targets.share
    assert needed[1].dollars_per_month == pytest.approx(1.70 * 730 * needed[1].num_replicas)
    fewer = attained(each, RooflineCost(each), traffic(3.5 * guess.requests_per_s), targets, 2)
    assert fewer.share < needed[1].reached.share


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
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(path)


@pytest.mark.parametrize("text", ["", "0", "5:2", "a", "1:2:3", "-4"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="neither a number"):
        parse_lengths(text, "--input-len")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(penstock, ["plan", *arguments])
    return result.exit_code, result.output


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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing-like-it"], "There is no model nothing-like-it."),
        (["llama-3.1-8b", "--hardware", "abacus"], "The hardware abacus is not known."),
        (["llama-3.1-8b", "--format", "int1"], "The format int1 is not known."),
        (["llama-3.1-8b", "--price", "h200=free"], "--price h200=free is not NAME=DOLLARS."),
        (["llama-3.1-405b", "--hardware", "l4"], "No layout serves llama-3.1-405b"),
        (["llama-3.1-8b", "--itl-ms", "0.01"], "No layout serves llama-3.1-8b"),
    ],
)
def test_bad_input_is_a_sentence(arguments: list[str], sentence: str) -> None:
    code, output = run(*arguments)
    assert code != 0
    assert sentence in " ".join(output.split())
