"""Decides how many KV blocks there are: a size that was asked for, or what a GPU has left after a measured peak."""

from __future__ import annotations

import os

import torch

from penstock.core.clock import Clock
from penstock.core.engine_config import EngineConfig
from penstock.core.errors import ConfigError
from penstock.core.figures import format_bytes, parse_bytes
from penstock.kernels.interface import AttentionBatch, KVStore, Ops
from penstock.kernels.tensor_kv import kv_head_bytes
from penstock.models.model import Model

DEFAULT_CPU_KV_MEMORY = "512MiB"
# Left for CUDA graphs, the sampler's scratch and the allocator's fragments.
GPU_MARGIN_BYTES = 1 << 30
CUDA_CONTEXT_BYTES = 1 << 29  # what a process takes of a GPU before it allocates anything
MAX_DEFAULT_HOST_MEMORY = 4 << 30
_TIMED_COPIES = 8


def physical_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def kv_block_bytes(config: EngineConfig, model: Model, ops: Ops) -> int:
    bytes_per_token = 2 * model.num_layers * model.num_kv_heads * kv_head_bytes(model.head_dim, ops.kv_dtype)
    return bytes_per_token * config.cache.block_size


def num_kv_blocks(config: EngineConfig, model: Model, ops: Ops) -> int:
    if config.cache.num_kv_blocks is not None:
        return config.cache.num_kv_blocks
    bytes_per_block = kv_block_bytes(config, model, ops)
    if config.cache.kv_cache_memory is not None:
        memory = parse_bytes(config.cache.kv_cache_memory)
    elif ops.device.type == "cuda":
        memory = _gpu_memory_left(config, model, ops)
    else:
        memory = parse_bytes(DEFAULT_CPU_KV_MEMORY)
    blocks = memory // bytes_per_block
    if blocks < 2:
        raise ConfigError(
            f"The KV cache would get {format_bytes(max(memory, 0))}, "
            f"which does not hold two blocks of {format_bytes(bytes_per_block)}.",
            hint="Raise --kv-cache-memory or --gpu-memory-utilization, or take a smaller model.",
        )
    return blocks


def num_host_blocks(config: EngineConfig, kv: KVStore) -> int:
    """Slots of host memory for pinned blocks that the KV cache has no room for."""
    if not config.cache.enable_prefix_caching:
        return 0
    if config.cache.kv_host_memory is not None:
        return parse_bytes(config.cache.kv_host_memory) // kv.block_bytes
    return min(kv.num_blocks, MAX_DEFAULT_HOST_MEMORY // kv.block_bytes)


def block_copy_s(kv: KVStore, ops: Ops, clock: Clock) -> float:
    """How long a block takes to host memory, or back, measured. There must be a slot for it."""

    def finish() -> None:
        if ops.device.type == "cuda":
            torch.cuda.synchronize(ops.device)

    def there_and_back(times: int) -> float:
        finish()
        started_s = clock.now()
        for _ in range(times):
            kv.copy_to_host(0, 0)
            kv.copy_from_host(0, 0)
        finish()
        return clock.now() - started_s

    there_and_back(1)  # touches the memory for the first time
    return there_and_back(_TIMED_COPIES) / (2 * _TIMED_COPIES)


def _gpu_memory_left(config: EngineConfig, model: Model, ops: Ops) -> int:
    """What --gpu-memory-utilization allows this process, less what it has taken and the measured peak of the largest
    step. Other processes on the GPU have shares of their own; what they have taken is not there to be had, though."""
    free, total = torch.cuda.mem_get_info(ops.device)
    peak = _peak_step_bytes(config, model, ops)
    allowed = int(total * config.cache.gpu_memory_utilization)
    own = min(total - free, torch.cuda.memory_reserved(ops.device) + CUDA_CONTEXT_BYTES)
    return min(allowed - own, free) - peak - GPU_MARGIN_BYTES


def _peak_step_bytes(config: EngineConfig, model: Model, ops: Ops) -> int:
    """Run one step of --max-num-batched-tokens over a cache of a few blocks, and see what it took."""
    block_size = config.cache.block_size
    count = min(config.scheduler.max_num_batched_tokens, model.max_model_len)
    samples = min(config.scheduler.max_num_seqs, count)
    kv = ops.allocate_kv(model.num_layers, 2, block_size, model.num_kv_heads, model.head_dim)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=ops.device)

    positions = torch.arange(count, dtype=torch.int32, device=ops.device)
    batch = AttentionBatch(
        positions=positions,
        slots=positions % (2 * block_size),
        query_starts=torch.tensor([0, count], dtype=torch.int32, device=ops.device),
        context_lens=torch.tensor([count], dtype=torch.int32, device=ops.device),
        block_tables=zeros(1, -(-count // block_size)),
        num_requests=1,
        max_query_len=count,
        max_context_len=count,
    )
    torch.cuda.reset_peak_memory_stats(ops.device)
    before = torch.cuda.memory_allocated(ops.device)
    with torch.inference_mode():
        hidden = model.forward(zeros(count), batch, kv)
        model.logits(hidden[:samples])
    peak = torch.cuda.max_memory_allocated(ops.device) - before
    del kv, hidden
    torch.cuda.empty_cache()
    return peak
