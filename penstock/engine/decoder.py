"""Loads a model that generates tokens: chooses the device, reads the weights, sizes the KV cache, connects the
executor.

All sizes are decided here, once. The error of a model that does not fit names the sizes. Knows no scheduler.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from penstock.core.clock import Clock
from penstock.core.engine_config import EngineConfig, parse_speculate
from penstock.core.errors import ConfigError
from penstock.core.figures import parse_bytes
from penstock.core.messages import ModelCard
from penstock.engine.adapters import AdapterQueue, LoRAModel
from penstock.engine.batch import BatchRows
from penstock.engine.cache_memory import CacheMemory, allocate_cache
from penstock.engine.device import choose_ops, first_gpu, leave_cores_to
from penstock.engine.drafters.combination import GrammarDrafter
from penstock.engine.drafters.interface import Drafter
from penstock.engine.drafters.loading import LoadedDrafter, load_drafter
from penstock.engine.executor import ModelExecutor
from penstock.engine.forward import ForwardPass
from penstock.engine.grammar import GrammarCompiler, GrammarQueue, build_compiler
from penstock.engine.grammar_masks import GrammarMasks
from penstock.engine.graphs import DecodeGraphs, PromptGraphs
from penstock.engine.images import ImageEncoder, ImageQueue
from penstock.engine.loaded import Loaded, Progress
from penstock.engine.one_rank import OneRank
from penstock.engine.pooling import VectorMaker
from penstock.engine.staging import Staging
from penstock.engine.transfer.sharing import share
from penstock.engine.warmup import report_compilations, warm_up
from penstock.engine.windows import WindowRows
from penstock.kernels.interface import (
    AttendsToTrees,
    CutsAtAttention,
    HalvesBlocks,
    KVStore,
    MovesTokens,
    Ops,
)
from penstock.models.decoder import Decoder as NativeDecoder
from penstock.models.generation import sampling_defaults
from penstock.models.load import (
    load_model,
    load_pooling_head,
    load_tokenizer,
    load_vision_part,
    pooling_settings,
    weights_identity,
)
from penstock.models.mmproj import mmproj_path
from penstock.models.model import HasLatents, Model, layer_windows, state_layers
from penstock.models.pooling import PoolingSettings
from penstock.models.pooling_head import Head
from penstock.models.tokenizer import numbered_tokenizer_json
from penstock.models.vision import TransformersVision, VisionModel

logger = logging.getLogger(__name__)


_MMPROJ_HINT = (
    "A GGUF model takes images with the file of its vision part: put mmproj-….gguf beside the model, or name it with "
    "--mmproj."
)


def describe(
    config: EngineConfig, model_path: Path, model: Model, ops: Ops
) -> tuple[ModelCard, GrammarCompiler | None]:
    """Describe the model, with the longest context that it allows, and build its grammar compiler."""
    card = _model_card(config, model_path, model, ops)
    return card, build_compiler(card)


def _model_card(config: EngineConfig, model_path: Path, model: Model, ops: Ops) -> ModelCard:
    architecture = model.config
    tokenizer = load_tokenizer(model_path)
    ends = tokenizer.eos_token_ids if tokenizer else architecture.eos_token_ids
    return ModelCard(
        name=config.model.served_model_name or config.model.model,
        architecture=architecture.architecture,
        vocab_size=architecture.vocab_size,
        max_model_len=model.max_model_len,
        tokenizer_json=(
            tokenizer.tokenizer_json if tokenizer else numbered_tokenizer_json(architecture.vocab_size)
        ),
        chat_template=tokenizer.chat_template if tokenizer else None,
        named_templates=tokenizer.named_templates if tokenizer else {},
        sampling_defaults=sampling_defaults(config.model, model_path),
        special_tokens=tokenizer.special_tokens if tokenizer else {},
        bos_token_id=tokenizer.bos_token_id if tokenizer else None,
        add_bos_token=tokenizer.add_bos_token if tokenizer else False,
        eos_token_ids=tuple(token_id for token_id in ends if token_id < architecture.vocab_size),
        weight_bytes=model.weight_bytes,
        num_parameters=model.num_parameters,
        dtype=str(ops.dtype).removeprefix("torch."),
        quantization=config.model.quantization,
        rounding=ops.rounding,
        device=first_gpu().describe() if ops.device.type == "cuda" else "",
        implementation=model.implementation,
        weights_id=_weights_id(config, model_path),
        images_hint=_MMPROJ_HINT if model_path.is_file() else "",
    )


def kv_facts(
    config: EngineConfig, card: ModelCard, model: Model, ops: Ops, kv: KVStore
) -> tuple[object, ...]:
    """Return the facts that the bytes of a KV block depend on, besides its tokens and its tenant."""
    formats = card.dtype, card.quantization, str(ops.kv_dtype), ops.name, kv.block_bytes
    return card.weights_id, card.architecture, card.implementation, model.max_model_len, *formats


def _weights_id(config: EngineConfig, model_path: Path) -> str:
    if config.model.load_format == "random":
        return f"random-{config.model.seed}"
    vision = mmproj_path(model_path, config.model.mmproj)
    parts = [model_path] if vision is None else [model_path, vision]
    return "-".join(weights_identity(each) for each in parts)


STAGING_BYTES = 8 << 20
GPU_TILE_TOKENS = 128  # of cuBLAS's products


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of a model that are read from files, and the drafts that steps may verify."""

    loaded: Model  # as it was read
    model: Model  # as this rank runs it
    pooling: PoolingSettings
    head: Head
    drafter: LoadedDrafter | None
    vision: TransformersVision | None
    verifies: bool
    verifies_trees: bool


