"""What ranks are asked to compute. Imports no more than a rank needs, because every process pays for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.core.engine_config import ParallelConfig
from penstock.engine.parallel.experts import ExpertBalance
from penstock.engine.parallel.mesh import Mesh
from penstock.engine.parallel.placement import placed
from penstock.engine.parallel.setup import OneOfSeveralRanks
from penstock.kernels.select import select_ops
from penstock.models.load import load_model, open_checkpoint
from tests.models.paged import BLOCK_SIZE, PagedRunner, Sequence

VOCAB_SIZE = 320


def random_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def scenario(runner: PagedRunner) -> list[Tensor]:
    """Whole prompts, chunks, single tokens, a cached prefix, a mixed batch: the logits of every token."""
    made = [
        runner.prompt_logits(random_prompt(70, seed=1)),
        runner.prompt_logits(random_prompt(40, seed=2), chunk_size=15),
        runner.prompt_logits(random_prompt(3, seed=3), chunk_size=1),
    ]
    prefix = random_prompt(2 * BLOCK_SIZE, seed=4)
    first = Sequence()
    made += runner.step([(first, prefix + random_prompt(5, seed=5))])
    second = Sequence(block_ids=first.block_ids[:2], num_computed=len(prefix))
    third = Sequence()
    made += runner.step([(third, random_prompt(30, seed=6))])
    made += runner.step([(third, [7]), (first, [9, 8]), (second, random_prompt(20, seed=7))])
    return made


def _shuffle_experts(balance: ExpertBalance) -> None:
    """Move most experts to the other ranks, and then those of every other layer once more, for other loads."""
    for index, layer in enumerate(balance.layers):
        loads = [3**expert for expert in range(layer.num_experts)]
        with torch.inference_mode():
            balance.move(index, layer.placement[::-1])
            if index % 2:
                balance.move(index, placed(loads, layer.placement, balance.group.size))
        assert sorted(layer.placement) != sorted(range(layer.num_experts)), "some experts have copies"


def logits_of_rank(
    rank: int,
    parallel: ParallelConfig,
    store_access: Path,
    models: dict[str, Path],
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any] | None:
    """Runs in a rank. Returns what the sampling rank sees, by model. Ranks share a GPU, which NCCL would refuse."""
    backend = select_ops(device, dtype)
    mesh = Mesh(rank, parallel, torch.device("cpu"), store_access)
    try:
        made = {}
        for name, path in models.items():
            setup = OneOfSeveralRanks(mesh, open_checkpoint(path).config.vocab_size)
            ops = setup.ops(backend)
            model = setup.model(load_model(path, ops, shard=mesh.shard), ops)
            made[name] = [logits.cpu().numpy() for logits in scenario(PagedRunner(model, ops))]
            if setup.balance is not None:
                _shuffle_experts(setup.balance)
                made[f"{name}, moved"] = [
                    logits.cpu().numpy() for logits in scenario(PagedRunner(model, ops))
                ]
        mesh.smallest(0)  # nobody leaves before all have received what was sent to them
        samples = mesh.shard.is_last_stage and mesh.shard.expert_rank == 0
        return made if samples else None
    finally:
        mesh.close()
