"""Loads the model or the heads that draft for a served model, and checks that they belong to it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from penstock.core.clock import Clock
from penstock.core.engine_config import OWN_HEADS, EngineConfig, parse_speculate
from penstock.core.errors import ConfigError
from penstock.core.figures import format_bytes
from penstock.engine.batch import BatchRows
from penstock.engine.drafters.draft_kv import SCRATCH_BLOCKS
from penstock.engine.drafters.guessers import EagleGuesser, Guesser, HeadGuesser, ModelGuesser, TreeGuesser
from penstock.engine.drafters.hidden_states import HiddenStates
from penstock.engine.drafters.medusa import MedusaDrafter
from penstock.engine.drafters.model import (
    MAX_TOKENS,
    ModelDrafter,
)
from penstock.engine.drafters.trees import TREE_WIDTH
from penstock.engine.warmup import DECODES, PREFILLS, VERIFICATIONS, inputs_of
from penstock.kernels.interface import KVStore, Ops
from penstock.kernels.select import preferred_cpu_dtype
from penstock.models.catalog import head_of
from penstock.models.drafters.heads import EagleHead, MedusaHeads, Target, load_heads
from penstock.models.drafters.mtp import MtpHead
from penstock.models.load import (
    load_model,
    load_tokenizer,
    open_any_checkpoint,
    open_checkpoint,
    weight_source,
)
from penstock.models.model import HasLatents, Model, TappedModel, staged, state_layers
from penstock.models.tokenizer import TokenizerFiles

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A model or heads in memory, before the KV cache has a size."""

    guesser: Guesser | None
    kv_sizes: tuple[int, int, int]  # layers, KV heads, head size
    ops: Ops
    max_positions: int
    states: HiddenStates | None = None  # the served model's, which heads read
    heads: MedusaHeads | None = None
    has_latents: bool = False  # the KV is one vector of the head size for each token

    @property
    def grows_trees(self) -> bool:
        return isinstance(self.guesser, TreeGuesser) and self.guesser.num_guesses >= TREE_WIDTH

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of the drafter's KV for one block of the served model."""
        return self._allocate(1, block_size).block_bytes if self.kv_sizes[0] else 0

    def _allocate(self, num_blocks: int, block_size: int) -> KVStore:
        layers, kv_heads, head_dim = self.kv_sizes
        if self.has_latents:
            return self.ops.allocate_latents(layers, num_blocks, block_size, head_dim)
        return self.ops.allocate_kv(layers, num_blocks, block_size, kv_heads, head_dim)

    def scratch_bytes(self, block_size: int, max_rows: int) -> int:
        return self.block_bytes(block_size) * (SCRATCH_BLOCKS * max_rows + 1)

    def launch_all(self, block_size: int, *, verifies_trees: bool) -> None:
        """Launch every kernel that drafts need, over a cache of one block. The results are not used."""
        if self.guesser is None:
            assert self.heads is not None
            for step in DECODES:
                self.heads.draft(self._no_states(step.num_requests))
            return
        kv, guesser = self._allocate(1, block_size), self.guesser.with_distinct_layers()
        steps = [*PREFILLS, *DECODES]
        if verifies_trees and self.grows_trees:
            steps += [step for step in VERIFICATIONS if step.has_trees]
        for step in steps:
            token_ids, batch = inputs_of(step, self.ops, block_size)
            states = None if self.states is None else self.states.features(self._no_states(len(token_ids)))
            hidden = guesser.forward(token_ids, states, batch, kv)[: step.num_requests]
            guesser.argmax(hidden)
            if step.has_trees and isinstance(guesser, TreeGuesser):
                guesser.top(hidden, TREE_WIDTH)

    def _no_states(self, count: int) -> torch.Tensor:
        assert self.states is not None
        return torch.zeros(count, self.states.width, dtype=self.ops.dtype, device=self.ops.device)

    def build(
        self,
        num_blocks: int,
        rows: BatchRows,
        clock: Clock,
        vocab_size: int,
        *,
        follows_steps: bool,
        verifies_trees: bool = False,
    ) -> ModelDrafter | MedusaDrafter:
        """Take memory for the KV of this many blocks, and connect the drafter. With `follows_steps` the executor lets
        it draft after each step, on the device, and with `verifies_trees` trees too."""
        if self.guesser is None:
            assert self.heads is not None
            assert self.states is not None
            return MedusaDrafter(self.heads, self.states, rows, self.ops.device, follows_steps=follows_steps)
        num_blocks += rows.max_rows * SCRATCH_BLOCKS + 1
        try:
            kv = self._allocate(num_blocks, rows.block_size)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError
            raise ConfigError(
                f"There is no memory for the drafter's KV cache of {num_blocks:,} blocks "
                f"({format_bytes(num_blocks * self.block_bytes(rows.block_size))}).",
                hint="Lower --kv-cache-memory or --num-kv-blocks, or draft with --speculate lookup.",
            ) from error
        return ModelDrafter(
            "draft" if self.states is None else "heads",
            self.guesser,
            kv,
            rows,
            clock,
            device=self.ops.device,
            vocab_size=vocab_size,
            max_positions=self.max_positions,
            states=self.states,
            follows_steps=follows_steps,
            grows_trees=follows_steps and verifies_trees and self.grows_trees,
        )