def load_decoder(
    config: EngineConfig,
    model_path: Path,
    clock: Clock,
    on_progress: Progress | None,
    setup: OneRank | None = None,
) -> Loaded:
    mmproj_path(model_path, config.model.mmproj)  # a wrong name is reported before weights are read
    setup = setup or OneRank()
    whole_ops = choose_ops(config)
    ops = setup.ops(whole_ops)
    parts = _read_parts(config, model_path, whole_ops, ops, on_progress, setup)
    runs_alone = (
        ops.device.type == "cuda" and setup.is_alone
    )  # several ranks would have to run every step together
    with ThreadPoolExecutor(1) as helper:
        description = helper.submit(describe, config, model_path, parts.model, ops)
        if runs_alone:
            _warm_up(config, parts, ops, clock)
        memory = allocate_cache(config, parts.model, ops, parts.pooling, parts.drafter, parts.vision, setup)
        card, compiler = description.result()
    card = _with_parts(card, parts, memory.max_model_len)
    result = _connect(config, parts, memory, card, compiler, whole_ops, ops, clock, setup)
    if runs_alone:
        report_compilations(clock)
    return result


def _read_parts(
    config: EngineConfig,
    model_path: Path,
    whole_ops: Ops,
    ops: Ops,
    on_progress: Progress | None,
    setup: OneRank,
) -> _Parts:
    loaded = load_model(
        model_path,
        ops,
        implementation=config.model.model_implementation,
        trust_remote_code=config.model.trust_remote_code,
        quantization=config.model.quantization,
        load_format=config.model.load_format,
        seed=config.model.seed,
        max_model_len=config.model.max_model_len,
        shard=setup.shard,
        spare_rope_rows=config.scheduler.max_num_batched_tokens,
        on_progress=on_progress,
    )
    leave_cores_to(whole_ops)
    model = setup.model(loaded, ops)
    pooling = pooling_settings(model_path)
    head = load_pooling_head(
        model_path, pooling, model, whole_ops, config.model.load_format, config.model.seed
    )
    has_states = bool(state_layers(model))
    if has_states:
        _check_states(config)
    is_first = setup.shard.expert_rank == 0 and setup.shard.is_first_stage  # this rank plans, and drafts
    drafter = load_drafter(config, model_path, loaded, whole_ops) if is_first and not has_states else None
    vision = None
    # The stages of a pipeline pass tokens on.
    if setup.shard.num_stages == 1 and isinstance(loaded, NativeDecoder):
        vision = load_vision_part(
            model_path,
            whole_ops,
            load_format=config.model.load_format,
            mmproj=config.model.mmproj,
            chat_template=config.model.chat_template,
        )
    verifies = not has_states and _drafts(config)
    trees = verifies and setup.is_alone and _may_have_trees(config, loaded, whole_ops, drafter, vision)
    return _Parts(loaded, model, pooling, head, drafter, vision, verifies, trees)


