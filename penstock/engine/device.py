"""Chooses the device and the dtype that a model runs in, and decides how many KV blocks fit into memory."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass, replace

import msgspec
import torch

from penstock.core.clock import Clock
from penstock.core.engine_config import EngineConfig
from penstock.core.errors import ConfigError
from penstock.core.figures import format_bytes, parse_bytes
from penstock.core.machine import default_cpu_kv_bytes, install_command, usable_cores
from penstock.core.plan import StateSlots, WindowLayout
from penstock.engine.startup import load_compiler
from penstock.engine.windows import LayerLayout, laid_out
from penstock.kernels.gpus import Gpu
from penstock.kernels.interface import AttentionBatch, KVStore, Ops
from penstock.kernels.native import NativeOps
from penstock.kernels.reference import TorchOps
from penstock.kernels.select import preferred_cpu_dtype, select_ops, set_num_threads
from penstock.kernels.states import NoKV, StateBatch, StateStore, state_bytes
from penstock.kernels.tensor_kv import buffer_bytes
from penstock.models.model import HasLatents, Model, num_kv_layers, state_layers
from penstock.models.vision import VisionModel

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_ops(config: EngineConfig) -> Ops:
    device = choose_device(config.model.device)
    if device.type == "cpu":
        set_num_threads(config.num_threads or usable_cores())
    backend = config.model.attention_backend
    if backend == "flashinfer" and device.type != "cuda":
        raise ConfigError("--attention-backend flashinfer needs a CUDA device.", hint="Leave it out.")
    if backend == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        raise ConfigError(
            "--attention-backend flashinfer needs FlashInfer.", hint=f"Run: {install_command('flashinfer')}"
        )
    dtype = _choose_dtype(config.model.dtype, device)
    if device.type == "cuda":
        load_compiler()
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
    """Give torch a single thread, once the model is loaded. Torch's work in a step is too small for several threads,
    and idle torch threads would spin for milliseconds on the cores of the CPU kernels."""
    if isinstance(ops, NativeOps):
        torch.set_num_threads(1)


def choose_device(asked: str) -> torch.device:
    """Return the device to compute on. `auto` is the GPU, if there is one that kernels exist for, else the CPU."""
    if asked == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        gpu = first_gpu()
        if gpu.is_too_old:
            logger.warning("%s; this model runs on the CPU", gpu.describe())
        return torch.device("cpu" if gpu.is_too_old else "cuda")
    if asked == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                "--device cuda was asked for, but torch finds no CUDA device.", hint="Try --device auto."
            )
        gpu = first_gpu()
        if gpu.is_too_old:
            raise ConfigError(f"{gpu.describe()}.", hint="Leave --device out to run on the CPU.")
    return torch.device(asked)


def first_gpu() -> Gpu:
    """Return the GPU that this process uses."""
    return gpus()[torch.cuda.current_device()]


def gpus() -> list[Gpu]:
    """Return the GPUs that this process may use."""
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [Gpu(each.name, (each.major, each.minor), each.total_memory) for each in found]


def _kv_dtype(asked: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype of the KV cache; None for the format of the model."""
    if asked == "auto":
        return None
    if asked == "int8":
        return torch.int8
    if device.type != "cuda":
        raise ConfigError(
            "A KV cache in fp8 needs a CUDA device.",
            hint="Leave --kv-cache-dtype out to keep it in the compute type.",
        )
    if not first_gpu().has_float8:
        raise ConfigError(
            f"A KV cache in fp8 needs compute capability 8.9 or newer. {first_gpu().describe()}.",
            hint="--kv-cache-dtype int8 takes as little memory.",
        )
    return torch.float8_e4m3fn


def _choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    if asked != "auto":
        return _DTYPES[asked]
    return torch.bfloat16 if device.type == "cuda" else preferred_cpu_dtype()


# Reserved for CUDA graphs, the sampler's scratch memory and fragmentation.
GPU_MARGIN_BYTES = 1 << 30
CUDA_CONTEXT_BYTES = 1 << 29  # of a GPU, for a process that has allocated nothing
MAX_DEFAULT_HOST_MEMORY = 4 << 30
MOST_EMPTY_BLOCKS = 1 << 16  # of a model without attention
_TIMED_COPIES, _BLOCKS_AT_ONCE = 4, 16


def kv_block_bytes(config: EngineConfig, model: Model, ops: Ops, layout: LayerLayout | None = None) -> int:
    """Return the size of one block in the backend's layout: some backends pad small heads."""
    return allocate_kv(model, ops, 1, config.cache.block_size, layout).block_bytes