def load_drafter(config: EngineConfig, model_path: Path, model: Model, ops: Ops) -> LoadedDrafter | None:
    """Load the model or the heads that --speculate names, or the head of a known model; None without either."""
    speculate = parse_speculate(config.speculate)
    if speculate.kind == "draft":
        return _load_model(config, model_path, Path(speculate.argument), ops)
    if speculate.kind == "heads":
        if config.parallel.num_ranks > 1:
            raise ConfigError(
                "Heads cannot draft for a model that is split over ranks.",
                hint="Use --speculate draft=MODEL or lookup.",
            )
        return _load_heads(config, model_path, Path(speculate.argument), model, ops)
    if speculate.kind != "auto" or config.parallel.num_ranks > 1:
        return None
    # Further rows of a step are nearly free in bfloat16 with AMX. Elsewhere, and on a GPU, where a small model's step
    # takes the time of the host, a known head gains nothing.
    uses_amx = ops.device.type == "cpu" and ops.dtype == torch.bfloat16 == preferred_cpu_dtype()
    head = head_of(model_path) if uses_amx and config.scheduler.max_draft_tokens else None
    if head is not None:
        return _load_heads(config, model_path, head, model, ops)
    if model.config.num_mtp_layers:
        logger.info(
            "this checkpoint has a layer for multi-token prediction: --speculate heads=mtp drafts with it"
        )
    return None


def _load_model(config: EngineConfig, model_path: Path, path: Path, ops: Ops) -> LoadedDrafter:
    settings = config.model
    if (path.is_dir() and not (path / "config.json").is_file()) or not path.exists():
        raise ConfigError(
            f"There is no draft model at {path}.", hint="Give a model's name, folder or .gguf file."
        )
    own, other = (
        open_any_checkpoint(each, trust_remote_code=settings.trust_remote_code).config.vocab_size
        for each in (model_path, path)
    )
    tokenizers = load_tokenizer(model_path), load_tokenizer(path)
    is_same = own == other if None in tokenizers else _vocabulary(tokenizers[0]) == _vocabulary(tokenizers[1])
    if not is_same:
        raise ConfigError(
            f"The draft model {path} has another vocabulary ({other:,} tokens) than the served model ({own:,}).",
            hint="Take a smaller model of the same family.",
        )
    model = load_model(
        path, ops, quantization=settings.quantization, load_format=settings.load_format, seed=settings.seed
    )
    if state_layers(model):
        raise ConfigError(
            f"The draft model {path} has layers with a fixed state, which cannot go back when a draft is rejected.",
            hint="Take a model with attention layers only.",
        )
    sizes = (model.num_layers, model.num_kv_heads, model.head_dim)
    return LoadedDrafter(
        ModelGuesser(model), sizes, ops, model.max_model_len, has_latents=isinstance(model, HasLatents)
    )


def _vocabulary(files: TokenizerFiles | None) -> dict[str, int]:
    assert files is not None
    return Tokenizer.from_str(files.tokenizer_json.decode()).get_vocab(with_added_tokens=True)


def _load_heads(config: EngineConfig, model_path: Path, path: Path, model: Model, ops: Ops) -> LoadedDrafter:
    settings = config.model
    target = staged(model)
    source = weight_source(open_checkpoint(model_path), settings.load_format, settings.seed, ops.device)
    max_positions = model.max_model_len + MAX_TOKENS
    # Rounded heads draft nearly the same, and a CPU reads a quarter of the bytes. With `--dtype float32` nothing is
    # rounded.
    is_rounded = ops.device.type == "cpu" and settings.dtype != "float32"
    quantization = "int8" if is_rounded else settings.quantization
    heads: EagleHead | MedusaHeads | MtpHead
    if str(path) == OWN_HEADS:
        is_random = settings.load_format == "random"
        heads = MtpHead(
            Target(target, source, ops), max_positions, settings.quantization, is_random=is_random
        )
    else:
        heads = load_heads(path, Target(target, source, ops), max_positions, quantization)
    if heads.taps and not isinstance(model, TappedModel):
        raise ConfigError(
            f"The head in {path} reads inner layers, which {model.config.architecture} does not show.",
            hint="Use a head of EAGLE 1 or 2, or --speculate draft=MODEL.",
        )
    width = model.config.hidden_size * max(1, len(heads.taps))
    states = HiddenStates(width, None if isinstance(heads, MedusaHeads) else heads.features, heads.taps)
    if isinstance(heads, MedusaHeads):
        return LoadedDrafter(None, (0, 0, 0), ops, max_positions, states, heads)
    sizes = (heads.num_layers, heads.num_kv_heads, heads.head_dim)
    has_latents = isinstance(heads, MtpHead) and isinstance(model, HasLatents)
    guesser = EagleGuesser(heads) if isinstance(heads, EagleHead) else HeadGuesser(heads)
    return LoadedDrafter(guesser, sizes, ops, max_positions, states, has_latents=has_latents)