def _with_parts(card: ModelCard, parts: _Parts, max_model_len: int) -> ModelCard:
    """Complete the card of a model with its context, its pooling and its vision part."""
    vision = parts.vision
    return msgspec.structs.replace(
        card,
        max_model_len=max_model_len,
        embedding_size=parts.head.size,
        pooling=parts.pooling.pooling,
        pooler=parts.pooling.card,
        generates=not parts.pooling.only_pools,
        vision=vision.card if vision is not None else None,
        chat_template=card.chat_template or (vision.chat_template if vision is not None else None),
    )


def _connect(
    config: EngineConfig,
    parts: _Parts,
    memory: CacheMemory,
    card: ModelCard,
    compiler: GrammarCompiler | None,
    whole_ops: Ops,
    ops: Ops,
    clock: Clock,
    setup: OneRank,
) -> Loaded:
    """Connect the parts of a model and its memory to an executor."""
    model, vision, drafter, limits = parts.model, parts.vision, parts.drafter, config.scheduler
    kv, sizes, layout, max_model_len = memory.kv, memory.sizes, memory.layout, memory.max_model_len
    is_cuda = ops.device.type == "cuda"
    staging = Staging(ops.device, STAGING_BYTES)
    rows = _rows(config, memory, ops, staging)
    lora = LoRAModel(
        model, whole_ops, staging, config.lora, setup.ops, setup.shapes_elsewhere(model.products)
    )
    copy_s = memory.host_copy_s(ops, clock)
    shared_kv = share(config, model, whole_ops, kv, clock, setup.shard) if config.kv_transfer else None
    written_kv = kv if shared_kv is None else shared_kv.store
    records_graphs = is_cuda and setup.records_graphs and model.records_graphs
    prompt_graphs = None
    # Shared KV watches every layer, and layers with states depend on the lengths of prompts.
    if records_graphs and isinstance(ops, CutsAtAttention) and shared_kv is None and memory.states is None:
        prompt_graphs = PromptGraphs(model, ops, kv, rows, staging, lora)
    masks = GrammarMasks(compiler.limits, clock) if compiler else None
    forced: tuple[Drafter, ...] = ()
    if masks is not None and _drafts_by_grammar(config, model, setup):
        forced = (GrammarDrafter(masks),)
    built = follower = None
    if drafter is not None:
        follows = is_cuda and setup.is_alone
        built = drafter.build(
            sizes.num_blocks,
            rows,
            clock,
            card.vocab_size,
            follows_steps=follows,
            verifies_trees=parts.verifies_trees and isinstance(kv, MovesTokens),
        )
        follower = built if follows else None
    images = None
    if vision is not None:
        images = ImageEncoder(vision, staging, parts.loaded.config, parts.loaded.max_model_len)
    max_rows, seed = sizes.max_num_seqs, config.model.seed
    sampler = setup.sampler(ops, staging, max_rows, card.vocab_size, card.eos_token_ids, seed)
    states = drafter.states if drafter is not None else None
    taps = states.taps if states is not None else ()
    forward = ForwardPass(
        model,
        written_kv,
        rows=rows,
        staging=staging,
        vocab_size=sampler.vocab_size,
        has_logits=sampler.has_logits,
        graphs=DecodeGraphs(model, kv, rows, staging, max_model_len, taps, lora) if records_graphs else None,
        prompt_graphs=prompt_graphs,
        lora=lora,
        states=states,
        images=images,
        vectors=VectorMaker(parts.head, normalizes=parts.pooling.card.normalizes),
    )
    executor = ModelExecutor(
        forward,
        written_kv,
        rows=rows,
        staging=staging,
        sampler=sampler,
        clock=clock,
        masks=masks,
        states=states,
        follower=follower,
    )
    setup.connect(executor, rows, compiler)
    return Loaded(
        executor,
        card,
        sizes.num_blocks,
        num_host_blocks=memory.num_host_blocks,
        block_copy_s=copy_s,
        tile_tokens=GPU_TILE_TOKENS if is_cuda else 1,
        # Attention that looks ahead reads the end of a context from another token than the last. Blocks that only
        # count tokens have no halves.
        halves_blocks=isinstance(kv, HalvesBlocks)
        and not (vision and vision.sees_both_ways)
        and not (layout is not None and layout.all_have_windows),
        default_steps_in_flight=2 if is_cuda else 1,
        grammars=GrammarQueue(compiler) if compiler else None,
        masks_late=setup.is_alone,  # other ranks would have to wait with their part of the sampling
        # A drafter with a model follows the positions of steps itself, and drafts while the host plans.
        starts_late=setup.is_alone and drafter is None,
        adapters=AdapterQueue(
            lora, max_waiting=limits.max_queue_requests, queue_timeout_s=limits.queue_timeout_s
        ),
        images=ImageQueue(images, max_waiting=limits.max_queue_requests) if images else None,
        image_cache_tokens=_image_cache_tokens(config, vision),
        shared_kv=shared_kv,
        forced_drafters=forced,
        drafter=built,
        states=sizes.states,
        kv=kv,
        kv_facts=kv_facts(config, card, parts.loaded, ops, kv),
        windows=sizes.windows,
        max_num_seqs=max_rows,
        gpu_memory=partial(torch.cuda.mem_get_info, ops.device) if is_cuda else None,
    )


