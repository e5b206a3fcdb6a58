"""The thread that talks to other engines and reads their memory, and the sending end of KV transfers. Decides nothing
about blocks.

A transfer ends when the receiver has read everything, cancels it, has gone, or takes too long. When the receiver says
that it has read everything, the sender answers whether the blocks were still kept: only then may the receiver trust
what it read.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from uuid import uuid4

import zmq

from penstock.core.errors import EngineUnavailable
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
    TransferCodec,
)
from penstock.engine.transfer.port import (
    Asked,
    CancelFetch,
    Fetch,
    News,
    Offer,
    Order,
    Ready,
    Refuse,
    TransferEnded,
    TransferKey,
    Wire,
)
from penstock.engine.transfer.rank_agents import NixlAgent, RankAgents, new_agent
from penstock.engine.transfer.receiver import Receiver
from penstock.engine.transfer.sources import KVMemory

ALIVE_INTERVAL_S = 0.5
# From the last ready block to the end of its read: far more than any transfer takes.
READ_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Sending:
    num_blocks: int | None = None  # None until blocks are offered
    ready_s: float | None = None  # when the last block became ready


class Sender:
    def __init__(
        self, socket: zmq.Socket[bytes], layout: KVLayout, tell: Callable[[News], None], now: float
    ) -> None:
        """`socket` is a ROUTER that is bound; `tell` passes events on to the loop."""
        self._socket = socket
        self._layout = layout
        self._tell = tell
        self._codec = TransferCodec()
        self._exports: dict[TransferKey, _Sending] = {}
        self._alive_s = now

    def __len__(self) -> int:
        return len(self._exports)

    def read(self) -> None:
        """Handle all messages that are there."""
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            receiver, data = self._socket.recv_multipart()
            self._handle(receiver, data)

    def obey(self, order: Offer | Ready | Refuse, now: float) -> None:
        export = self._exports.get(order.transfer)
        if export is None:  # the receiver has gone, and the loop is being told
            return
        receiver, fetch = order.transfer
        match order:
            case Offer():
                export.num_blocks = len(order.block_ids)
                self._send(receiver, BlocksOffered(fetch, order.block_ids, order.num_cached_tokens))
            case Ready():
                if order.marker is not None:
                    order.marker.synchronize()
                if order.num_whole_blocks == export.num_blocks:
                    export.ready_s = now
                self._send(
                    receiver,
                    BlocksReady(fetch, order.num_whole_blocks, order.num_begun_blocks, order.num_layers),
                )
            case Refuse():
                export.ready_s = now
                self._send(receiver, CannotSend(fetch, order.reason))

    def tick(self, now: float) -> None:
        """Tell receivers that this engine lives, and end exports that were kept too long. Call this now and then."""
        if now - self._alive_s < ALIVE_INTERVAL_S:
            return
        self._alive_s = now
        for receiver in {receiver for receiver, _ in self._exports}:
            self._send(receiver, SenderAlive())
        for key, export in tuple(self._exports.items()):
            if export.ready_s is not None and now - export.ready_s > READ_TIMEOUT_S:
                self._end(key)

    def _handle(self, receiver: bytes, data: bytes) -> None:
        match self._codec.decode_to_sender(data):
            case AskForLayout():
                self._send(receiver, self._layout)
            case AskForBlocks() as message:
                key = receiver, message.fetch
                self._exports[key] = _Sending()
                self._tell(Asked(key, message.request, message.num_blocks, message.computes))
            case BlocksRead(fetch=fetch):
                was_kept = self._end((receiver, fetch))
                self._send(receiver, ReadConfirmed(fetch, was_kept))
            case CancelTransfer(fetch=fetch):
                self._end((receiver, fetch))

    def _end(self, key: TransferKey) -> bool:
        if self._exports.pop(key, None) is None:
            return False
        self._tell(TransferEnded(key))
        return True

    def _send(self, receiver: bytes, message: ToReceiver) -> None:
        try:
            self._socket.send_multipart((receiver, self._codec.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            for key in [key for key in self._exports if key[0] == receiver]:
                self._end(key)


logger = logging.getLogger(__name__)

_READING_POLL_MS = 1
# Some transports need a turn of ours while others read; every turn is taken from the model's.
_SENDING_POLL_MS = 5
_IDLE_POLL_MS = int(ALIVE_INTERVAL_S * 1000)


class TransferThread:
    """Implements `port.KVPort`. All methods are for the loop's thread."""

    def __init__(self, wire: Wire, memory: KVMemory, ranks: Sequence[Connection] = ()) -> None:
        """`ranks` are the other ranks of this engine, which have their own parts of all blocks."""
        self._memory = memory
        self._ranks = ranks
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._orders: deque[Order] = deque()
        self._news: deque[News] = deque()
        name = uuid4().hex
        self._order_bell = self._bell(f"inproc://orders-{name}", bind=True)
        self._heard_orders = self._bell(f"inproc://orders-{name}", bind=False)
        self.news_bell = self._bell(f"inproc://news-{name}", bind=True)  # readable when there are events
        self._tell_bell = self._bell(f"inproc://news-{name}", bind=False)
        self._wire = wire
        self._stopping = False
        self._started: SimpleQueue[str | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv transfer", daemon=True)

    def start(self) -> str:
        """Start the thread. Returns the endpoint when other engines can reach it. Raises the error of a failed
        start."""
        self._thread.start()
        outcome = self._started.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def order(self, order: Order) -> None:
        self._orders.append(order)
        _ring(self._order_bell)

    def news(self) -> list[News]:
        """Return the events. Raises EngineUnavailable when the thread has failed, since blocks may then be in use for
        ever."""
        if not self._thread.is_alive():
            raise EngineUnavailable("The transfer of KV between engines has failed.")
        _hush(self.news_bell)
        return [self._news.popleft() for _ in range(len(self._news))]

    def close(self) -> None:
        self._stopping = True
        _ring(self._order_bell)
        self._thread.join(timeout=5.0)
        for bell in (self._order_bell, self.news_bell):
            bell.close(0)
        if not self._thread.is_alive():
            self._context.term()

    def _run(self) -> None:
        socket: zmq.Socket[bytes] | None = None
        try:
            agent = new_agent(self._memory)
            if self._ranks:
                agent = RankAgents(agent, self._ranks)
            socket = self._context.socket(zmq.ROUTER)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.LINGER, 0)
            for option in (zmq.SNDHWM, zmq.RCVHWM):
                socket.setsockopt(option, 0)
            self._started.put(self._wire.bind(socket))
        except BaseException as error:
            self._started.put(error)
            if socket is not None:
                socket.close(0)
            return
        receiver = Receiver(self._context, self._wire.connect, agent, self._tell)
        sender = Sender(socket, agent.layout(), self._tell, time.monotonic())
        try:
            while not self._stopping:
                self._turn(socket, receiver, sender, agent)
        except Exception:
            logger.exception("the transfer of KV between engines stopped")
        finally:
            receiver.close()
            socket.close(0)
            for bell in (self._heard_orders, self._tell_bell):
                bell.close(0)

    def _turn(self, socket: zmq.Socket[bytes], receiver: Receiver, sender: Sender, agent: NixlAgent) -> None:
        poller = zmq.Poller()
        for each in (self._heard_orders, socket, *receiver.sockets()):
            poller.register(each, zmq.POLLIN)
        is_moving = receiver.has_reads or len(sender) > 0
        sending_ms = _SENDING_POLL_MS if len(sender) else _IDLE_POLL_MS
        poller.poll(_READING_POLL_MS if receiver.has_reads else sending_ms)
        now = time.monotonic()
        _hush(self._heard_orders)
        for _ in range(len(self._orders)):
            order = self._orders.popleft()
            if isinstance(order, Fetch | CancelFetch):
                receiver.obey(order, now)
            else:
                sender.obey(order, now)
        sender.read()
        receiver.read(now)
        sender.tick(now)
        if is_moving or receiver.is_waiting:
            agent.progress()

    def _tell(self, news: News) -> None:
        self._news.append(news)
        _ring(self._tell_bell)

    def _bell(self, endpoint: str, *, bind: bool) -> zmq.Socket[bytes]:
        bell = self._context.socket(zmq.PAIR)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            bell.setsockopt(option, 1)
        if bind:
            bell.bind(endpoint)
        else:
            bell.connect(endpoint)
        return bell


def _ring(bell: zmq.Socket[bytes]) -> None:
    with contextlib.suppress(zmq.Again):  # it rings already
        bell.send(b"", zmq.NOBLOCK)


def _hush(bell: zmq.Socket[bytes]) -> None:
    while True:
        try:
            bell.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
