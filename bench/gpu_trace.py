#!/usr/bin/env python3
"""Shows that the GPU does not wait for the host between decode steps: a few steps on a time line.

python bench/gpu_trace.py record FOLDER_WITH_CONFIG trace.json [--batch 256]     (on a GPU)
python bench/gpu_trace.py draw trace.json docs/overlap.png                       (anywhere, with matplotlib)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

STEPS = 6
GROUPS = {
    "_decode_kernel": "attention",
    "_merge_kernel": "attention",
    "_rope_cache_kernel": "rope and KV write",
    "nvjet": "matrix products",
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


def record(folder: Path, target: Path, batch: int) -> None:
    import torch

    from penstock.bench.gpu import begin_decoding, decode_step_ms
    from penstock.bench.workload import IntRange
    from penstock.core.clock import SystemClock
    from penstock.core.engine_config import EngineConfig, ModelConfig, SchedulerConfig
    from penstock.engine.offline import OfflineEngine

    config = EngineConfig(
        model=ModelConfig(model=str(folder), load_format="random", device="cuda", max_model_len=4096),
        scheduler=SchedulerConfig(max_num_batched_tokens=8192, itl_target_ms=None),
    )
    loop = OfflineEngine(config, folder).loop
    vocabulary = IntRange(1000, 39_999)
    decode_step_ms(loop, batch, vocabulary, 1, SystemClock())
    begin_decoding(loop, batch, vocabulary, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(STEPS):
            loop.step()
        torch.cuda.synchronize()
    kernels = [
        {"name": event.name, "start_us": event.time_range.start, "end_us": event.time_range.end}
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    target.write_text(json.dumps({"model": folder.name, "batch": batch, "kernels": kernels}))


def busy_us(kernels: list[dict[str, Any]]) -> float:
    """Time in which at least one kernel ran: they overlap where one starts while another drains."""
    total, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel["start_us"]):
        total += max(0.0, kernel["end_us"] - max(kernel["start_us"], until))
        until = max(until, kernel["end_us"])
    return total


def draw(source: Path, target: Path) -> None:
    import matplotlib.pyplot as plt

    trace = json.loads(source.read_text())
    kernels = sorted(trace["kernels"], key=lambda kernel: kernel["start_us"])
    samples = [kernel["end_us"] for kernel in kernels if "_pick_kernel" in kernel["name"]]
    begin, end = samples[0], samples[-1]  # whole steps, from one sampled token to another
    shown = [kernel for kernel in kernels if begin <= kernel["start_us"] and kernel["end_us"] <= end]
    share = busy_us(shown) / (end - begin)
    figure, axes = plt.subplots(figsize=(11, 2.8))
    for kernel in shown:
        group = next((group for key, group in GROUPS.items() if key in kernel["name"]), "copies and the rest")
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
    recording.add_argument("--batch", type=int, default=256)
    drawing = commands.add_parser("draw")
    drawing.add_argument("source", type=Path)
    drawing.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.folder, arguments.target, arguments.batch)
    else:
        draw(arguments.source, arguments.target)


if __name__ == "__main__":
    main()
