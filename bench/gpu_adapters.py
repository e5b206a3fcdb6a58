#!/usr/bin/env python3
"""Decode steps with LoRA adapters on a GPU: milliseconds without adapters, with one, and with all of them.

python -m bench.gpu_adapters FOLDER_WITH_CONFIG [--ranks 16,16,16,16,16,16,16,16] [--batches 1,32,256]

Weights are random, and so are the adapters, which change every matrix that an adapter may change. "with" is relative
to the tokens per second of the same batch without adapters.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.bench.gpu import decode_step_ms
from penstock.bench.load import IntRange
from penstock.core.clock import SystemClock
from penstock.core.engine_config import CacheConfig, EngineConfig, LoRAConfig, ModelConfig, SchedulerConfig
from penstock.core.request import Adapter
from penstock.engine.adapters import LoRAModel
from penstock.engine.executor import ModelExecutor
from penstock.engine.loop import EngineLoop
from penstock.engine.offline import OfflineEngine
from penstock.kernels.adapted import Delta

VOCABULARY = IntRange(1000, 39_999)


def random_adapter(lora: LoRAModel, rank: int, name: str) -> Adapter:
    """Load an adapter without a file. Its matrices are drawn on the GPU, once, and are the same in every layer."""
    drawn: dict[tuple[int, int], torch.Tensor] = {}

    def draw(*shape: int) -> torch.Tensor:
        if shape not in drawn:
            drawn[shape] = torch.randn(shape, device="cuda").mul_(0.01).cpu()
        return drawn[shape]

    deltas = {}
    for index, product in enumerate(lora.products):
        heights, columns = tuple(map(len, product.own_rows)), len(product.own_columns)
        pairs = tuple((draw(rank, columns), draw(height, rank)) for height in heights)
        deltas[index] = Delta(heights, columns, pairs)
    adapter = Adapter(name=name, path="/nowhere", digest=name)
    lora.load(adapter, lora.pack(deltas))
    return adapter


def load_adapters(loop: EngineLoop, ranks: Sequence[int]) -> list[Adapter]:
    executor = loop.executor
    assert isinstance(executor, ModelExecutor)
    assert executor.forward.lora is not None
    lora = executor.forward.lora
    made = []
    for index, rank in enumerate(ranks):
        lora.make_room(frozenset(adapter.digest for adapter in made))
        made.append(random_adapter(lora, rank, f"{index}-of-rank-{rank}"))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", default="16,16,16,16,16,16,16,16")
    parser.add_argument("--batches", default="32,1,256")
    parser.add_argument("--quantization", choices=["fp8", "int8", "int4"])
    arguments = parser.parse_args()
    ranks = [int(rank) for rank in arguments.ranks.split(",")]
    batches = [int(batch) for batch in arguments.batches.split(",")]
    config = EngineConfig(
        model=ModelConfig(
            model=str(arguments.folder),
            load_format="random",
            device="cuda",
            max_model_len=4096,
            quantization=arguments.quantization,
        ),
        cache=CacheConfig(enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=max(batches), itl_target_ms=None),
        lora=LoRAConfig(max_loras=len(ranks), max_lora_rank=max(ranks)),
        speculate="off",
    )
    loop = OfflineEngine(config, arguments.folder).loop
    adapters = load_adapters(loop, ranks)
    clock = SystemClock()
    for batch in batches:
        times = []
        for chosen in ([], adapters[:1], adapters):
            decode_step_ms(loop, batch, VOCABULARY, 1, clock, chosen)  # captures graphs
            times.append(min(decode_step_ms(loop, batch, VOCABULARY, seed, clock, chosen) for seed in (2, 3)))
        none, one, several = times
        print(
            f"batch {batch}: none {none:.2f} ms, 1 adapter {one:.2f} ms ({none / one:.2f} x), "
            f"{len(adapters)} adapters {several:.2f} ms ({none / several:.2f} x), "
            f"{batch / several * 1000:,.0f} tok/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
