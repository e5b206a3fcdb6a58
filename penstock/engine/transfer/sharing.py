"""Prepares a model's KV to be read by other engines, and connects it to the engine's loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from penstock.core.clock import Clock
from penstock.core.engine_config import EngineConfig
from penstock.core.errors import ConfigError
from penstock.core.kv_transfer import KVHeads, MemoryRegion
from penstock.engine.collaborator import PlanRecorder, RecordedExchange
from penstock.engine.loop import EngineLoop
from penstock.engine.transfer.port import LoopCalls, Marker, Wire
from penstock.engine.transfer.sources import KVMemory
from penstock.engine.transfer.thread import TransferThread
from penstock.engine.transfer.transfers import KVTransfers
from penstock.kernels.interface import HalvesBlocks, KVRegion, KVStore, Ops
from penstock.models.model import HasLatents, Model
from penstock.models.sharding import Shard
from penstock.scheduler.scheduler import Scheduler


class WatchedKVStore:
    """Implements KVStore. A model asks for a layer's KV when it is about to write it: all layers before are written,
    or on a GPU are queued to be."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self.num_blocks = store.num_blocks
        self.block_size = store.block_size
        self.on_layer: Callable[[int], None] | None = None

    @property
    def block_bytes(self) -> int:
        return self._store.block_bytes

    def layer(self, index: int) -> Any:
        if self.on_layer is not None:
            self.on_layer(index)
        return self._store.layer(index)

    def regions(self, layer: int) -> tuple[KVRegion, ...]:
        return self._store.regions(layer)

    def reserve_host(self, num_slots: int) -> None:
        self._store.reserve_host(num_slots)

    def copy_to_host(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self._store.copy_to_host(block_ids, slots)

    def copy_from_host(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        self._store.copy_from_host(slots, block_ids)

    def read_host(self, slot: int) -> bytes:
        return self._store.read_host(slot)

    def write_block(self, block_id: int, contents: bytes) -> None:
        self._store.write_block(block_id, contents)

    def copy_half(self, block_id: int, offset: int, to_block_id: int) -> None:
        assert isinstance(self._store, HalvesBlocks), "a store that halves blocks can copy halves"
        self._store.copy_half(block_id, offset, to_block_id)


@dataclass(frozen=True, slots=True)
class SharedKV:
    store: WatchedKVStore
    memory: KVMemory
    device: torch.device
    clock: Clock
    max_waiting: int  # requests that wait for KV of others, before more are refused

    def open(
        self, wire: Wire, loop: EngineLoop, recorder: PlanRecorder | None, ranks: Sequence[Connection] = ()
    ) -> tuple[TransferThread, str]:
        """Let other engines reach this engine. Returns the thread that serves them, and its endpoint. `ranks` are the
        other ranks of this engine."""
        thread = TransferThread(wire, self.memory, ranks)
        opened = thread.start()
        assert isinstance(loop.scheduler, Scheduler), "ranks with caches of their own share no KV"
        exchange = RecordedExchange(loop.scheduler.exchange, self.clock, recorder)
        calls = LoopCalls(loop.add, loop.abort, self._mark)
        transfers = KVTransfers(
            thread, exchange, calls, block_size=self.store.block_size, max_waiting=self.max_waiting
        )
        loop.collaborate_first(transfers)
        self.store.on_layer = transfers.exports.layer_begins
        return thread, opened

    def _mark(self) -> Marker | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event


def share(config: EngineConfig, model: Model, ops: Ops, kv: KVStore, clock: Clock, shard: Shard) -> SharedKV:
    """`shard` is the part of the model that this rank has."""
    if not config.cache.enable_prefix_caching:
        raise ConfigError("--kv-transfer needs prefix caching.", hint="Leave --no-enable-prefix-caching out.")
    layers = tuple(
        tuple(
            MemoryRegion(region.address, region.block_bytes, region.num_strips)
            for region in kv.regions(layer)
        )
        for layer in range(model.num_layers)
    )
    settings = config.model
    # The facts that must be equal in two engines that exchange blocks.
    fingerprint = "/".join(
        str(part)
        for part in (settings.model, settings.quantization, settings.load_format, ops.name, ops.dtype)
    )
    is_cuda = ops.device.type == "cuda"
    memory = KVMemory(
        layers,
        kv.num_blocks,
        fingerprint,
        memory="VRAM" if is_cuda else "DRAM",
        device_id=(ops.device.index or 0) if is_cuda else 0,
        kv_dtype=str(ops.kv_dtype).removeprefix("torch."),
        block_size=kv.block_size,
        heads=_heads(model, shard),
        rank=shard.tensor_rank,
        num_ranks=shard.tensor_size,
    )
    limits = config.scheduler
    max_waiting = limits.max_num_seqs + limits.max_queue_requests
    return SharedKV(WatchedKVStore(kv), memory, ops.device, clock, max_waiting)


def _heads(model: Model, shard: Shard) -> KVHeads | None:
    """Return the KV heads of this rank; None where they are not the same in all layers."""
    config = model.config
    if isinstance(model, HasLatents):
        return KVHeads(0, 1)  # every rank has the latents of all heads
    if not config.has_equal_kv_heads:
        return None
    keys = shard.heads(config.num_heads, config.num_kv_heads).keys
    return KVHeads(keys.start, keys.stop) if len(keys) == model.num_kv_heads else None
