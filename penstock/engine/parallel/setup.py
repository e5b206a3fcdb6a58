"""Loads a model when this process is one rank of several: its part of the model, and which rank samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from penstock.core.engine_config import EngineConfig
from penstock.core.errors import ConfigError, EngineUnavailable
from penstock.core.plan import SampledToken
from penstock.core.request import Request
from penstock.engine.batch import BatchRows, Samples
from penstock.engine.device import allocate_kv, choose_device
from penstock.engine.executor import ModelExecutor
from penstock.engine.grammar import GrammarCompiler
from penstock.engine.grammar_masks import StepMasks
from penstock.engine.one_rank import OneRank
from penstock.engine.parallel.executor import LocalRank
from penstock.engine.parallel.experts import ExpertBalance
from penstock.engine.parallel.mesh import Mesh, TensorGroup, shard_of
from penstock.engine.parallel.ops import DataParallelOps, SharedExperts, TensorParallelOps
from penstock.engine.parallel.rendezvous import StoreAccess
from penstock.engine.sampler import Sampler
from penstock.engine.warmup import WarmUpStep, run_step
from penstock.kernels.interface import AttentionBatch, KVStore, Ops
from penstock.models.encoders.load import is_encoder
from penstock.models.load import Checkpoint, open_any_checkpoint
from penstock.models.lora import Shapes, adaptable_shapes
from penstock.models.model import HasLatents, HasStates, Model, StagedModel, staged
from penstock.models.transformers_load import TransformersCheckpoint, refuse_shards
from penstock.models.weights import NamedProduct


class RankModel:
    """A rank's part of a model. Only the last stage uses the result of `forward`, and only its first rank that of
    `logits`."""

    implementation = "native"

    def __init__(self, model: StagedModel, mesh: Mesh, ops: Ops) -> None:
        self.config = model.config
        self.num_layers = model.num_layers
        self.num_kv_heads = model.num_kv_heads
        self.head_dim = model.head_dim
        self.max_model_len = model.max_model_len
        self.products: Sequence[NamedProduct] = model.products
        self.records_graphs = model.records_graphs
        # The first rank of each stage counts the parameters of the stage.
        counted = model.num_parameters if mesh.shard.expert_rank == 0 else 0
        self.num_parameters, self.weight_bytes = mesh.totals(counted, model.weight_bytes)
        if isinstance(model, HasStates):
            self.num_kv_layers, self.state_layers = model.num_kv_layers, model.state_layers
        if isinstance(model, HasLatents):
            self.latent_width = model.latent_width
        self._model = model
        self._shard = mesh.shard
        self._link = mesh.stages
        self._device = ops.device
        self._dtype = ops.dtype

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: KVStore) -> Tensor:
        with _no_second_try():
            if self._shard.is_first_stage:
                residual = self._model.embed(token_ids)
            else:
                shape = (token_ids.shape[0], self.config.hidden_size)
                residual = self._link.receive_into(torch.empty(shape, dtype=self._dtype, device=self._device))
            self._model.run_layers(residual, batch, kv)
            if self._shard.is_last_stage:
                return self._model.normed(residual)
            self._link.send(residual)
            return residual

    def run_inner(self, run: Callable[[StagedModel], Tensor]) -> Tensor:
        """Run this rank's part in another way than `forward`. There must be one stage."""
        with _no_second_try():
            return run(self._model)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        with _no_second_try():
            return self._model.logits(hidden_rows) if self._shard.is_last_stage else hidden_rows

    def argmax(self, hidden_rows: Tensor) -> Tensor | None:
        if self._shard.tensor_size > 1:
            return None  # ranks have parts of the logits
        return self._model.argmax(hidden_rows) if self._shard.is_last_stage else None

    def with_ops(self, ops: Ops) -> Model:
        twin = copy.copy(self)
        twin._model = staged(self._model.with_ops(ops))
        return twin

    def with_distinct_layers(self) -> Model:
        return self._model.with_distinct_layers()


@contextmanager
def _no_second_try() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineUnavailable(
            "There was not enough memory for a step.",
            hint="Lower --max-num-batched-tokens or --gpu-memory-utilization.",
        ) from error


