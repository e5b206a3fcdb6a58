"""Loads a model that generates tokens: chooses the device, reads the weights, sizes the KV cache, connects the
executor.

All sizes are decided here, once. The error of a model that does not fit names the sizes. Knows no scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock.core.clock import Clock
from penstock.core.engine_config import EngineConfig, parse_speculate
from penstock.core.errors import ConfigError
from penstock.core.figures import format_bytes, parse_bytes
from penstock.core.messages import ModelCard
from penstock.core.plan import StateSlots
from penstock.engine.adapters import AdapterQueue, LoRAModel
from penstock.engine.batch import BatchRows, Staging
from penstock.engine.device import (
    CacheSizes,
    allocate_kv,
    block_copy_s,
    cache_sizes,
    choose_ops,
    first_gpu,
    kv_block_bytes,
    leave_cores_to,
    num_host_blocks,
    physical_memory_bytes,
    windowed_sizes,
)
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
from penstock.engine.pooling import VectorMaker
from penstock.engine.sampler import Sampler
from penstock.engine.transfer.sharing import share
from penstock.engine.warmup import warm_up
from penstock.engine.windows import LayerLayout, WindowRows, lay_out
from penstock.kernels.interface import CutsAtAttention, HalvesBlocks, KVStore, Ops
from penstock.kernels.states import StateStore, state_bytes
from penstock.kvcache.cache import longest_context
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
from penstock.models.lora import Shapes
from penstock.models.model import Model, layer_windows, state_layers
from penstock.models.pooling import PoolingSettings
from penstock.models.sharding import WHOLE, Shard
from penstock.models.tokenizer import numbered_tokenizer_json
from penstock.models.vision import VisionModel
from penstock.models.weights import NamedProduct

logger = logging.getLogger(__name__)

STAGING_BYTES = 8 << 20
GPU_TILE_TOKENS = 128  # of cuBLAS's products


@dataclass(frozen=True, slots=True)
class _Memory:
    kv: KVStore
    num_host_blocks: int
    reserved: Future[None] | None  # of host memory


class OneRank:
    """The setup of an engine that runs in one process: the whole model, and no other rank."""

    shard: Shard = WHOLE
    is_alone = True
    records_graphs = True

    def ops(self, ops: Ops) -> Ops:
        return ops

    def model(self, model: Model, ops: Ops) -> Model:
        return model

    def agreed(self, number: int) -> int:
        """Return the smallest of the ranks' numbers."""
        return number

    def shapes_elsewhere(self, products: Sequence[NamedProduct]) -> Shapes:
        """Return the shapes of the matrices of other stages that adapters may change. `products` are those of this
        stage."""
        return {}

    def sampler(self, *settings: Any) -> Sampler:
        return Sampler(*settings)

    def connect(self, executor: ModelExecutor, rows: BatchRows, compiler: GrammarCompiler | None) -> None:
        """Take the executor, for plans that come from another rank."""