def allocate_kv(
    model: Model, ops: Ops, num_blocks: int, block_size: int, layout: LayerLayout | None = None
) -> KVStore:
    """Allocate keys and values. `layout`: layers with windows share blocks with others."""
    num_layers = num_kv_layers(model) if layout is None else layout.num_layers
    if not num_layers:
        return NoKV(num_blocks, block_size)
    if isinstance(model, HasLatents):
        return ops.allocate_latents(num_layers, num_blocks, block_size, model.latent_width)
    store = ops.allocate_kv(num_layers, num_blocks, block_size, model.num_kv_heads, model.head_dim)
    return laid_out(store, layout)


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """The memory of requests: blocks of keys and values, slots of states, and how many requests can run."""

    num_blocks: int
    max_num_seqs: int
    states: StateSlots | None = None
    windows: WindowLayout | None = None

    @property
    def num_memory_blocks(self) -> int:
        """Return the number of blocks with memory. Without layers with full attention, blocks only count tokens."""
        has_own = self.windows is not None and self.windows.num_blocks is not None
        return self.windows.num_blocks if has_own else self.num_blocks  # type: ignore[union-attr, return-value]


def windowed_sizes(sizes: CacheSizes, layout: LayerLayout, config: EngineConfig, model: Model) -> CacheSizes:
    """Return the sizes for a model whose layers have windows, given sizes that count blocks of memory."""
    windows = WindowLayout(layout.groups, config.scheduler.max_num_batched_tokens)
    if not layout.all_have_windows:
        return replace(sizes, windows=windows)
    windows = msgspec.structs.replace(windows, num_blocks=sizes.num_blocks)
    return replace(sizes, num_blocks=_num_blocks(config, model, 0, 0), windows=windows)


def cache_sizes(
    config: EngineConfig,
    model: Model,
    ops: Ops,
    drafter_block_bytes: int = 0,
    drafter_bytes: int = 0,
    layout: LayerLayout | None = None,
    vision: VisionModel | None = None,
) -> CacheSizes:
    """Return the sizes that there is memory for, in blocks of memory. A drafter needs bytes beside each block, and
    bytes of its own. `vision` encodes images on the same device."""
    limit, max_num_seqs = config.cache.num_kv_blocks, config.scheduler.max_num_seqs
    layers = state_layers(model)
    memory = None if limit is not None else _cache_memory(config, model, ops, vision) - drafter_bytes
    states = None
    if layers:
        states, max_num_seqs = _state_slots(config, state_bytes(layers), memory, num_kv_layers(model) > 0)
        if memory is not None:
            memory -= (states.num_slots + 1) * state_bytes(layers)
    if limit is not None or memory is None:
        return CacheSizes(limit or 0, max_num_seqs, states)
    bytes_per_block = kv_block_bytes(config, model, ops, layout) + drafter_block_bytes
    return CacheSizes(_num_blocks(config, model, memory, bytes_per_block), max_num_seqs, states)


def _cache_memory(config: EngineConfig, model: Model, ops: Ops, vision: VisionModel | None) -> int:
    if config.cache.kv_cache_memory is not None:
        return parse_bytes(config.cache.kv_cache_memory)
    if ops.device.type != "cuda":
        return default_cpu_kv_bytes()
    left = _gpu_memory_left(config, model, ops)
    if vision is None:
        return left
    # A step may encode an image before it computes tokens, and encoded images stay.
    return (
        left - _peak_image_bytes(vision, model.max_model_len) - parse_bytes(config.cache.image_cache_memory)
    )


def _peak_image_bytes(vision: VisionModel, max_tokens: int) -> int:
    """Measure the GPU memory that the largest image takes while it is encoded."""
    pixels = vision.largest(max_tokens)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    vision.encode(pixels, 0, min(vision.tiles_at_once, pixels.num_tiles))
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    return peak


