"""Opens the KV blocks of this process to other engines, and reads their blocks, through NIXL. Knows no request.

NIXL picks the transport: RDMA, NVLink, shared memory or TCP, for GPU and plain memory alike. An agent
belongs to the thread that made it. It has no thread of its own, which would keep a core busy: the owner calls
`progress` now and then while it waits for a read or may be read from.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from penstock.core.installation import install_command
from penstock.core.kv_transfer import KVLayout
from penstock.engine.transfer.sources import KVMemory, Source, TransferError, pieces, sources_of

# One wheel for each version of CUDA; both work without a GPU.
_PACKAGES = ("nixl_cu12", "nixl_cu13")


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


class JoinedRead(Read):
    """Several transfers that belong together."""

    def __init__(self, reads: Sequence[Read]) -> None:
        self._unfinished = list(reads)
        self._unstopped = list(reads)

    @classmethod
    def begin(cls, begins: Iterable[Callable[[], Read]], progress: Callable[[], None]) -> JoinedRead:
        """Begin all transfers. When one cannot begin, the others are stopped first: nothing may write to the blocks
        once this has raised TransferError."""
        reads: list[Read] = []
        try:
            for begin in begins:
                reads.append(begin())
        except TransferError:
            unfinished = cls(reads)
            while not unfinished.stop():
                progress()
            raise
        return cls(reads)

    def is_done(self) -> bool:
        self._unfinished = [read for read in self._unfinished if not read.is_done()]
        return not self._unfinished

    def stop(self) -> bool:
        self._unstopped = [read for read in self._unstopped if not read.stop()]
        return not self._unstopped


class NixlAgent:
    def __init__(self, name: str, memory: KVMemory) -> None:
        api = _load()
        self.name = name
        self.memory = memory
        self._sources: dict[str, tuple[Source, ...]] = {}  # by the agent of a peer's first rank
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
            kv_dtype=memory.kv_dtype,
            block_size=memory.block_size,
            heads=memory.heads,
        )

    def connect(self, peer: KVLayout) -> None:
        """Connect to the ranks of another engine that have this rank's part of blocks. Raises TransferError."""
        sources = self._sources[peer.agent_name] = sources_of(self.memory, peer)
        try:
            for source in sources:
                self._agent.add_remote_agent(source.layout.agent_metadata)
        except Exception as error:
            self.disconnect(peer)
            raise TransferError(str(error)) from error

    def disconnect(self, peer: KVLayout) -> None:
        for source in self._sources.pop(peer.agent_name, ()):
            try:
                self._agent.remove_remote_agent(source.layout.agent_name)
            except Exception:
                logging.getLogger(__name__).debug("no connection to %s to end", source.layout.agent_name)

    def read(
        self, peer_name: str, layers: range, their_block_ids: Sequence[int], our_block_ids: Sequence[int]
    ) -> Read:
        """Begin to copy some layers of another engine's blocks into blocks of this process. `peer_name` is the agent
        of its first rank. Raises TransferError."""
        sources = self._sources.get(peer_name)
        if sources is None:
            raise TransferError("it is not connected")
        runs = _runs(their_block_ids, our_block_ids)
        begins = [partial(self._begin, source, layers, runs) for source in sources]
        return begins[0]() if len(begins) == 1 else JoinedRead.begin(begins, self.progress)

    def _begin(self, source: Source, layers: range, runs: NDArray[np.int64]) -> Read:
        peer, memory, agent = source.layout, self.memory, self._agent
        theirs = pieces(peer.layers, layers, runs[:, (0, 2)], peer.heads, source.heads)
        ours = pieces(memory.layers, layers, runs[:, (1, 2)], memory.heads, source.heads)
        try:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(_described(*ours, memory.device_id), memory.memory),
                agent.get_xfer_descs(_described(*theirs, peer.device_id), peer.memory),
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


def _runs(theirs: Sequence[int], ours: Sequence[int]) -> NDArray[np.int64]:
    """Return rows of (their first block, our first block, count) with ids that rise by one: pieces of memory."""
    pairs = np.array([theirs, ours], dtype=np.int64).T
    breaks = np.flatnonzero((np.diff(pairs, axis=0) != 1).any(axis=1)) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [len(pairs)])))
    return np.column_stack((pairs[starts], counts))


def _described(starts: NDArray[np.int64], sizes: NDArray[np.int64], device_id: int) -> NDArray[np.uint64]:
    """Return rows of (address, bytes, device) for NIXL."""
    return np.stack((starts, sizes, np.full_like(starts, device_id)), axis=-1).astype(np.uint64)
