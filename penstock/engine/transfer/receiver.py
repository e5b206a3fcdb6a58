"""The receiving end of KV transfers. Runs in the transfer thread; decides nothing about blocks.

Every fetch ends with one `Fetched`, after which nothing is written to its blocks. A sender that fails or falls silent
is dropped with all its transfers; a later fetch connects again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.core.kv_transfer import (
    AskForBlocks,
    AskForLayout,
    BlocksOffered,
    BlocksRead,
    BlocksReady,
    CancelTransfer,
    CannotSend,
    KVLayout,
    ReadConfirmed,
    SenderAlive,
    ToReceiver,
    ToSender,
    TransferCodec,
)
from penstock.engine.transfer.port import CancelFetch, Fetch, Fetched, News
from penstock.engine.transfer.rank_agents import NixlAgent, Read
from penstock.engine.transfer.sources import TransferError


class Fetching:
    """One fetch. Blocks are counted from the first block to be fetched; the sender counts from the start of the
    request."""

    def __init__(self, order: Fetch, num_layers: int) -> None:
        self.order = order
        self.trouble: str | None = None  # the reason why no more blocks will come
        self.num_cached_tokens = 0
        self.is_cancelled = False
        self.is_reported_read = False
        self.num_read_bytes = 0
        self.read_s = 0.0
        self._offered_s = 0.0
        self._num_layers = num_layers
        self._their_block_ids: tuple[int, ...] | None = None
        self._layers_begun: list[int] = []  # of each block that was offered
        self._num_whole_begun = 0  # leading blocks of which every layer is begun
        self._reads: list[Read] = []

    @property
    def num_whole_begun(self) -> int:
        return self._num_whole_begun

    @property
    def has_reads(self) -> bool:
        return bool(self._reads)

    @property
    def is_read(self) -> bool:
        """Return whether all offered blocks are here."""
        return (
            self._their_block_ids is not None
            and self._num_whole_begun == len(self._their_block_ids)
            and not self._reads
        )

    def offered(self, message: BlocksOffered) -> None:
        first = self.order.first_block
        self._their_block_ids = message.block_ids[first : first + len(self.order.block_ids)]
        self._layers_begun = [0] * len(self._their_block_ids)
        self._offered_s = time.monotonic()
        self.num_cached_tokens = message.num_cached_tokens

    def ready(self, message: BlocksReady, agent: NixlAgent, peer: KVLayout) -> None:
        """Begin to read the blocks that have become ready. Raises TransferError."""
        if self._their_block_ids is None:
            raise TransferError("blocks were ready that had not been offered")
        for start, stop, layers in self._newly_ready(message):
            self._reads.append(
                agent.read(
                    peer.agent_name,
                    layers,
                    self._their_block_ids[start:stop],
                    self.order.block_ids[start:stop],
                )
            )
            self._layers_begun[start:stop] = [layers.stop] * (stop - start)
        begun = self._layers_begun
        while self._num_whole_begun < len(begun) and begun[self._num_whole_begun] == self._num_layers:
            self._num_whole_begun += 1

    def collect(self) -> None:
        """Drop the reads that are done. Raises TransferError."""
        unfinished = []
        failure: TransferError | None = None
        for read in self._reads:
            try:
                if not read.is_done() or not read.stop():
                    unfinished.append(read)
            except TransferError as error:
                failure = error
                if not read.stop():
                    unfinished.append(read)
        self._reads = unfinished
        if failure is not None:
            raise failure

    def measure(self, bytes_per_block: int) -> None:
        """Note the speed of the transfer, now that all is read. It says nothing where the sender had to compute."""
        if not self.order.source.computes:
            self.num_read_bytes = self._num_whole_begun * bytes_per_block
            self.read_s = time.monotonic() - self._offered_s

    def stop_reads(self) -> bool:
        """Stop the reads. Returns whether nothing writes to the blocks any more."""
        self._reads = [read for read in self._reads if not read.stop()]
        return not self._reads

    def _newly_ready(self, message: BlocksReady) -> Iterator[tuple[int, int, range]]:
        """Return runs of blocks, with their layers to be read."""
        begun = self._layers_begun
        first = self.order.first_block
        num_whole = min(max(0, message.num_whole_blocks - first), len(begun))
        num_begun = min(max(0, message.num_begun_blocks - first), len(begun))
        start = self._num_whole_begun
        while start < num_begun:
            target = self._num_layers if start < num_whole else message.num_layers
            limit = num_whole if start < num_whole else num_begun
            stop = start + 1
            while stop < limit and begun[stop] == begun[start]:
                stop += 1
            if begun[start] < target:
                yield start, stop, range(begun[start], target)
            start = stop


SILENCE_S = 3.0  # six missed messages of a sender


@dataclass(slots=True)
class _Peer:
    endpoint: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    heard_s: float
    layout: KVLayout | None = None
    fetches: dict[int, Fetching] = field(default_factory=dict)


class Receiver:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        connect: Callable[[zmq.Socket[bytes], str], None],
        agent: NixlAgent,
        tell: Callable[[News], None],
    ) -> None:
        self._context = context
        self._connect_to = connect
        self._agent = agent
        self._tell = tell
        self._codec = TransferCodec()
        self._peers: dict[str, _Peer] = {}
        self._stopping: list[Fetching] = []  # of lost peers, with reads that cannot be stopped yet

    @property
    def is_waiting(self) -> bool:
        return bool(self._stopping) or any(peer.fetches for peer in self._peers.values())

    @property
    def has_reads(self) -> bool:
        return bool(self._stopping) or any(
            fetching.has_reads for peer in self._peers.values() for fetching in peer.fetches.values()
        )

    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [socket for peer in self._peers.values() for socket in (peer.socket, peer.monitor)]

    def obey(self, order: Fetch | CancelFetch, now: float) -> None:
        if isinstance(order, Fetch):
            self._begin(order, now)
            return
        for peer in self._peers.values():
            fetching = peer.fetches.get(order.number)
            if fetching is not None:
                fetching.is_cancelled = True
                self._send(peer, CancelTransfer(order.number))
                self._settle(peer, fetching)

    def read(self, now: float) -> None:
        """Handle all messages that are there, and all reads that are done."""
        for peer in tuple(self._peers.values()):
            self._read_peer(peer, now)
            if peer.fetches and now - peer.heard_s > SILENCE_S:
                self._lose(peer, "it fell silent")
            for fetching in tuple(peer.fetches.values()):
                if fetching.has_reads:
                    self._collect(peer, fetching)
        for fetching in tuple(self._stopping):
            if fetching.stop_reads():
                self._stopping.remove(fetching)
                self._end(fetching, 0)

    def close(self) -> None:
        for peer in self._peers.values():
            self._disconnect(peer)
        self._peers.clear()

    def _begin(self, order: Fetch, now: float) -> None:
        if order.marker is not None:
            order.marker.synchronize()
        peer = self._peers.get(order.source.endpoint)
        if peer is None:
            peer = self._connect(order.source.endpoint, now)
        if not peer.fetches:
            peer.heard_s = now
        peer.fetches[order.number] = Fetching(order, len(self._agent.memory.layers))
        num_blocks = order.first_block + len(order.block_ids)
        self._send(peer, AskForBlocks(order.number, order.request, num_blocks, order.source.computes))

    def _connect(self, endpoint: str, now: float) -> _Peer:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(option, 0)
        # An endpoint is known only once its sender listens: a sender that does not listen has gone.
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        self._connect_to(socket, endpoint)
        peer = self._peers[endpoint] = _Peer(endpoint, socket, monitor, now)
        self._send(peer, AskForLayout())
        return peer

    def _read_peer(self, peer: _Peer, now: float) -> None:
        while peer.endpoint in self._peers and int(peer.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            peer.heard_s = now
            message = self._codec.decode_to_receiver(peer.socket.recv())
            try:
                self._handle(peer, message)
            except TransferError as error:
                self._lose(peer, str(error))
        if peer.endpoint in self._peers and int(peer.monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            recv_monitor_message(peer.monitor)
            self._lose(peer, "its process has gone")

    def _handle(self, peer: _Peer, message: ToReceiver) -> None:
        """Handle a message. Raises TransferError."""
        if isinstance(message, KVLayout):
            self._agent.connect(message)
            peer.layout = message
            return
        if isinstance(message, SenderAlive):
            return
        fetching = peer.fetches.get(message.fetch)
        if fetching is None or fetching.is_cancelled:
            return
        match message:
            case BlocksOffered():
                fetching.offered(message)
            case BlocksReady():
                assert peer.layout is not None, "a sender introduces itself first"
                fetching.ready(message, self._agent, peer.layout)
            case CannotSend():
                fetching.trouble = message.reason
            case ReadConfirmed():
                if not message.was_kept:
                    fetching.trouble = "it did not keep the blocks"
                del peer.fetches[message.fetch]
                self._end(fetching, fetching.num_whole_begun if message.was_kept else 0)
                return
        self._collect(peer, fetching)

    def _collect(self, peer: _Peer, fetching: Fetching) -> None:
        try:
            fetching.collect()
        except TransferError as error:
            self._lose(peer, str(error))
        else:
            self._settle(peer, fetching)

    def _settle(self, peer: _Peer, fetching: Fetching) -> None:
        """Take the step that a fetch without outstanding reads is ready for, if any."""
        number = fetching.order.number
        if fetching.is_reported_read or fetching.has_reads:
            return
        if fetching.is_cancelled or (fetching.trouble is not None and not fetching.num_whole_begun):
            del peer.fetches[number]
            if not fetching.is_cancelled:
                self._send(peer, CancelTransfer(number))
            self._end(fetching, 0)
        elif fetching.is_read or fetching.trouble is not None:
            fetching.is_reported_read = True
            fetching.measure(self._agent.memory.bytes_per_block)
            self._send(peer, BlocksRead(number))

    def _lose(self, peer: _Peer, reason: str) -> None:
        if self._peers.pop(peer.endpoint, None) is None:
            return
        self._disconnect(peer)
        for fetching in peer.fetches.values():
            fetching.trouble = reason
            if fetching.stop_reads():
                self._end(fetching, 0)
            else:
                self._stopping.append(fetching)
        peer.fetches.clear()

    def _disconnect(self, peer: _Peer) -> None:
        peer.socket.disable_monitor()
        peer.monitor.close(0)
        peer.socket.close(0)
        if peer.layout is not None:
            self._agent.disconnect(peer.layout)

    def _end(self, fetching: Fetching, num_filled: int) -> None:
        trouble = None if fetching.is_cancelled else fetching.trouble
        self._tell(
            Fetched(
                fetching.order.number,
                num_filled,
                fetching.num_cached_tokens,
                trouble,
                fetching.num_read_bytes,
                fetching.read_s,
            )
        )

    def _send(self, peer: _Peer, message: ToSender) -> None:
        with contextlib.suppress(zmq.Again):  # it has gone, as the monitor will tell
            peer.socket.send(self._codec.encode(message), zmq.NOBLOCK)
