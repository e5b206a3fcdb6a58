"""Runs the ranks of a tensor-parallel replica as threads of this process, quicker than starting processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.parallel.ops import TensorParallelOps
from penstock.kernels.interface import Ops
from penstock.models.load import load_model, open_checkpoint
from penstock.models.sharding import Shard
from tests.models.paged import PagedRunner


class ThreadGroup:
    """A `TensorGroup` whose ranks are threads. Each collective puts a tensor down, waits, and reads the others'."""

    def __init__(self, rank: int, size: int, places: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._places, self._barrier = places, barrier

    def _gather(self, x: Tensor) -> list[Tensor]:
        self._places[self.rank] = x.clone()
        self._barrier.wait()
        gathered = list(self._places)
        self._barrier.wait()
        return gathered

    def add_up(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self._gather(x)).sum(dim=0))

    def join_columns(self, own: Tensor, widths: Sequence[int]) -> Tensor | None:
        gathered = self._gather(own)
        return None if self.rank else torch.cat(gathered, dim=1)


def run_ranks(path: Path, ops: Ops, size: int, scenario: Callable[[PagedRunner], Any]) -> Any:
    """Run a scenario in all ranks, and return the first rank's result."""
    places: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=60)
    vocab_size = open_checkpoint(path).config.vocab_size
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            shard = Shard(tensor_rank=rank, tensor_size=size)
            group: Any = ThreadGroup(rank, size, places, barrier)
            rank_ops = TensorParallelOps(ops, group, shard, vocab_size)
            model = load_model(path, rank_ops, shard=shard)
            results[rank] = scenario(PagedRunner(model, rank_ops))
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
            raise result
    return results[0]
