"""Opens the KV blocks of this process to other engines, and reads their blocks, through NIXL. Knows no request.

NIXL picks the transport: RDMA, NVLink, shared memory or TCP, for GPU and plain memory alike. An agent
belongs to the thread that made it. It has no thread of its own, which would keep a core busy: the owner calls
`progress` now and then while it waits for a read or may be read from.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from penstock.core.installation import install_command
from penstock.core.kv_transfer import KVLayout, MemoryRegion

# One wheel for each version of CUDA; both work without a GPU.
_PACKAGES = ("nixl_cu12", "nixl_cu13")


class TransferError(Exception):
    """KV of another engine cannot be read. Never fatal: the engine that asked for it computes it."""


@dataclass(frozen=True, slots=True)
class KVMemory:
    """Describes the memory and the meaning of this process's blocks, by layer."""

    layers: tuple[tuple[MemoryRegion, ...], ...]
    num_blocks: int
    model: str  # engines with equal values can exchange blocks
    memory: str = "DRAM"
    device_id: int = 0

    @property
    def bytes_per_block(self) -> int:
        return sum(region.block_bytes for regions in self.layers for region in regions)


class Read:
    """One transfer on its way."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent = agent
        self._handle = handle

    def is_done(self) -> bool:
        """Say whether the transfer is done. Raises TransferError when it failed; nothing is written after that."""
        try:
            state = self._agent.check_xfer_state(self._handle)
        except Exception as error:
            raise TransferError(str(error)) from error
        if state == "ERR":
            raise TransferError("the transfer failed")
        return bool(state == "DONE")

    def stop(self) -> bool:
        """Free the transfer, finished or not. Returns False when it cannot be stopped yet and may still write."""
        try:
            self._agent.release_xfer_handle(self._handle)
        except Exception:
            return False
        return True


class NixlAgent:
    def __init__(self, name: str, memory: KVMemory) -> None:
        api = _load()
        self.name = name
        self.memory = memory
        settings = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = api.nixl_agent(name, settings)
        regions = [region for layer in memory.layers for region in layer]
        self._agent.register_memory(
            [(r.address, r.block_bytes * memory.num_blocks, memory.device_id, "") for r in regions],
            memory.memory,
        )

    def layout(self) -> KVLayout:
        memory = self.memory
        return KVLayout(
            self.name,
            self._agent.get_agent_metadata(),
            memory.memory,
            memory.device_id,
            memory.model,
            memory.layers,
        )

    def connect(self, peer: KVLayout) -> None:
        ours, theirs = self.memory, peer
        if ours.model != theirs.model or _sizes(ours.layers) != _sizes(theirs.layers):
            raise TransferError(f"its KV is of {theirs.model!r}, and ours of {ours.model!r}")
        try:
            self._agent.add_remote_agent(peer.agent_metadata)
        except Exception as error:
            raise TransferError(str(error)) from error

    def disconnect(self, peer: KVLayout) -> None:
        try:
            self._agent.remove_remote_agent(peer.agent_name)
        except Exception:
            logging.getLogger(__name__).debug("no connection to %s to end", peer.agent_name)

    def read(
        self, peer: KVLayout, layers: range, their_block_ids: Sequence[int], our_block_ids: Sequence[int]
    ) -> Read:
        """Begin to copy some layers of another engine's blocks into blocks of this process."""
        runs = _runs(their_block_ids, our_block_ids)
        theirs = _pieces(peer.layers, layers, runs, 0, peer.device_id)
        ours = _pieces(self.memory.layers, layers, runs, 1, self.memory.device_id)
        agent = self._agent
        try:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(ours, self.memory.memory),
                agent.get_xfer_descs(theirs, peer.memory),
                peer.agent_name,
            )
            if agent.transfer(handle) == "ERR":
                raise TransferError("the transfer failed")
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(str(error)) from error
        return Read(agent, handle)

    def progress(self) -> None:
        """Let the transport work, for reads of this engine and for reads of other engines from its memory."""
        self._agent.get_new_notifs()


def _load() -> Any:
    for package in _PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
        except ImportError:
            continue
        logging.getLogger("nixl").setLevel(logging.WARNING)
        logging.getLogger(package).setLevel(logging.WARNING)
        return api
    raise ConfigError(
        "KV cannot move between engines: NIXL is not installed.",
        hint=f"Run: {install_command('disaggregation')}",
    )


def _sizes(layers: tuple[tuple[MemoryRegion, ...], ...]) -> list[list[int]]:
    return [[region.block_bytes for region in regions] for regions in layers]


def _runs(theirs: Sequence[int], ours: Sequence[int]) -> NDArray[np.int64]:
    """Return rows of (their first block, our first block, count) with ids that rise by one: pieces of memory."""
    pairs = np.array([theirs, ours], dtype=np.int64).T
    breaks = np.flatnonzero((np.diff(pairs, axis=0) != 1).any(axis=1)) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [len(pairs)])))
    return np.column_stack((pairs[starts], counts))


def _pieces(
    layers: tuple[tuple[MemoryRegion, ...], ...],
    wanted: range,
    runs: NDArray[np.int64],
    side: int,
    device_id: int,
) -> NDArray[np.uint64]:
    """Return rows of (address, bytes, device) for NIXL. `side` selects the blocks of the runs."""
    regions = [region for layer in wanted for region in layers[layer]]
    addresses = np.array([region.address for region in regions], dtype=np.int64)[:, None]
    sizes = np.array([region.block_bytes for region in regions], dtype=np.int64)[:, None]
    starts = addresses + runs[None, :, side] * sizes
    lengths = runs[None, :, 2] * sizes
    devices = np.full_like(starts, device_id)
    return np.stack((starts, lengths, devices), axis=-1).reshape(-1, 3).astype(np.uint64)
