"""Moves the KV of an engine whose layers are cut up over several ranks: each rank reads its own part of a block, from
one or several ranks of the sender (`sources`).

A block has the same number on every rank, so the transfer thread of the first rank decides for all. Every other rank
has a thread with a NIXL agent over its own memory, which does what the first rank asks for over a pipe. A read is
done when it is done on every rank. When the first rank is about to write a layer, all ranks have written the layers
before: the sums over ranks that end a layer have seen to that.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeAlias
from uuid import uuid4

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from penstock.core.kv_transfer import KVLayout
from penstock.core.machine import install_command
from penstock.engine.transfer.sources import KVMemory, Source, TransferError, pieces, sources_of

# One wheel for each version of CUDA; both work without a GPU.
_PACKAGES = ("nixl_cu12", "nixl_cu13")


class Read:
    """One transfer on its way."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent = agent
        self._handle = handle

    def is_done(self) -> bool:
        """Return whether the transfer is done. Raises TransferError when it failed; nothing is written after that."""
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
    """Opens the KV blocks of this process to other engines, and reads their blocks, through NIXL. Knows no request.

    NIXL picks the transport: RDMA, NVLink, shared memory or TCP, for GPU and plain memory alike. An agent belongs
    to the thread that made it. It has no thread of its own, which would keep a core busy: the owner calls
    `progress` now and then while it waits for a read or may be read from.
    """

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


class _Peer(msgspec.Struct, frozen=True, tag="peer"):
    """Connect to the ranks of another engine that have this rank's part of blocks, or disconnect from them."""

    layout: KVLayout
    action: Literal["connect", "disconnect"]


class _Read(msgspec.Struct, frozen=True, tag="read"):
    number: int
    peer_name: str
    first_layer: int
    end_layer: int
    their_block_ids: tuple[int, ...]
    our_block_ids: tuple[int, ...]


class _Ask(msgspec.Struct, frozen=True, tag="ask"):
    number: int
    about: Literal["done", "stop"]


class _Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Let the transport work."""


class _Answer(msgspec.Struct, frozen=True):
    is_so: bool = True
    trouble: str | None = None


_Call: TypeAlias = _Peer | _Read | _Ask | _Progress
_encode = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(_Call).decode
_decode_answer = msgspec.msgpack.Decoder(_Answer).decode
_decode_layout = msgspec.msgpack.Decoder(KVLayout).decode


def new_agent(memory: KVMemory) -> NixlAgent:
    return NixlAgent(f"penstock-{os.getpid()}-{uuid4().hex[:8]}", memory)


def serve_rank(memory: KVMemory, connection: Connection) -> None:
    """Do what the first rank asks for, in a thread of its own, until the connection closes."""
    threading.Thread(target=_serve, args=(memory, connection), name="kv transfer", daemon=True).start()


def _serve(memory: KVMemory, connection: Connection) -> None:
    with suppress(EOFError, OSError):
        agent = new_agent(memory)
        connection.send_bytes(_encode(agent.layout()))
        reads: dict[int, Read] = {}
        while True:
            call = _decode_call(connection.recv_bytes())
            try:
                answer = _Answer(_obey(call, agent, reads))
            except TransferError as error:
                answer = _Answer(trouble=str(error))
            connection.send_bytes(_encode(answer))


def _obey(call: _Call, agent: NixlAgent, reads: dict[int, Read]) -> bool:
    match call:
        case _Peer(layout=layout, action="connect"):
            agent.connect(layout)
        case _Peer(layout=layout):
            agent.disconnect(layout)
        case _Read():
            layers = range(call.first_layer, call.end_layer)
            reads[call.number] = agent.read(call.peer_name, layers, call.their_block_ids, call.our_block_ids)
        case _Ask(number=number, about="done"):
            return reads[number].is_done()
        case _Ask(number=number):
            if not reads[number].stop():
                return False
            del reads[number]
        case _Progress():
            agent.progress()
    return True


class _Rank:
    """Another rank, as the transfer thread of the first rank sees it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        try:
            self.layout = _decode_layout(connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise TransferError("a rank could not share its memory") from error

    def call(self, call: _Call) -> bool:
        """Return the rank's answer. Raises TransferError, also when the rank has gone: then the engine ends."""
        try:
            self._connection.send_bytes(_encode(call))
            answer = _decode_answer(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise TransferError("a rank of this engine has gone") from error
        if answer.trouble is not None:
            raise TransferError(answer.trouble)
        return answer.is_so


class _RankRead(Read):
    """One transfer of another rank."""

    def __init__(self, rank: _Rank, number: int) -> None:
        self._rank = rank
        self._number = number

    def is_done(self) -> bool:
        return self._rank.call(_Ask(self._number, "done"))

    def stop(self) -> bool:
        try:
            return self._rank.call(_Ask(self._number, "stop"))
        except TransferError:
            return True  # a rank that has gone writes no more


class RankAgents(NixlAgent):
    """The agent of the first rank together with the agents of the other ranks."""

    def __init__(self, own: NixlAgent, connections: Sequence[Connection]) -> None:
        self.memory = own.memory
        self._own = own
        self._ranks = [_Rank(connection) for connection in connections]
        self._numbers = itertools.count()

    def layout(self) -> KVLayout:
        others = tuple(rank.layout for rank in self._ranks)
        return msgspec.structs.replace(self._own.layout(), others=others)

    def connect(self, peer: KVLayout) -> None:
        try:
            self._own.connect(peer)
            for rank in self._ranks:
                rank.call(_Peer(peer, "connect"))
        except TransferError:
            self.disconnect(peer)
            raise

    def disconnect(self, peer: KVLayout) -> None:
        self._own.disconnect(peer)
        for rank in self._ranks:
            with suppress(TransferError):
                rank.call(_Peer(peer, "disconnect"))

    def read(
        self, peer_name: str, layers: range, their_block_ids: Sequence[int], our_block_ids: Sequence[int]
    ) -> Read:
        theirs, ours = tuple(their_block_ids), tuple(our_block_ids)
        call = _Read(next(self._numbers), peer_name, layers.start, layers.stop, theirs, ours)
        begins: list[Callable[[], Read]] = [partial(self._own.read, peer_name, layers, theirs, ours)]
        begins += [partial(_begin_on, rank, call) for rank in self._ranks]
        return JoinedRead.begin(begins, self.progress)

    def progress(self) -> None:
        self._own.progress()
        for rank in self._ranks:
            with suppress(TransferError):
                rank.call(_Progress())


def _begin_on(rank: _Rank, call: _Read) -> Read:
    rank.call(call)
    return _RankRead(rank, call.number)
