"""Moves the KV of an engine whose layers are cut up over several ranks: each rank reads its own part of a block, from
one or several ranks of the sender (`sources`).

A block has the same number on every rank, so the transfer thread of the first rank decides for all. Every other rank
has a thread with a NIXL agent over its own memory, which does what the first rank asks for over a pipe. A read is
done when it is done on every rank. When the first rank is about to write a layer, all ranks have written the layers
before: the sums over ranks that end a layer have seen to that.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Literal, TypeAlias
from uuid import uuid4

import msgspec

from penstock.core.kv_transfer import KVLayout
from penstock.engine.transfer.nixl_memory import JoinedRead, NixlAgent, Read
from penstock.engine.transfer.sources import KVMemory, TransferError


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
    """The agent of the first rank together with those of the other ranks."""

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
