"""`penstock plan`: the hardware and the cost of a workload."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from penstock.cli.commands import PenstockCommand
from penstock.cli.console import fetch_model, json_option, print_json, spinner, stderr_console
from penstock.cli.plan_report import num_replicas, plan_row, plot_plans, print_plans
from penstock.cli.simulations import SimulationRuns
from penstock.core.errors import UsageError
from penstock.core.figures import format_bytes

if TYPE_CHECKING:
    from penstock.planner.capacity import Estimate, Plan, Targets, Traffic
    from penstock.planner.hardware import Hardware
    from penstock.planner.roofline import Layout
    from penstock.planner.shapes import ModelShape
    from penstock.simulator import Report, SimulationConfig
    from penstock.simulator.cost import LinearCost
    from penstock.simulator.report import Outcome

_TENSOR_PARALLEL = (1, 2, 4, 8)
_MEASURED = "this machine"
_GGUF = b"GGUF"  # the first bytes of a GGUF file


@click.command(cls=PenstockCommand, short_help="Estimate the hardware and the cost of a workload.")
@click.argument("model")
@click.option("--hardware", "names", multiple=True, metavar="NAME",
              help="Device to plan for; may be given several times. Default: all known devices.")  # fmt: skip
@click.option("--device", "own_devices", multiple=True, metavar="FIGURES",
              help="Device that is not in the table, or other figures of one: name=h20,memory=96,bandwidth=4.0,"
                   "tflops=148,price=2.10 (GB, TB/s, dense TFLOP/s, $/h); also fp8_tflops, link (GB/s).")  # fmt: skip
@click.option("--format", "formats", multiple=True, metavar="FORMAT", default=("bfloat16",), show_default=True,
              help="Format of weights: float32, bfloat16, fp8, int8, int4; may be given several times.")  # fmt: skip
@click.option("--kv-format", default="bfloat16", show_default=True, metavar="FORMAT",
              help="Format of the KV cache: bfloat16, fp8 or int8.")  # fmt: skip
@click.option("--tensor-parallel", type=click.IntRange(1, 64), metavar="N",
              help="Devices of a replica. Default: the cheapest of 1, 2, 4 and 8.")  # fmt: skip
@click.option("--pipeline-parallel", type=click.IntRange(1, 16), default=1, show_default=True, metavar="N",
              help="Stages of a replica, each with a part of the layers.")  # fmt: skip
@click.option("--rate", type=click.FloatRange(0.001, 1e6), metavar="PER_SECOND",
              help="Requests per second. Default: the trace's, or 1.")  # fmt: skip
@click.option("--input-len", default="512", show_default=True, help="Prompt tokens: a number, or a range.")
@click.option("--output-len", default="256", show_default=True, help="Answer tokens: a number, or a range.")
@click.option("--prefix-share", type=click.FloatRange(0, 0.95), metavar="SHARE",
              help="Share of prompt tokens that prompts have in common. Default: the trace's, or 0.")  # fmt: skip
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="FILE",
              help="Requests to take rate and lengths from: Azure's CSV or Mooncake's JSON lines.")  # fmt: skip
@click.option("--ttft-ms", type=click.FloatRange(0, 1e7, min_open=True), default=1000.0, show_default=True,
              help="Target of the time to the first token.")  # fmt: skip
@click.option("--itl-ms", type=click.FloatRange(0, 1e6, min_open=True), default=50.0, show_default=True,
              help="Target of the mean time between the tokens of an answer.")  # fmt: skip
@click.option("--share", type=click.FloatRange(0, 1, min_open=True), default=0.95, show_default=True,
              help="Share of requests that must meet both targets.")  # fmt: skip
@click.option("--price", "prices", multiple=True, metavar="NAME=DOLLARS",
              help="Dollars per hour of one device, instead of the example in the table.")  # fmt: skip
@click.option("--simulate", "simulated", type=click.Choice(["best", "all", "none"]), default="best",
              show_default=True, help="Plans to check in the simulator: the cheapest, all, or none.")  # fmt: skip
@click.option("--measure", is_flag=True,
              help="Measure the model with the engine on this machine, and plan with what was measured.")  # fmt: skip
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), metavar="FILE",
              help="Draw the share of requests within the targets, by replicas; needs the extra `plot`.")  # fmt: skip
@json_option
def plan(
    model: str,
    names: tuple[str, ...],
    own_devices: tuple[str, ...],
    formats: tuple[str, ...],
    kv_format: str,
    tensor_parallel: int | None,
    pipeline_parallel: int,
    rate: float | None,
    input_len: str,
    output_len: str,
    prefix_share: float | None,
    trace: Path | None,
    ttft_ms: float,
    itl_ms: float,
    share: float,
    prices: tuple[str, ...],
    simulated: str,
    measure: bool,
    plot_file: Path | None,
    as_json: bool,
) -> None:
    """Estimate what MODEL needs on each kind of hardware to serve a traffic within its targets, and the cost.

    MODEL is a folder with a config.json, a config.json, or a known name. Times come from formulas
    (docs/planning.md); the number of replicas of the cheapest plan is checked in the simulator, with the scheduler
    that serves.

    \b
      penstock plan llama-3.1-8b --rate 20 --input-len 100:2000 --output-len 50:400
      penstock plan llama-3.1-70b --hardware h200 --hardware h100 --format fp8 --ttft-ms 500
      penstock plan smollm2-135m --measure --rate 2
    """
    from penstock.bench.summary import check_plot
    from penstock.planner.capacity import Targets

    _check_numbers({"--rate": rate, "--ttft-ms": ttft_ms, "--itl-ms": itl_ms, "--share": share,
                    "--prefix-share": prefix_share})  # fmt: skip
    if measure and (names or own_devices or tensor_parallel or pipeline_parallel > 1):
        raise UsageError("--measure plans for this machine, so it takes neither --hardware nor a layout.")
    if plot_file:
        if simulated == "none":
            raise UsageError("--plot draws what was simulated, and --simulate none simulates nothing.")
        check_plot(plot_file)
    shape = _shape(model)
    devices = _devices(names, own_devices, prices)
    traffic = _traffic(trace, rate, input_len, output_len, prefix_share)
    targets = Targets(ttft_ms / 1e3, itl_ms / 1e3, share)
    measured = _measured_layout(model, shape, prices) if measure else None
    ranks = (tensor_parallel,) if tensor_parallel else _TENSOR_PARALLEL
    candidates = []
    if measured is None:
        layouts = [
            _layouts(shape, device, formats, kv_format, ranks, pipeline_parallel) for device in devices
        ]
        candidates = _candidates(layouts, traffic, targets)
    if measured is not None:
        from penstock.planner.capacity import estimate

        layout, cost = measured
        candidates = [(layout, estimate(layout, cost, traffic, targets))]
    possible = [pair for pair in candidates if pair[1].is_possible]
    if not possible:
        raise _impossible(shape, candidates)
    possible.sort(key=lambda pair: num_replicas(pair[1], traffic) * pair[0].dollars_per_hour)
    checked = {"best": possible[:1], "all": possible, "none": []}[simulated]
    plans = {id(layout): _simulated(layout, guess, traffic, targets, measured) for layout, guess in checked}
    if plans and all(isinstance(each, UsageError) for each in plans.values()):
        raise next(each for each in plans.values() if isinstance(each, UsageError))
    if plot_file:
        plot_plans(plot_file, [each for each in plans.values() if not isinstance(each, UsageError)], targets)
    rows = [plan_row(layout, guess, traffic, plans.get(id(layout))) for layout, guess in candidates]
    if as_json:
        print_json({"model": msgspec.to_builtins(shape), "plans": rows})
        return
    print_plans(shape, rows, traffic, targets)


def _shape(model: str) -> ModelShape:
    from penstock.planner.shapes import KNOWN_MODELS, known_shape, shape_from_config

    path = Path(model)
    known = None if "/" in model and path.exists() else known_shape(model)
    if known is not None:
        return known
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            f"There is no model {model}.",
            hint=f"Give a folder, a config.json, or one of: {', '.join(KNOWN_MODELS)}.",
        )
    try:
        stored = file.read_bytes()
        if stored.startswith(_GGUF):
            raise UsageError(
                f"{file} is a GGUF file, and plans are made from a config.json.",
                hint="Give the config.json of the model that the file was made from, or a known name.",
            )
        config = json.loads(stored)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} cannot be read as JSON.") from error
    if not isinstance(config, dict):
        raise UsageError(f"{file} does not hold an object of settings.")
    return shape_from_config(path.name if path.is_dir() else path.parent.name or str(path), config)


def _devices(names: tuple[str, ...], own: tuple[str, ...], prices: tuple[str, ...]) -> list[Hardware]:
    from penstock.planner.hardware import HARDWARE, device_from_text

    described = {device.name: device for device in map(device_from_text, own)}
    known = {**HARDWARE, **described}
    dollars = dict(_price(text) for text in prices)
    wanted = dict.fromkeys((*map(str.lower, names), *described)) or HARDWARE
    for name in (*wanted, *dollars):
        if name not in known and name != _MEASURED:
            raise UsageError(
                f"The hardware {name} is not known.",
                hint=f"Known are {', '.join(HARDWARE)}. Describe another one with --device.",
            )
    chosen = [known[name] for name in wanted]
    return [
        replace(device, dollars_per_hour=dollars.get(device.name, device.dollars_per_hour))
        for device in chosen
    ]


def _price(text: str) -> tuple[str, float]:
    name, _, dollars = text.partition("=")
    try:
        price = float(dollars)
    except ValueError:
        price = -1.0
    if not 0 <= price < 1e6:
        raise UsageError(f"--price {text} is not NAME=DOLLARS.", hint="Write --price h200=3.50.")
    return name.lower(), price


def _traffic(
    trace: Path | None, rate: float | None, input_len: str, output_len: str, prefix_share: float | None
) -> Traffic:
    from penstock.planner.capacity import Traffic
    from penstock.planner.traffic import parse_lengths, read_trace

    if trace is not None:
        read = read_trace(trace)
        if (warning := read.warning(trace)) is not None:
            stderr_console().print(warning)
        traffic = read.traffic(rate)
        return traffic if prefix_share is None else replace(traffic, prefix_share=prefix_share)
    prompts, mean_prompt = parse_lengths(input_len, "--input-len")
    outputs, mean_output = parse_lengths(output_len, "--output-len")
    return Traffic(
        requests_per_s=rate or 1.0,
        prompt_tokens=prompts,
        output_tokens=outputs,
        mean_prompt=mean_prompt,
        mean_output=mean_output,
        prefix_share=prefix_share or 0.0,
    )


def _check_numbers(given: dict[str, float | None]) -> None:
    for option, value in given.items():
        if value is not None and math.isnan(value):
            raise UsageError(f"{option} {value} is not a number.")


def _layouts(
    shape: ModelShape,
    device: Hardware,
    formats: tuple[str, ...],
    kv_format: str,
    ranks: tuple[int, ...],
    stages: int,
) -> list[Layout]:
    """Return the layouts that the model can be cut into, the largest last."""
    from penstock.planner.hardware import KV_FORMATS, WEIGHT_FORMATS
    from penstock.planner.roofline import Layout

    for name, known in [(kv_format, KV_FORMATS), *((name, WEIGHT_FORMATS) for name in formats)]:
        if name not in known:
            raise UsageError(f"The format {name} is not known.", hint=f"Known are {', '.join(known)}.")
    if stages > shape.num_layers:
        raise UsageError(f"{shape.name} has {shape.num_layers} layers, too few for {stages} stages.")
    possible = [number for number in ranks if shape.num_heads % number == 0]
    if not possible:
        raise UsageError(
            f"The {shape.num_heads} heads of {shape.name} cannot be cut over {ranks[0]} devices.",
            hint="--tensor-parallel must divide the number of heads.",
        )
    return [
        Layout(shape, device, WEIGHT_FORMATS[name], KV_FORMATS[kv_format], number, stages)
        for name in formats
        for number in possible
    ]


def _candidates(
    layouts: list[list[Layout]], traffic: Traffic, targets: Targets
) -> list[tuple[Layout, Estimate]]:
    """Return the cheapest layout of each device, or the largest one if no layout meets the targets."""
    from penstock.planner.capacity import best_layout, estimate
    from penstock.planner.roofline import RooflineCost

    found = []
    for of_device in layouts:
        largest = of_device[-1]
        best = best_layout(of_device, traffic, targets)
        found.append(
            best or (largest, estimate(largest, RooflineCost(largest, serves=True), traffic, targets))
        )
    return found


def _impossible(shape: ModelShape, candidates: list[tuple[Layout, Estimate]]) -> UsageError:
    if all(guess.binds == "context length" for _, guess in candidates):
        return UsageError(
            f"{shape.name} takes contexts of {shape.max_positions:,} tokens, and these requests are longer.",
            hint="Lower --input-len or --output-len.",
        )
    reasons = sorted({guess.binds for _, guess in candidates})
    smallest = min(layout.weight_bytes for layout, _ in candidates)
    return UsageError(
        f"No layout serves {shape.name} ({format_bytes(int(smallest))} of weights) within the targets; what binds: "
        f"{', '.join(reasons)}.",
        hint="Try a smaller --format, a larger --tensor-parallel, other --hardware, or more time with --ttft-ms and "
        "--itl-ms.",
    )


def _simulated(
    layout: Layout,
    guess: Estimate,
    traffic: Traffic,
    targets: Targets,
    measured: tuple[Layout, LinearCost] | None,
) -> Plan | UsageError:
    """Find the number of replicas in the simulator. Returns an error if no number meets the targets with this
    layout, because another layout may meet the targets."""
    from penstock.planner.capacity import plan_replicas

    def run(config: SimulationConfig, number: int, on_outcome: Callable[[Outcome], None]) -> Report:
        return SimulationRuns(f"{layout.hardware.name}, replicas: {number}", config).simulate(
            config, on_outcome
        )

    try:
        return plan_replicas(layout, guess, traffic, targets, cost=measured[1] if measured else None, run=run)
    except UsageError as error:
        return error


def _measured_layout(model: str, shape: ModelShape, prices: tuple[str, ...]) -> tuple[Layout, LinearCost]:
    """Run the engine on this machine, and fit the costs of its steps."""
    from penstock.core.engine_config import EngineConfig, ModelConfig
    from penstock.core.plan_log import read_plan_log
    from penstock.core.request import SamplingParams
    from penstock.planner.hardware import HARDWARE, KV_FORMATS, WEIGHT_FORMATS
    from penstock.planner.roofline import Layout
    from penstock.simulator.cost import fit, mean_relative_error, observations

    own = dict(_price(text) for text in prices)
    for name in own.keys() - {_MEASURED}:
        raise UsageError(
            f"--measure plans for this machine, and --price names {name}.",
            hint=f'Write --price "{_MEASURED}=3.50".',
        )
    path = fetch_model(model)
    with tempfile.TemporaryDirectory() as folder, spinner(f"Measuring {model} on this machine"):
        from penstock.engine.offline import OfflineEngine

        log = Path(folder) / "plans.jsonl"
        config = EngineConfig(model=ModelConfig(model=model), record_plans=str(log), speculate="off")
        engine = OfflineEngine(config, path)
        try:
            vocabulary, longest = engine.card.vocab_size, engine.card.max_model_len
            capacity = engine.stats().num_kv_blocks * config.cache.block_size
            for batch, num_tokens in ((1, 64), (1, 512), (4, 128), (16, 32)):
                prompts = [
                    [
                        (start * 7919 + place * 31) % (vocabulary - 1) + 1
                        for place in range(min(num_tokens, longest - 64))
                    ]
                    for start in range(batch)
                ]
                engine.generate(prompts, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
        finally:
            engine.close()
        with log.open("rb") as file:
            _, calls = read_plan_log(file)
            observed = list(observations(calls))
    cost = fit(observed)
    stderr_console().print(
        f"{len(observed)} steps measured; fitted costs are off by {mean_relative_error(cost, observed):.0%}."
    )
    kv_bytes = capacity * shape.kv_bytes(1, 2.0)
    weights = WEIGHT_FORMATS["bfloat16"]
    device = replace(
        HARDWARE["cpu"],
        name=_MEASURED,
        memory_bytes=(Layout(shape, HARDWARE["cpu"], weights, KV_FORMATS["bfloat16"]).weight_bytes + kv_bytes)
        / 0.9,
        dollars_per_hour=own.get(_MEASURED, 0.0),
    )
    return Layout(shape, device, weights, KV_FORMATS["bfloat16"]), cost
