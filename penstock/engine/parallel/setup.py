"""What is different about loading a model when this process is one rank of several. Knows the order of no steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from penstock.core.engine_config import EngineConfig
from penstock.core.errors import ConfigError
from penstock.engine.device import choose_device
from penstock.engine.parallel.mesh import Mesh, shard_of
from penstock.engine.parallel.ops import TensorParallelOps
from penstock.engine.parallel.rank_model import RankModel
from penstock.engine.parallel.samplers import ReceivingSampler, SharingSampler
from penstock.engine.sampler import Sampler
from penstock.kernels.interface import Ops
from penstock.models.load import is_encoder, open_checkpoint
from penstock.models.model import Model, StagedModel
from penstock.models.sharding import WHOLE, Shard


class OneRank:
    """The usual case: nothing is different."""

    shard: Shard = WHOLE
    mesh: Mesh | None = None
    records_graphs = True

    def ops(self, ops: Ops) -> Ops:
        return ops

    def model(self, model: StagedModel, ops: Ops) -> Model:
        return model

    def agreed(self, number: int) -> int:
        """The smallest of what the ranks say."""
        return number

    def sampler(self, *settings: Any) -> Sampler:
        return Sampler(*settings)


class OneOfSeveralRanks(OneRank):
    mesh: Mesh

    def __init__(self, mesh: Mesh, vocab_size: int) -> None:
        self.mesh = mesh
        self.shard = mesh.shard
        self.records_graphs = mesh.shard.num_stages == 1  # a graph cannot wait for another stage
        self._vocab_size = vocab_size

    def ops(self, ops: Ops) -> Ops:
        if self.shard.tensor_size == 1:
            return ops
        return TensorParallelOps(ops, self.mesh.tensor, self.shard, self._vocab_size)

    def model(self, model: StagedModel, ops: Ops) -> Model:
        return RankModel(model, self.mesh, ops)

    def agreed(self, number: int) -> int:
        return self.mesh.smallest(number)

    def sampler(self, *settings: Any) -> Sampler:
        if self.shard.tensor_size == 1:
            return Sampler(*settings)
        kind = ReceivingSampler if self.shard.tensor_rank else SharingSampler
        return kind(self.mesh.tensor, *settings)


def join(config: EngineConfig, model_path: Path, rank: int, meeting_place: Path) -> OneOfSeveralRanks:
    """Waits until all ranks have come."""
    device = choose_device(config.model.device)
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    vocab_size = open_checkpoint(model_path).config.vocab_size
    return OneOfSeveralRanks(Mesh(rank, config.parallel, device, meeting_place), vocab_size)


def check(config: EngineConfig, model_path: Path) -> None:
    """Raises ConfigError for what cannot be shared out, before anything is loaded."""
    if is_encoder(model_path):
        raise ConfigError(
            "An encoder is too small to be shared out over ranks.",
            hint="Leave --tensor-parallel-size and --pipeline-parallel-size out.",
        )
    if config.kv_transfer:
        raise ConfigError(
            "KV blocks that are cut up over ranks cannot be sent to other engines.",
            hint="Leave out either prefill and decode replicas, or the parallel sizes.",
        )
    shard_of(0, config.parallel).check(open_checkpoint(model_path).config)
    num_ranks = config.parallel.num_ranks
    if choose_device(config.model.device).type == "cuda" and torch.cuda.device_count() < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks need as many GPUs, and torch finds {torch.cuda.device_count()}.",
            hint="Lower --tensor-parallel-size or --pipeline-parallel-size.",
        )