def _rows(config: EngineConfig, memory: CacheMemory, ops: Ops, staging: Staging) -> BatchRows:
    max_rows, block_size = memory.sizes.max_num_seqs, config.cache.block_size
    windows = None
    if memory.layout is not None:
        windows = WindowRows(memory.layout, max_rows, block_size, config.scheduler.max_num_batched_tokens)
    return BatchRows(max_rows, memory.max_model_len, block_size, ops.device, staging, memory.states, windows)


def _drafts_by_grammar(config: EngineConfig, model: Model, setup: OneRank) -> bool:
    return (
        not state_layers(model)
        and setup.shard.data_size == 1  # else the masks of most requests are on other ranks
        and parse_speculate(config.speculate).kind in ("auto", "draft", "heads")
    )


def _image_cache_tokens(config: EngineConfig, vision: VisionModel | None) -> int:
    """Return how many rows of the encoder's output the configured memory holds."""
    if vision is None:
        return 0
    return parse_bytes(config.cache.image_cache_memory) // vision.bytes_per_token


def _check_states(config: EngineConfig) -> None:
    """Raise ConfigError for settings that a model with fixed states cannot have."""
    if parse_speculate(config.speculate).kind not in ("auto", "off"):
        raise ConfigError(
            f"--speculate {config.speculate} does not fit this model: its layers keep a fixed state, which cannot go "
            "back when a draft is rejected.",
            hint="Leave --speculate out.",
        )
    if config.kv_transfer:
        raise ConfigError(
            "KV transfers do not carry the fixed states of this model's layers.",
            hint="Leave --kv-transfer out.",
        )


def _drafts(config: EngineConfig) -> bool:
    return config.scheduler.max_draft_tokens > 0 and parse_speculate(config.speculate).kind != "off"


def _may_have_trees(
    config: EngineConfig, model: Model, ops: Ops, drafter: LoadedDrafter | None, vision: object | None
) -> bool:
    """Return whether steps may verify trees of drafts: attention sees the whole text in every layer, by its own
    kernels, and nothing else rearranges positions or watches the KV."""
    return (
        drafter is not None
        and drafter.grows_trees
        and isinstance(ops, AttendsToTrees)
        and isinstance(model, NativeDecoder)
        and not isinstance(model, HasLatents)
        and not any(layer_windows(model))
        and vision is None
        and not config.kv_transfer
    )


def _warm_up(config: EngineConfig, parts: _Parts, ops: Ops, clock: Clock) -> None:
    """Compile kernels in parallel, before the measurement of memory, which would compile them one after the other."""
    started_s = clock.now()
    limits, block_size, drafter = config.scheduler, config.cache.block_size, parts.drafter

    def launch_drafter() -> None:
        if drafter is not None:
            drafter.launch_all(block_size, verifies_trees=parts.verifies_trees)

    warm_up(
        parts.model,
        ops,
        block_size=block_size,
        max_rows=limits.max_num_seqs,
        max_tokens=limits.max_num_batched_tokens,
        verifies=parts.verifies,
        verifies_trees=parts.verifies_trees,
        launch_drafter=launch_drafter,
    )
    torch.cuda.empty_cache()
    logger.info("kernels are ready after %.1f s", clock.now() - started_s)
