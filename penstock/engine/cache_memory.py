"""Divides memory between the KV cache, the states of layers and host memory, and allocates it."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from penstock.core.clock import Clock
from penstock.core.engine_config import EngineConfig
from penstock.core.errors import ConfigError
from penstock.core.figures import format_bytes
from penstock.core.machine import usable_memory
from penstock.core.plan import StateSlots
from penstock.engine.device import (
    CacheSizes,
    allocate_kv,
    block_copy_s,
    cache_sizes,
    kv_block_bytes,
    num_host_blocks,
    windowed_sizes,
)
from penstock.engine.drafters.loading import LoadedDrafter
from penstock.engine.one_rank import OneRank
from penstock.engine.windows import LayerLayout, lay_out
from penstock.kernels.interface import KVStore, Ops
from penstock.kernels.states import StateStore, state_bytes
from penstock.kvcache.cache import longest_context
from penstock.models.model import Model, layer_windows, state_layers
from penstock.models.pooling import PoolingSettings
from penstock.models.vision import VisionModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheMemory:
    sizes: CacheSizes
    layout: LayerLayout | None  # of a model in which layers have windows
    max_model_len: int
    kv: KVStore
    num_host_blocks: int
    states: StateStore | None
    _reserved: Future[None] | None  # of host memory

    def host_copy_s(self, ops: Ops, clock: Clock) -> float | None:
        """Measure the copy of a block to host memory, once host memory is reserved."""
        if self._reserved is None:
            return None
        try:
            self._reserved.result()
        except (MemoryError, RuntimeError) as error:
            num_bytes = self.num_host_blocks * self.kv.block_bytes
            raise ConfigError(
                f"Host memory has no room for {format_bytes(num_bytes)} of KV: {error}.",
                hint="Lower --kv-host-memory; 0 does without it.",
            ) from error
        return block_copy_s(self.kv, self.num_host_blocks, ops, clock)


def allocate_cache(
    config: EngineConfig,
    model: Model,
    ops: Ops,
    pooling: PoolingSettings,
    drafter: LoadedDrafter | None,
    vision: VisionModel | None,
    setup: OneRank,
) -> CacheMemory:
    layout = _layout(config, model, drafter, setup)
    sizes = _agreed_sizes(_cache_sizes(config, model, ops, drafter, layout, vision), setup)
    if layout is not None:
        sizes = windowed_sizes(sizes, layout, config, model)
    max_model_len = _fit_context(config, _longest(model, pooling), sizes)
    kv = _allocate_kv(config, model, ops, sizes, layout)
    host_blocks = setup.agreed(num_host_blocks(config, kv, has_states=bool(state_layers(model))))
    if layout is not None and layout.all_have_windows:  # blocks only count tokens
        host_blocks = 0
    reserved = None
    if host_blocks:  # in a thread, because that takes a while
        helper = ThreadPoolExecutor(1)
        reserved = helper.submit(kv.reserve_host, host_blocks)
        helper.shutdown(wait=False)
    states = _allocate_states(sizes.states, model, ops)
    return CacheMemory(sizes, layout, max_model_len, kv, host_blocks, states, reserved)


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


def _allocate_kv(
    config: EngineConfig, model: Model, ops: Ops, sizes: CacheSizes, layout: LayerLayout | None
) -> KVStore:
    block_size, num_blocks = config.cache.block_size, sizes.num_memory_blocks
    num_bytes = num_blocks * kv_block_bytes(config, model, ops, layout)
    try:
        if ops.device.type == "cpu" and num_bytes > usable_memory():
            raise MemoryError  # Linux would grant the allocation, and kill the process when the memory is used
        return allocate_kv(model, ops, num_blocks, block_size, layout)
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError
        raise ConfigError(
            f"There is no memory for a KV cache of {num_blocks:,} blocks of {block_size} tokens "
            f"({format_bytes(num_bytes)}).",
            hint="Lower --kv-cache-memory or --num-kv-blocks.",
        ) from error


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