def load_decoder(
    config: EngineConfig,
    model_path: Path,
    clock: Clock,
    on_progress: Progress | None,
    setup: OneRank | None = None,
) -> Loaded:
    setup = setup or OneRank()
    whole_ops = choose_ops(config)
    ops = setup.ops(whole_ops)
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
    is_cuda = ops.device.type == "cuda"
    has_states = bool(state_layers(model))
    if has_states:
        _check_states(config)
    is_first = setup.shard.tensor_rank == 0 and setup.shard.is_first_stage  # this rank plans, and drafts
    drafter = load_drafter(config, model_path, loaded, whole_ops) if is_first and not has_states else None
    vision = None
    if setup.shard.num_stages == 1 and isinstance(
        loaded, NativeDecoder
    ):  # the stages of a pipeline pass tokens on
        vision = load_vision_part(model_path, whole_ops, load_format=config.model.load_format)
    with ThreadPoolExecutor(1) as helper:
        description = helper.submit(_describe, config, model_path, model, ops)
        if is_cuda and setup.is_alone:  # ranks would have to run every step together
            _warm_up(config, model, ops, clock)
        layout = _layout(config, model, drafter, setup)
        sizes = _agreed_sizes(_cache_sizes(config, model, ops, drafter, layout, vision), setup)
        if layout is not None:
            sizes = windowed_sizes(sizes, layout, config, model)
        num_blocks = sizes.num_blocks
        max_model_len = _fit_context(config, _longest(model, pooling), sizes)
        memory = _allocate(config, model, ops, sizes, setup, layout)
        card, compiler = description.result()
    kv = memory.kv
    card = msgspec.structs.replace(
        card,
        max_model_len=max_model_len,
        embedding_size=head.size,
        pooling=pooling.pooling,
        pooler=pooling.card,
        generates=not pooling.only_pools,
        vision=vision.card if vision is not None else None,
    )
    max_rows = sizes.max_num_seqs
    staging = Staging(ops.device, STAGING_BYTES)
    states = _allocate_states(sizes.states, model, ops)
    windows = None
    if layout is not None:
        step_tokens = config.scheduler.max_num_batched_tokens
        windows = WindowRows(layout, max_rows, config.cache.block_size, step_tokens)
    rows = BatchRows(max_rows, max_model_len, config.cache.block_size, ops.device, staging, states, windows)
    lora = LoRAModel(
        model, whole_ops, staging, config.lora, setup.ops, setup.shapes_elsewhere(model.products)
    )
    limits = config.scheduler
    adapters = AdapterQueue(
        lora, max_waiting=limits.max_queue_requests, queue_timeout_s=limits.queue_timeout_s
    )
    copy_s = _host_copy_s(memory, ops, clock)
    shared_kv = share(config, model, ops, kv, clock) if config.kv_transfer else None
    records_graphs = is_cuda and setup.records_graphs and model.records_graphs
    prompt_graphs = None
    if (
        records_graphs and isinstance(ops, CutsAtAttention) and shared_kv is None and states is None
    ):  # shared KV watches every layer, and layers with states depend on the lengths of prompts
        prompt_graphs = PromptGraphs(model, ops, kv, rows, staging, lora)
    masks = GrammarMasks(compiler.limits, clock) if compiler else None
    drafters: list[Drafter] = []
    if (
        masks is not None
        and not has_states
        and parse_speculate(config.speculate).kind in ("auto", "draft", "heads")
    ):
        drafters.append(GrammarDrafter(masks))
    follower, taps = None, drafter.states.taps if drafter is not None and drafter.states is not None else ()
    if drafter is not None:
        follows = is_cuda and setup.is_alone
        built = drafter.build(num_blocks, rows, clock, card.vocab_size, follows_steps=follows)
        drafters.append(built)
        follower = built if follows else None
    images = (
        ImageEncoder(vision, staging, loaded.config, loaded.max_model_len) if vision is not None else None
    )
    sampler = setup.sampler(ops, staging, max_rows, card.vocab_size, card.eos_token_ids, config.model.seed)
    written_kv = kv if shared_kv is None else shared_kv.store
    head_states = drafter.states if drafter else None
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
        states=head_states,
        images=images,
        vectors=VectorMaker(head, normalizes=pooling.card.normalizes),
    )
    executor = ModelExecutor(
        forward,
        written_kv,
        rows=rows,
        staging=staging,
        sampler=sampler,
        clock=clock,
        masks=masks,
        states=head_states,
        follower=follower,
    )
    setup.connect(executor, rows, compiler)
    return Loaded(
        executor,
        card,
        num_blocks,
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
        adapters=adapters,
        images=ImageQueue(images, max_waiting=config.scheduler.max_queue_requests) if images else None,
        image_cache_tokens=_image_cache_tokens(config, vision),
        shared_kv=shared_kv,
        drafters=tuple(drafters),
        states=sizes.states,
        kv=kv,
        kv_facts=_kv_facts(config, card, loaded, ops, kv),
        windows=sizes.windows,
        max_num_seqs=max_rows,
        gpu_memory=partial(torch.cuda.mem_get_info, ops.device) if is_cuda else None,
    )


def _image_cache_tokens(config: EngineConfig, vision: VisionModel | None) -> int:
    """Return how many rows of the encoder's output the configured memory holds."""
    if vision is None:
        return 0
    return parse_bytes(config.cache.image_cache_memory) // vision.bytes_per_token


def _layout(
    config: EngineConfig, model: Model, drafter: LoadedDrafter | None, setup: OneRank
) -> LayerLayout | None:
    """Return how layers with windows share memory with others; None for models without, and where all layers keep
    everything: transfers move whole blocks of all layers, and stages of a pipeline have different layers."""
    layout = lay_out(layer_windows(model), model.max_model_len, config.cache.block_size)
    if layout is None:
        return None
    reason = ""
    if config.kv_transfer:
        reason = "with --kv-transfer"
    elif setup.shard.num_stages > 1:
        reason = "in a pipeline"
    elif layout.all_have_windows and drafter is not None and drafter.block_bytes(config.cache.block_size):
        reason = "beside a drafter with keys and values of its own"
    if reason:
        logger.info("layers with a window keep the KV of whole contexts %s", reason)
        return None
    return layout


def _cache_sizes(
    config: EngineConfig,
    model: Model,
    ops: Ops,
    drafter: LoadedDrafter | None,
    layout: LayerLayout | None,
    vision: VisionModel | None,
) -> CacheSizes:
    size, max_rows = config.cache.block_size, config.scheduler.max_num_seqs
    drafts = (0, 0) if drafter is None else (drafter.block_bytes(size), drafter.scratch_bytes(size, max_rows))
    return cache_sizes(config, model, ops, *drafts, layout, vision)


def _agreed_sizes(sizes: CacheSizes, setup: OneRank) -> CacheSizes:
    """Return the smallest sizes of all ranks."""
    num_blocks, states = setup.agreed(sizes.num_blocks), sizes.states
    if states is None:
        return CacheSizes(num_blocks, sizes.max_num_seqs)
    states = StateSlots(setup.agreed(states.num_slots), setup.agreed(states.num_host_slots))
    return CacheSizes(num_blocks, setup.agreed(sizes.max_num_seqs), states)


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