def _state_slots(
    config: EngineConfig, slot_bytes: int, memory: int | None, has_attention: bool
) -> tuple[StateSlots, int]:
    """Return the slots for states of requests and snapshots, and how many requests can run. Models with attention
    leave half of the memory to keys and values."""
    asked = config.scheduler.max_num_seqs
    wanted = 2 * asked if config.cache.enable_prefix_caching else asked
    num_slots = wanted
    if memory is not None:
        share = memory // 2 if has_attention else memory
        num_slots = min(wanted, share // slot_bytes - 1)  # one more is for the padded rows of graphs
        if num_slots < 2:
            raise ConfigError(
                f"The layers with a fixed state take {format_bytes(slot_bytes)} for each request, and "
                f"{format_bytes(max(memory, 0))} of memory for requests do not hold two of them"
                + (" beside keys and values." if has_attention else "."),
                hint="Raise --kv-cache-memory or --gpu-memory-utilization, or take a smaller model.",
            )
    # A quarter of the slots is for snapshots where not all requests fit.
    num_running = asked if num_slots == wanted else min(asked, max(1, num_slots * 3 // 4))
    if num_running < asked:
        logger.warning(
            "at most %d requests run at once, not the %d of --max-num-seqs: each needs a state of %s",
            num_running,
            asked,
            format_bytes(slot_bytes),
        )
    return StateSlots(num_slots, _num_host_states(config, num_slots, slot_bytes)), num_running


def _num_host_states(config: EngineConfig, num_slots: int, slot_bytes: int) -> int:
    """Return the number of states that fit into the half of --kv-host-memory that blocks do not use."""
    if not config.cache.enable_prefix_caching:
        return 0
    if config.cache.kv_host_memory is not None:
        return parse_bytes(config.cache.kv_host_memory) // 2 // slot_bytes
    return min(num_slots // 4, MAX_DEFAULT_HOST_MEMORY // 4 // slot_bytes)


def _num_blocks(config: EngineConfig, model: Model, memory: int, bytes_per_block: int) -> int:
    if not bytes_per_block:  # a model without attention: blocks only count tokens
        per_request = -(-(model.max_model_len + 1) // config.cache.block_size)
        return max(per_request, min(MOST_EMPTY_BLOCKS, config.scheduler.max_num_seqs * per_request))
    blocks = memory // bytes_per_block
    if blocks < 2:
        raise ConfigError(
            f"The KV cache would get {format_bytes(max(memory, 0))}, "
            f"which does not hold two blocks of {format_bytes(bytes_per_block)}.",
            hint="Raise --kv-cache-memory or --gpu-memory-utilization, or take a smaller model.",
        )
    return blocks


def num_host_blocks(config: EngineConfig, kv: KVStore, *, has_states: bool = False) -> int:
    """Return the number of slots of host memory, for pinned blocks without room in the KV cache. States take the
    other half of it."""
    if not config.cache.enable_prefix_caching:
        return 0
    if not kv.block_bytes:
        return kv.num_blocks
    if config.cache.kv_host_memory is not None:
        memory = parse_bytes(config.cache.kv_host_memory)
        return (memory // 2 if has_states else memory) // kv.block_bytes
    return min(kv.num_blocks, MAX_DEFAULT_HOST_MEMORY // kv.block_bytes)


def with_spare_states(batch: AttentionBatch, model: Model, ops: Ops) -> AttentionBatch:
    """Add states to a step whose results are not used, if the model has any."""
    layers = state_layers(model)
    if not layers:
        return batch
    slots = torch.zeros(batch.num_requests, dtype=torch.int64, device=ops.device)
    return replace(batch, states=StateBatch(StateStore(layers, 1, ops.device), slots))


def block_copy_s(kv: KVStore, num_slots: int, ops: Ops, clock: Clock) -> float:
    """Measure the seconds that copying a block to host memory, or back, takes among others. There must be a slot."""
    some = range(min(_BLOCKS_AT_ONCE, num_slots, kv.num_blocks))

    def finish() -> None:
        if ops.device.type == "cuda":
            torch.cuda.synchronize(ops.device)

    def there_and_back(times: int) -> float:
        finish()
        started_s = clock.now()
        for _ in range(times):
            kv.copy_to_host(some, some)
            kv.copy_from_host(some, some)
        finish()
        return clock.now() - started_s

    there_and_back(1)  # touches the memory for the first time
    return there_and_back(_TIMED_COPIES) / (2 * _TIMED_COPIES * len(some))


def _gpu_memory_left(config: EngineConfig, model: Model, ops: Ops) -> int:
    """Return the memory that --gpu-memory-utilization allows this process, less its present memory and the measured
    peak of the largest step. The fraction is for this process alone, but memory that other processes have taken is
    not available."""
    free, total = torch.cuda.mem_get_info(ops.device)
    peak = _peak_step_bytes(config, model, ops)
    allowed = int(total * config.cache.gpu_memory_utilization)
    own = min(total - free, torch.cuda.memory_reserved(ops.device) + CUDA_CONTEXT_BYTES)
    left = min(allowed - own, free) - peak - GPU_MARGIN_BYTES
    return left - buffer_bytes(left) if config.cache.enable_prefix_caching else left


def _peak_step_bytes(config: EngineConfig, model: Model, ops: Ops) -> int:
    """Measure the memory of one step of --max-num-batched-tokens over a cache of a few blocks."""
    block_size = config.cache.block_size
    count = min(config.scheduler.max_num_batched_tokens, model.max_model_len)
    samples = min(config.scheduler.max_num_seqs, count)
    kv = allocate_kv(model, ops, 2, block_size)

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
    batch = with_spare_states(batch, model, ops)
    torch.cuda.reset_peak_memory_stats(ops.device)
    before = torch.cuda.memory_allocated(ops.device)
    with torch.inference_mode():
        hidden = model.forward(zeros(count), batch, kv)
        model.logits(hidden[:samples])
    peak = torch.cuda.max_memory_allocated(ops.device) - before
    del kv, hidden
    torch.cuda.empty_cache()
    return peak