class SharingSampler(Sampler):
    """The sampler of the first rank, which has all logits."""

    def __init__(self, group: TensorGroup, *settings: Any) -> None:
        super().__init__(*settings)
        self._group = group

    def sample(
        self,
        logits: Tensor,
        samples: Samples,
        masks: StepMasks | None = None,
        num_taken_back: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        token_ids, logprobs = super().sample(logits, samples, masks, num_taken_back)
        self._group.share(token_ids)
        return token_ids, logprobs


class ReceivingSampler(Sampler):
    """The sampler of the other ranks, which have no complete logits and keep no state of requests."""

    has_logits = False

    def __init__(self, group: TensorGroup, *settings: Any) -> None:
        super().__init__(*settings)
        self._group = group

    def begin(self, row: int, request: Request, output_token_ids: Sequence[int]) -> None:
        return

    def end(self, row: int) -> None:
        return

    def sample(
        self,
        logits: Tensor,
        samples: Samples,
        masks: StepMasks | None = None,
        num_taken_back: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        self._group.share(token_ids)
        return token_ids, {}

    def report(self, *step: Any) -> tuple[SampledToken, ...]:
        return ()


class OneOfSeveralRanks(OneRank):
    """One rank of several. `local` is set by `connect`, when the model is loaded."""

    is_alone = False
    local: LocalRank

    def __init__(self, mesh: Mesh, vocab_size: int, block_size: int = 16) -> None:
        self.mesh = mesh
        self.shard = mesh.shard
        # A graph cannot wait for another stage, and the sizes of an exchange are known when it is made.
        self.records_graphs = mesh.shard.num_stages == 1 and mesh.shard.data_size == 1
        self._vocab_size = vocab_size
        self._block_size = block_size
        self.balance: ExpertBalance | None = None  # made with the operations, where experts are balanced
        # Made with the first operations, where ranks have tokens of their own.
        self._experts: SharedExperts | None = None

    def ops(self, ops: Ops) -> Ops:
        shard = self.shard
        if shard.expert_size == 1:
            return ops
        if shard.balances_experts and self.balance is None:
            adds_up = shard.data_size > 1
            self.balance = ExpertBalance(
                self.mesh.experts, shard.redundant_experts, ops.device, adds_up=adds_up
            )
        if shard.data_size == 1:
            return TensorParallelOps(ops, self.mesh.tensor, shard, self._vocab_size, self.balance)
        shared = SharedExperts(ops, self.mesh.experts)
        self._experts = self._experts or shared
        return DataParallelOps(ops, shared, self.balance)

    def model(self, model: Model, ops: Ops) -> Model:
        of_rank = RankModel(staged(model), self.mesh, ops)
        if self._experts is not None:
            with self._experts.rehearsing(), torch.inference_mode():
                run_step(of_rank, ops, allocate_kv(of_rank, ops, 1, self._block_size), WarmUpStep(1, 1, 1))
        return of_rank

    def agreed(self, number: int) -> int:
        return self.mesh.smallest(number)

    def shapes_elsewhere(self, products: Sequence[NamedProduct]) -> Shapes:
        if self.shard.num_stages == 1:
            return {}
        told = self.mesh.exchange_of_stages(
            "shapes", msgspec.json.encode(adaptable_shapes(products)).decode()
        )
        elsewhere: dict[str, tuple[int, int]] = {}
        for data in told:
            elsewhere |= msgspec.json.decode(data, type=dict[str, tuple[int, int]])
        return elsewhere

    def sampler(self, *settings: Any) -> Sampler:
        if self.shard.tensor_size == 1:
            return Sampler(*settings)
        kind = ReceivingSampler if self.shard.tensor_rank else SharingSampler
        return kind(self.mesh.tensor, *settings)

    def connect(self, executor: ModelExecutor, rows: BatchRows, compiler: GrammarCompiler | None) -> None:
        if self.balance is not None:
            self.balance.check(self.mesh)
        self.local = LocalRank(executor, rows, self.mesh, compiler, self.balance, self._experts)


def join(
    config: EngineConfig, model_path: Path, rank: int, store_access: Path | StoreAccess
) -> OneOfSeveralRanks:
    """Join the ranks of this model. Waits until all ranks have come."""
    device = choose_device(config.model.device)
    if device.type == "cuda":  # a node has one stage, and its GPUs are counted from 0
        is_spread = isinstance(store_access, StoreAccess)
        torch.cuda.set_device(rank % config.parallel.ranks_per_stage if is_spread else rank)
    vocab_size = _open(config, model_path).config.vocab_size
    mesh = Mesh(rank, config.parallel, device, store_access)
    return OneOfSeveralRanks(mesh, vocab_size, config.cache.block_size)


def check(config: EngineConfig, model_path: Path, num_ranks_here: int) -> None:
    """Raise ConfigError for a model that cannot be split over ranks, before anything is loaded."""
    if is_encoder(model_path):
        raise ConfigError(
            "An encoder is too small to be sharded over ranks.",
            hint="Leave --tensor-parallel-size, --pipeline-parallel-size and --enable-expert-parallel out.",
        )
    if config.kv_transfer and config.parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            "KV blocks whose layers are on several stages cannot be sent to other engines.",
            hint="Leave out either prefill and decode replicas, or --pipeline-parallel-size.",
        )
    checkpoint, shard = _open(config, model_path), shard_of(0, config.parallel)
    if isinstance(checkpoint, TransformersCheckpoint):
        refuse_shards(shard)
    shard.check(checkpoint.config)
    if choose_device(config.model.device).type == "cuda" and torch.cuda.device_count() < num_ranks_here:
        raise ConfigError(
            f"{num_ranks_here} ranks need as many GPUs, and torch finds {torch.cuda.device_count()}.",
            hint="Lower --tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size.",
        )


def _open(config: EngineConfig, model_path: Path) -> Checkpoint | TransformersCheckpoint:
    settings = config.model
    return open_any_checkpoint(
        model_path, settings.model_implementation, trust_remote_code=settings.trust_remote_code
    )