def _allocate_states(slots: StateSlots | None, model: Model, ops: Ops) -> StateStore | None:
    if slots is None:
        return None
    layers = state_layers(model)
    try:
        states = StateStore(layers, slots.num_slots, ops.device)
        if slots.num_host_slots:
            states.reserve_host(slots.num_host_slots)
    except (MemoryError, RuntimeError) as error:
        raise ConfigError(
            f"There is no memory for {slots.num_slots:,} states of {format_bytes(state_bytes(layers))}.",
            hint="Lower --max-num-seqs or --kv-cache-memory.",
        ) from error
    return states


def _warm_up(config: EngineConfig, model: Model, ops: Ops, clock: Clock) -> None:
    """Compile kernels in parallel, before the measurement of memory, which would compile them one after the other."""
    started_s = clock.now()
    limits = config.scheduler
    warm_up(
        model,
        ops,
        block_size=config.cache.block_size,
        max_rows=limits.max_num_seqs,
        max_tokens=limits.max_num_batched_tokens,
    )
    torch.cuda.empty_cache()
    logger.info("kernels are ready after %.1f s", clock.now() - started_s)


def _allocate(
    config: EngineConfig,
    model: Model,
    ops: Ops,
    sizes: CacheSizes,
    setup: OneRank,
    layout: LayerLayout | None,
) -> _Memory:
    """Allocate the KV cache, and reserve host memory in a thread, because that takes a while."""
    block_size, num_blocks = config.cache.block_size, sizes.num_memory_blocks
    num_bytes = num_blocks * kv_block_bytes(config, model, ops, layout)
    try:
        if ops.device.type == "cpu" and num_bytes > physical_memory_bytes():
            raise MemoryError  # Linux would promise the memory, and kill the process when it is used
        kv = allocate_kv(model, ops, num_blocks, block_size, layout)
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError
        raise ConfigError(
            f"There is no memory for a KV cache of {num_blocks:,} blocks of {block_size} tokens "
            f"({format_bytes(num_bytes)}).",
            hint="Lower --kv-cache-memory or --num-kv-blocks.",
        ) from error
    host_blocks = setup.agreed(num_host_blocks(config, kv, has_states=bool(state_layers(model))))
    if layout is not None and layout.all_have_windows:  # blocks only count tokens
        host_blocks = 0
    reserved = None
    if host_blocks:
        helper = ThreadPoolExecutor(1)
        reserved = helper.submit(kv.reserve_host, host_blocks)
        helper.shutdown(wait=False)
    return _Memory(kv, host_blocks, reserved)


def _host_copy_s(memory: _Memory, ops: Ops, clock: Clock) -> float | None:
    """Measure the copy of a block to host memory, once host memory is reserved."""
    if memory.reserved is None:
        return None
    try:
        memory.reserved.result()
    except (MemoryError, RuntimeError) as error:
        num_bytes = memory.num_host_blocks * memory.kv.block_bytes
        raise ConfigError(
            f"Host memory has no room for {format_bytes(num_bytes)} of KV: {error}.",
            hint="Lower --kv-host-memory; 0 does without it.",
        ) from error
    return block_copy_s(memory.kv, ops, clock)


def _describe(
    config: EngineConfig, model_path: Path, model: Model, ops: Ops
) -> tuple[ModelCard, GrammarCompiler | None]:
    """Describe the model, with the longest context that it allows, and build its grammar compiler."""
    card = _card(config, model_path, model, ops)
    return card, build_compiler(card)


def _card(config: EngineConfig, model_path: Path, model: Model, ops: Ops) -> ModelCard:
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
    )


def _kv_facts(
    config: EngineConfig, card: ModelCard, model: Model, ops: Ops, kv: KVStore
) -> tuple[object, ...]:
    """Return what the bytes of a KV block depend on, beside its tokens and its tenant."""
    formats = card.dtype, card.quantization, str(ops.kv_dtype), ops.name, kv.block_bytes
    return card.weights_id, card.architecture, card.implementation, model.max_model_len, *formats


def _weights_id(config: EngineConfig, model_path: Path) -> str:
    if config.model.load_format == "random":
        return f"random-{config.model.seed}"
    return weights_identity(model_path)


def _longest(model: Model, pooling: PoolingSettings) -> int:
    """Return the longest context; of a model that makes vectors, what its files allow, and room for one token."""
    if not pooling.only_pools or pooling.max_text_len is None:
        return model.max_model_len
    return min(model.max_model_len, pooling.max_text_len + 1)


def _fit_context(config: EngineConfig, model_max_len: int, sizes: CacheSizes) -> int:
    """Return the longest context that both the model and the KV cache allow."""
    capacity = longest_context(sizes.num_blocks, config.cache.block_size, sizes.windows)
    asked = config.model.max_model_len
    if asked is not None and asked > capacity:
        raise ConfigError(
            f"--max-model-len {asked} needs more KV cache than there is: it holds {capacity} tokens.",
            hint="Raise --kv-cache-memory or lower --max-model-len.",
        )
    if capacity < model_max_len:
        logger.info(
            "context limited to %d of %d tokens by the KV cache (--kv-cache-memory)", capacity, model_max_len
        )
    return min(model_max_len, capacity)
