#!/usr/bin/env python3
"""How much host memory loading takes, and how long, for a checkpoint of several shards that this script writes.

    python -m bench.load_memory [--shards 8] [--shard-mb 256] [--rounds 3] [--folder DIR]

Each load is a process of its own. Its backend keeps no weights, like a GPU that has copied them, so all memory is the
loader's: anonymous memory (copies), mapped pages of files, and both together, each at its peak above what the process
had before. Loads in turns come from the disk (the files were dropped from the page cache) and from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HIDDEN, INNER, HEADS = 2048, 8192, 16
LAYER_BYTES = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)


def write_checkpoint(folder: Path, num_shards: int, shard_bytes: int) -> None:
    """Write a Llama in bfloat16 whose layers fill the shards one after the other."""
    import torch
    from safetensors.torch import save_file

    num_layers = max(num_shards, num_shards * shard_bytes // LAYER_BYTES)
    settings = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": num_layers, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "vocab_size": 4096, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    square, wide = (HIDDEN, HIDDEN), (INNER, HIDDEN)
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (4096, HIDDEN))]
    for index in range(num_layers):
        prefix = f"model.layers.{index}"
        shapes += [(f"{prefix}.self_attn.{part}_proj.weight", square) for part in "qkvo"]
        shapes += [(f"{prefix}.mlp.{part}_proj.weight", wide) for part in ("gate", "up")]
        shapes.append((f"{prefix}.mlp.down_proj.weight", (HIDDEN, INNER)))
        shapes += [(f"{prefix}.{part}_layernorm.weight", (HIDDEN,)) for part in ("input", "post_attention")]
    shapes += [("model.norm.weight", (HIDDEN,)), ("lm_head.weight", (4096, HIDDEN))]
    places: dict[str, str] = {}
    per_shard = -(-len(shapes) // num_shards)
    for number in range(num_shards):
        own = shapes[number * per_shard : (number + 1) * per_shard]
        name = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        save_file({key: torch.rand(shape).to(torch.bfloat16) for key, shape in own}, folder / name)
        places |= {key: name for key, _ in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def drop_from_page_cache(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


class Watch:
    """Reads this process's memory every other millisecond, and keeps the peaks."""

    def __init__(self) -> None:
        self.first = self.read()
        self.peaks = dict.fromkeys(("anonymous", "mapped", "together"), 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @staticmethod
    def read() -> tuple[int, int]:
        found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        anonymous, mapped = (int(found[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))
        return anonymous, mapped

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            anonymous, mapped = (now - then for now, then in zip(self.read(), self.first, strict=True))
            for name, value in (
                ("anonymous", anonymous),
                ("mapped", mapped),
                ("together", anonymous + mapped),
            ):
                self.peaks[name] = max(self.peaks[name], value)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def load(folder: Path) -> dict[str, Any]:
    """Load the checkpoint in this process. Returns peaks in bytes, and seconds."""
    import torch

    from penstock.kernels.interface import WeightData
    from penstock.kernels.reference import TorchLinear, TorchOps
    from penstock.models.load import load_model

    class DroppingOps(TorchOps):
        def pack_linear(self, parts: list[WeightData], bias: Any = None) -> TorchLinear:  # type: ignore[override]
            rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
            copied = super().pack_linear(parts, bias)  # reads all of it
            del copied
            return TorchLinear(torch.zeros(1, dtype=self.dtype).expand(rows, columns), None)

    ops = DroppingOps("cpu", torch.bfloat16)
    with Watch() as watch:
        started = time.monotonic()
        load_model(folder, ops)
        seconds = time.monotonic() - started
    return {**watch.peaks, "seconds": seconds}


def in_own_process(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.load_memory", "--load", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--shard-mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where the checkpoint is written; a temporary folder by default")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load is not None:
        print(json.dumps(load(arguments.load)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        folder = Path(made)
        write_checkpoint(folder, arguments.shards, arguments.shard_mb << 20)
        sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
        print(f"{len(sizes)} shards, {sum(sizes) / 2**20:.0f} MiB, the largest {max(sizes) / 2**20:.0f} MiB")
        runs: dict[str, list[dict[str, Any]]] = {"disk": [], "page cache": []}
        for _ in range(arguments.rounds):
            for origin, found in runs.items():
                if origin == "disk":
                    drop_from_page_cache(folder)
                found.append(in_own_process(folder))
        for origin, found in runs.items():
            middle = {key: statistics.median(run[key] for run in found) for key in found[0]}
            shares = ", ".join(
                f"{key} {middle[key] / max(sizes):.2f}" for key in ("anonymous", "mapped", "together")
            )
            speed = sum(sizes) / middle["seconds"] / 1e9
            print(
                f"from {origin:10}: {shares} × the largest shard; {middle['seconds']:.2f} s, {speed:.2f} GB/s"
            )


if __name__ == "__main__":
    main()
