"""Two engines in one process, between which KV really moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from penstock.core.kv_transfer import KVSource
from penstock.core.messages import RequestRejected
from penstock.core.plan import TokenEvent
from penstock.core.request import Request
from penstock.engine.build import Engine
from penstock.engine.transfer.port import Wire
from penstock.engine.transfer.thread import TransferThread

from ..tiny import tiny_engine

WAIT_S = 240


@dataclass
class Side:
    engine: Engine
    thread: TransferThread
    endpoint: str
    events: dict[str, list[TokenEvent]]
    rejections: list[RequestRejected]

    @property
    def num_blocks_used(self) -> int:
        return self.engine.loop.stats().num_kv_blocks_used

    def step(self) -> None:
        for event in self.engine.loop.step():
            self.events.setdefault(event.request_id, []).append(event)
        self.rejections += self.engine.loop.take_rejections()
        self.engine.loop.scheduler.check_integrity()

    def tokens(self, request_id: str) -> list[int]:
        return [token for event in self.events[request_id] for token in event.token_ids]

    def has_ended(self, request_id: str) -> bool:
        events = self.events.get(request_id)
        return bool(events) and events[-1].finish_reason is not None


@dataclass
class Pair:
    sender: Side
    receiver: Side

    def until(self, condition: Callable[[], bool], *, sender_steps: bool = True) -> None:
        gives_up = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < gives_up, "the condition never came true"
            if sender_steps:
                self.sender.step()
            self.receiver.step()
            time.sleep(0.0005)

    def fetch(self, request: Request, *, computes: bool = True) -> Side:
        """Serve a request at the receiver, with KV of the sender."""
        self.receiver.events.pop(request.id, None)
        self.receiver.engine.loop.add(request, kv_source=KVSource(self.sender.endpoint, computes))
        self.until(lambda: self.receiver.has_ended(request.id))
        return self.receiver

    def settle(self) -> None:
        """Wait until nobody holds anything."""
        self.until(lambda: not self.sender.num_blocks_used and not self.receiver.num_blocks_used)
        assert not len(self.sender.engine.loop.scheduler.exchange)
        assert not len(self.receiver.engine.loop.scheduler.exchange)


@contextmanager
def side(model: Path, endpoint: str, **settings: Any) -> Iterator[Side]:
    engine = tiny_engine(model, kv_transfer=True, **settings)
    assert engine.shared_kv is not None

    def bind(socket: zmq.Socket[bytes]) -> str:
        socket.bind(endpoint)
        return endpoint

    wire = Wire(bind, lambda socket, peer: socket.connect(peer))
    thread, opened = engine.shared_kv.open(wire, engine.loop, engine.recorder)
    try:
        yield Side(engine, thread, opened, {}, [])
    finally:
        thread.close()
        engine.close()


@contextmanager
def pair(model: Path, folder: Path, sender: dict[str, Any], receiver: dict[str, Any]) -> Iterator[Pair]:
    with (
        side(model, f"ipc://{folder}/sender", **sender) as sending,
        side(model, f"ipc://{folder}/receiver", **receiver) as receiving,
    ):
        yield Pair(sending, receiving)
