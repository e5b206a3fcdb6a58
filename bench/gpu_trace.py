#!/usr/bin/env python3
"""Shows where the time of a GPU's steps goes: decode steps, or the chunks of one prompt.

python bench/gpu_trace.py record FOLDER_WITH_CONFIG trace.json --batch 32 256 --prompt 8192 16384 [--chunk 8192]
                                                                      (on a GPU; random weights)
python bench/gpu_trace.py table trace.json ...                        milliseconds of a step by kind of kernel
python bench/gpu_trace.py kernels trace.json ...                      launches and milliseconds of a step by kernel
python bench/gpu_trace.py draw trace.json docs/overlap.png            a time line (anywhere, with matplotlib)
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.core.engine_config import Quantization

STEPS = 6
VOCABULARY = (1000, 39_999)
GROUPS = {
    "_decode_kernel": "attention",
    "_prefill_kernel": "attention",
    "_hopper_kernel": "attention",
    "_merge_kernel": "attention",
    "_rope_cache_kernel": "rope and KV write",
    "nvjet": "matrix products",
    "gemm": "matrix products",
    "splitKreduce": "matrix products",
    "_few_rows_kernel": "matrix products",
    "_one_row_kernel": "matrix products",
    "_chunk_kernel": "sampling",
    "_pick_kernel": "sampling",
    "_rms_norm_kernel": "norms and gates",
    "_gated_kernel": "norms and gates",
}
COLOURS = {
    "attention": "#2b6cb0",
    "matrix products": "#dd6b20",
    "rope and KV write": "#38a169",
    "norms and gates": "#805ad5",
    "sampling": "#e53e3e",
    "copies and the rest": "#718096",
}
OTHERS = "copies and the rest"


def record(
    folder: Path,
    target: Path,
    batches: list[int],
    prompts: list[int],
    chunk: int,
    quantization: Quantization | None,
) -> None:
    from penstock.core.engine_config import EngineConfig, ModelConfig, SchedulerConfig
    from penstock.engine.offline import OfflineEngine

    longest = max(4096, *(prompt + 64 for prompt in prompts)) if prompts else 4096
    config = EngineConfig(
        model=ModelConfig(
            model=str(folder),
            load_format="random",
            device="cuda",
            max_model_len=longest,
            quantization=quantization,
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=chunk, itl_target_ms=None),
    )
    engine = OfflineEngine(config, folder)
    name = folder.name if quantization is None else f"{folder.name} in {quantization}"
    model = {"model": name, "config": json.loads((folder / "config.json").read_text())}
    traces = [{**model, "batch": batch, "kernels": _decode_kernels(engine, batch)} for batch in batches]
    for prompt in prompts:
        traces.append({**model, "prompt": prompt, "chunk": chunk, "kernels": _prompt_kernels(engine, prompt)})
    target.write_text(json.dumps(traces))


def _decode_kernels(engine: Any, batch: int) -> list[dict[str, Any]]:
    from penstock.bench.gpu import begin_decoding, decode_step_ms
    from penstock.bench.load import IntRange
    from penstock.core.clock import SystemClock

    decode_step_ms(engine.loop, batch, IntRange(*VOCABULARY), 1, SystemClock())
    requests = begin_decoding(engine.loop, batch, IntRange(*VOCABULARY), 2)
    kernels = _profiled(lambda: [engine.loop.step() for _ in range(STEPS)])
    for request in requests:
        engine.loop.abort(request.id)
    while engine.loop.has_work:
        engine.loop.step()
    return kernels


def _prompt_kernels(engine: Any, num_tokens: int) -> list[dict[str, Any]]:
    from penstock.core.request import SamplingParams

    rng = random.Random(num_tokens)
    first, second = ([rng.randint(*VOCABULARY) for _ in range(num_tokens)] for _ in range(2))
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    engine.generate([first], sampling)
    return _profiled(lambda: engine.generate([second], sampling))


def _profiled(work: Callable[[], object]) -> list[dict[str, Any]]:
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return [
        {"name": event.name, "start_us": event.time_range.start, "end_us": event.time_range.end}
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def group_of(kernel: dict[str, Any]) -> str:
    return next((group for key, group in GROUPS.items() if key in kernel["name"]), OTHERS)


def whole_steps(trace: dict[str, Any]) -> tuple[list[dict[str, Any]], float, int]:
    """Return the kernels of whole steps, their microseconds from begin to end, and the number of steps. Decode steps
    end where a token is sampled; a prompt is one step."""
    kernels = sorted(trace["kernels"], key=lambda kernel: kernel["start_us"])
    if "prompt" in trace:
        return kernels, kernels[-1]["end_us"] - kernels[0]["start_us"], 1
    samples = [kernel["end_us"] for kernel in kernels if "_pick_kernel" in kernel["name"]]
    begin, end = samples[0], samples[-1]
    shown = [kernel for kernel in kernels if begin <= kernel["start_us"] and kernel["end_us"] <= end]
    return shown, end - begin, len(samples) - 1


def prompt_flops(trace: dict[str, Any]) -> dict[str, float]:
    """Floating-point operations of one prompt through a dense model, without its head."""
    config, tokens = trace["config"], trace["prompt"]
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads", heads)
    weights = hidden * size * (2 * heads + 2 * kv_heads) + 3 * hidden * config["intermediate_size"]
    layers = config["num_hidden_layers"]
    return {
        "matrix products": 2.0 * layers * weights * tokens,
        "attention": 2.0 * layers * heads * size * tokens * (tokens + 1),
    }


def table(sources: list[Path]) -> None:
    print("| step | ms | " + " | ".join(f"{group}" for group in COLOURS) + " | no kernel | TFLOP/s |")
    print("|---|" + "---|" * (len(COLOURS) + 3))
    for trace in [trace for source in sources for trace in json.loads(source.read_text())]:
        shown, span_us, steps = whole_steps(trace)
        spent = {group: busy_us(shown, group) / 1000 / steps for group in COLOURS}
        total = span_us / 1000 / steps
        name, rates = f"batch {trace.get('batch')}", "–"
        if "prompt" in trace:
            name = f"a prompt of {trace['prompt']:,} in chunks of {trace['chunk']:,}"
            flops = prompt_flops(trace)
            parts = [
                f"{what} {count / spent[what] / 1e9:.0f}" for what, count in flops.items() if spent[what]
            ]
            rates = f"{sum(flops.values()) / total / 1e9:.0f} ({', '.join(parts)})"
        cells = [f"{value:.2f}" for value in (*spent.values(), total - sum(spent.values()))]
        print(f"| {trace['model']}, {name} | {total:.2f} | " + " | ".join(cells) + f" | {rates} |")


def kernels(sources: list[Path]) -> None:
    """The time of a kernel begins where those before it have ended, as in `busy_us`."""
    for trace in [trace for source in sources for trace in json.loads(source.read_text())]:
        shown, span_us, steps = whole_steps(trace)
        spent: dict[str, list[float]] = {}
        until = float("-inf")
        for kernel in sorted(shown, key=lambda kernel: kernel["start_us"]):
            own_us = max(0.0, kernel["end_us"] - max(kernel["start_us"], until))
            spent.setdefault(kernel["name"], []).append(own_us)
            until = max(until, kernel["end_us"])
        step = f"prompt {trace['prompt']}" if "prompt" in trace else f"batch {trace['batch']}"
        print(f"\n{trace['model']}, {step}: {span_us / 1000 / steps:.2f} ms")
        for name, times in sorted(spent.items(), key=lambda item: -sum(item[1])):
            whole_us = sum(times) / steps
            each_us = sum(times) / len(times)
            print(f"{whole_us / 1000:8.3f} ms  {len(times) / steps:6.1f} x {each_us:7.2f} µs  {name[:90]}")


def busy_us(kernels: list[dict[str, Any]], group: str | None = None) -> float:
    """Time in which at least one kernel ran: kernels overlap where one starts while another drains. With `group`, the
    share of its kernels in that time; a kernel's time begins where those before it have ended."""
    total, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel["start_us"]):
        if group is None or group_of(kernel) == group:
            total += max(0.0, kernel["end_us"] - max(kernel["start_us"], until))
        until = max(until, kernel["end_us"])
    return total


