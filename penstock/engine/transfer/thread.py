"""The thread that talks to other engines and reads their memory, so that neither waits for a step of this one."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from queue import SimpleQueue
from uuid import uuid4

import zmq

from penstock.core.errors import EngineUnavailable
from penstock.engine.transfer.nixl_memory import KVMemory, NixlAgent
from penstock.engine.transfer.port import CancelFetch, Fetch, News, Order, Wire
from penstock.engine.transfer.receiver import Receiver
from penstock.engine.transfer.sender import ALIVE_INTERVAL_S, Sender

logger = logging.getLogger(__name__)

_READING_POLL_MS = 1
_SENDING_POLL_MS = (
    5  # some transports need a turn of ours while others read; every turn is taken from the model's
)
_IDLE_POLL_MS = int(ALIVE_INTERVAL_S * 1000)


class TransferThread:
    """Implements `port.KVPort`. All methods are for the loop's thread."""

    def __init__(self, wire: Wire, memory: KVMemory) -> None:
        self._memory = memory
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._orders: deque[Order] = deque()
        self._news: deque[News] = deque()
        name = uuid4().hex
        self._order_bell = self._bell(f"inproc://orders-{name}", bind=True)
        self._heard_orders = self._bell(f"inproc://orders-{name}", bind=False)
        self.news_bell = self._bell(f"inproc://news-{name}", bind=True)  # readable when there is news
        self._tell_bell = self._bell(f"inproc://news-{name}", bind=False)
        self._wire = wire
        self._stopping = False
        self._started: SimpleQueue[str | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv transfer", daemon=True)

    def start(self) -> str:
        """Returns the endpoint when others can reach it. Raises what keeps it from starting."""
        self._thread.start()
        outcome = self._started.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def order(self, order: Order) -> None:
        self._orders.append(order)
        _ring(self._order_bell)

    def news(self) -> list[News]:
        """Raises EngineUnavailable when the thread has failed: blocks may then be written to or read for ever."""
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
            agent = NixlAgent(f"penstock-{os.getpid()}-{uuid4().hex[:8]}", self._memory)
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
