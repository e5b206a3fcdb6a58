"""Chooses the device and the number format that a model runs in, and decides how many KV blocks fit into memory."""

from __future__ import annotations

import importlib.util
import logging
import os

import torch

from penstock.core.clock import Clock
from penstock.core.engine_config import EngineConfig
from penstock.core.errors import ConfigError
from penstock.core.figures import format_bytes, parse_bytes
from penstock.core.installation import install_command
from penstock.kernels.interface import AttentionBatch, KVStore, Ops
from penstock.kernels.native import NativeOps
from penstock.kernels.reference import TorchOps
from penstock.kernels.select import preferred_cpu_dtype, select_ops, set_num_threads
from penstock.models.model import Model

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_ops(config: EngineConfig) -> Ops:
    device = choose_device(config.model.device)
    if device.type == "cpu":
        set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    backend = config.model.attention_backend
    if backend == "flashinfer" and device.type != "cuda":
        raise ConfigError("--attention-backend flashinfer needs a CUDA device.", hint="Leave it out.")
    if backend == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        raise ConfigError(
            "--attention-backend flashinfer needs FlashInfer.", hint=f"Run: {install_command('flashinfer')}"
        )
    dtype = _choose_dtype(config.model.dtype, device)
    ops = select_ops(
        device,
        dtype,
        _kv_dtype(config.cache.kv_cache_dtype, device),
        # An explicit --dtype is never overridden.
        integer_products=config.model.dtype == "auto",
        attention_backend=backend,
    )
    if isinstance(ops, TorchOps) and device.type == "cpu" and dtype == torch.float16:
        logger.warning(
            "float16 has no fast kernels on a CPU, so this model runs on plain torch, which is slow: use --dtype "
            "bfloat16 or --dtype float32"
        )
    elif isinstance(ops, TorchOps):
        logger.warning(
            "running on plain torch, which is slow: `penstock doctor` says which kernels are missing"
        )
    return ops


def leave_cores_to(ops: Ops) -> None:
    """Give torch a single thread, once the model is loaded. Torch does too little in a step to share it, and its
    threads would spin for milliseconds afterwards, on the cores that the threads of the CPU kernels need."""
    if isinstance(ops, NativeOps):
        torch.set_num_threads(1)


def choose_device(asked: str) -> torch.device:
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda was asked for, but torch finds no CUDA device.", hint="Try --device auto."
        )
    return torch.device(asked)


def _kv_dtype(asked: str, device: torch.device) -> torch.dtype | None:
    """Return the number format of the KV cache; None for the format of the model."""
    if asked == "auto":
        return None
    if asked == "int8":
        return torch.int8
    if device.type != "cuda":
        raise ConfigError(
            "A KV cache in fp8 needs a CUDA device.",
            hint="Leave --kv-cache-dtype out to keep it in the compute type.",
        )
    return torch.float8_e4m3fn


def _choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    if asked != "auto":
        return _DTYPES[asked]
    return torch.bfloat16 if device.type == "cuda" else preferred_cpu_dtype()


DEFAULT_CPU_KV_MEMORY = "512MiB"
# Left for CUDA graphs, the sampler's scratch and the allocator's fragments.
GPU_MARGIN_BYTES = 1 << 30
CUDA_CONTEXT_BYTES = 1 << 29  # of a GPU, for a process that has allocated nothing
MAX_DEFAULT_HOST_MEMORY = 4 << 30
_TIMED_COPIES = 8


def physical_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def kv_block_bytes(config: EngineConfig, model: Model, ops: Ops) -> int:
    """Return the size of one block in the backend's layout: some backends pad small heads."""
    size = config.cache.block_size
    return ops.allocate_kv(model.num_layers, 1, size, model.num_kv_heads, model.head_dim).block_bytes


def num_kv_blocks(
    config: EngineConfig, model: Model, ops: Ops, drafter_block_bytes: int = 0, drafter_bytes: int = 0
) -> int:
    """Return the number of blocks that there is memory for. A drafter needs bytes beside each block, and bytes of its
    own."""
    if config.cache.num_kv_blocks is not None:
        return config.cache.num_kv_blocks
    bytes_per_block = kv_block_bytes(config, model, ops) + drafter_block_bytes
    if config.cache.kv_cache_memory is not None:
        memory = parse_bytes(config.cache.kv_cache_memory)
    elif ops.device.type == "cuda":
        memory = _gpu_memory_left(config, model, ops)
    else:
        memory = parse_bytes(DEFAULT_CPU_KV_MEMORY)
    memory -= drafter_bytes
    blocks = memory // bytes_per_block
    if blocks < 2:
        raise ConfigError(
            f"The KV cache would get {format_bytes(max(memory, 0))}, "
            f"which does not hold two blocks of {format_bytes(bytes_per_block)}.",
            hint="Raise --kv-cache-memory or --gpu-memory-utilization, or take a smaller model.",
        )
    return blocks


def num_host_blocks(config: EngineConfig, kv: KVStore) -> int:
    """Return the number of slots of host memory, for pinned blocks without room in the KV cache."""
    if not config.cache.enable_prefix_caching:
        return 0
    if config.cache.kv_host_memory is not None:
        return parse_bytes(config.cache.kv_host_memory) // kv.block_bytes
    return min(kv.num_blocks, MAX_DEFAULT_HOST_MEMORY // kv.block_bytes)


def block_copy_s(kv: KVStore, ops: Ops, clock: Clock) -> float:
    """Measure the seconds that copying a block to host memory, or back, takes. There must be a slot."""

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
    """Return the memory that --gpu-memory-utilization allows this process, less its present memory and the measured
    peak of the largest step. Other processes have shares of their own, but the memory that they have taken is
    gone."""
    free, total = torch.cuda.mem_get_info(ops.device)
    peak = _peak_step_bytes(config, model, ops)
    allowed = int(total * config.cache.gpu_memory_utilization)
    own = min(total - free, torch.cuda.memory_reserved(ops.device) + CUDA_CONTEXT_BYTES)
    return min(allowed - own, free) - peak - GPU_MARGIN_BYTES


def _peak_step_bytes(config: EngineConfig, model: Model, ops: Ops) -> int:
    """Measure the memory of one step of --max-num-batched-tokens over a cache of a few blocks."""
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