def draw(source: Path, target: Path) -> None:
    import matplotlib.pyplot as plt

    trace = json.loads(source.read_text())[0]
    samples = sorted(kernel["end_us"] for kernel in trace["kernels"] if "_pick_kernel" in kernel["name"])
    begin, end = samples[0], samples[-1]
    shown, _, _ = whole_steps(trace)
    share = busy_us(shown) / (end - begin)
    figure, axes = plt.subplots(figsize=(11, 2.8))
    for kernel in shown:
        group = group_of(kernel)
        row = list(COLOURS).index(group)
        span = (kernel["start_us"] - begin) / 1000, (kernel["end_us"] - kernel["start_us"]) / 1000
        axes.broken_barh([span], (row, 0.8), color=COLOURS[group])
    for time_us in samples:
        axes.axvline((time_us - begin) / 1000, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks([row + 0.4 for row in range(len(COLOURS))], list(COLOURS))
    axes.invert_yaxis()
    axes.set_xlim(0, (end - begin) / 1000)
    axes.set_xlabel("milliseconds; dotted lines: a step's tokens are sampled")
    steps = len(samples) - 1
    axes.set_title(
        f"{trace['model']}, batch {trace['batch']}: {steps} decode steps of {(end - begin) / 1000 / steps:.2f} ms, "
        f"a kernel running {share:.1%} of the time"
    )
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    print(f"{steps} steps, {(end - begin) / 1000 / steps:.3f} ms each, {share:.2%} of the time a kernel runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("target", type=Path)
    recording.add_argument("--batch", type=int, nargs="*", default=[], help="batches of decodes")
    recording.add_argument("--prompt", type=int, nargs="*", default=[], help="tokens of single prompts")
    recording.add_argument("--chunk", type=int, default=8192, help="most tokens in a step")
    recording.add_argument("--quantization", choices=["fp8", "int8", "int4"])
    listing = commands.add_parser("kernels")
    listing.add_argument("sources", type=Path, nargs="+")
    summing = commands.add_parser("table")
    summing.add_argument("sources", type=Path, nargs="+")
    drawing = commands.add_parser("draw")
    drawing.add_argument("source", type=Path)
    drawing.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(
            arguments.folder,
            arguments.target,
            arguments.batch,
            arguments.prompt,
            arguments.chunk,
            arguments.quantization,
        )
    elif arguments.command == "kernels":
        kernels(arguments.sources)
    elif arguments.command == "table":
        table(arguments.sources)
    else:
        draw(arguments.source, arguments.target)


if __name__ == "__main__":
    main()
