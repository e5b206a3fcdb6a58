"""What a sender tells, and when: layer by layer, before the step that computes it is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from penstock.core.clock import SystemClock
from penstock.core.kv_transfer import (
    AskForBlocks,
    AskForLayout,
    BlocksOffered,
    BlocksRead,
    BlocksReady,
    KVLayout,
    ReadConfirmed,
    SenderAlive,
    ToReceiver,
    TransferCodec,
)
from penstock.engine.build import Engine
from penstock.engine.collaborator import RecordedExchange
from penstock.engine.transfer.port import Asked, LoopCalls, News, Offer, Order, Ready, Refuse, TransferEnded
from penstock.engine.transfer.thread import READ_TIMEOUT_S, Sender
from penstock.engine.transfer.transfers import KVTransfers

from ..tiny import request, tiny_engine, write_tiny_model

NUM_LAYERS = 2
TRANSFER = (b"somebody", 1)


class FakePort:
    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.pending: list[News] = []

    def order(self, order: Order) -> None:
        self.orders.append(order)

    def news(self) -> list[News]:
        news, self.pending = self.pending, []
        return news


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def exporting_engine(model: Path, **settings: object) -> tuple[Engine, FakePort]:
    engine = tiny_engine(model, kv_transfer=True, **settings)
    port = FakePort()
    exchange = RecordedExchange(engine.loop.scheduler.exchange, SystemClock(), None)
    calls = LoopCalls(engine.loop.add, engine.loop.abort, lambda: None)
    transfers = KVTransfers(port, exchange, calls, block_size=16, max_waiting=4)
    engine.loop.collaborate_first(transfers)
    assert engine.shared_kv is not None
    engine.shared_kv.store.on_layer = transfers.exports.layer_begins
    return engine, port


def asked_for(num_tokens: int) -> Asked:
    wanted = request("wanted", [5 + 3 * n % 290 for n in range(num_tokens)])
    return Asked(TRANSFER, wanted, (num_tokens - 1) // 16, computes=True)


def progress(orders: list[Order]) -> list[tuple[int, int, int]]:
    return [
        (order.num_whole_blocks, order.num_begun_blocks, order.num_layers)
        for order in orders
        if isinstance(order, Ready)
    ]


def test_each_layer_is_told_while_the_step_runs(model: Path) -> None:
    engine, port = exporting_engine(model, max_num_batched_tokens=40)
    port.pending.append(asked_for(100))
    engine.loop.step()
    offered = port.orders[0]
    assert isinstance(offered, Offer)
    assert len(offered.block_ids) == 6
    # 40 tokens are two blocks and a half: first in the first layer, then in all.
    assert progress(port.orders) == [(0, 2, 1), (2, 2, 0)]
    while engine.loop.has_work:
        assert not engine.loop.step(), "nobody hears of a request that is computed for another engine"
        engine.loop.scheduler.check_integrity()
    assert progress(port.orders) == [(0, 2, 1), (2, 2, 0), (2, 5, 1), (5, 5, 0), (5, 6, 1), (6, 6, 0)]
    assert engine.loop.stats().num_kv_blocks_used == 6, "the export outlives the request"
    port.pending.append(TransferEnded(TRANSFER))
    engine.loop.step()
    assert engine.loop.stats().num_kv_blocks_used == 0


def test_cached_blocks_are_ready_at_once(model: Path) -> None:
    engine, port = exporting_engine(model)
    port.pending.append(asked_for(100))
    engine.loop.step()
    port.pending.append(TransferEnded(TRANSFER))
    engine.loop.step()
    port.orders.clear()
    port.pending.append(asked_for(100))
    engine.loop.step()
    assert isinstance(port.orders[0], Offer)
    assert port.orders[0].num_cached_tokens == 96
    assert progress(port.orders)[0] == (6, 6, 0)


def test_a_step_that_is_done_in_parts_tells_only_what_is_certain(model: Path) -> None:
    engine, port = exporting_engine(model)
    (transfers,) = (each for each in engine.loop._collaborators if isinstance(each, KVTransfers))
    port.pending.append(asked_for(100))
    forward = engine.loop.executor.submit

    def in_two_parts(plan: object) -> object:
        transfers.exports.layer_begins(0)  # a first attempt, which ends for want of memory
        return forward(plan)  # type: ignore[arg-type]

    engine.loop.executor.submit = in_two_parts  # type: ignore[method-assign, assignment]
    engine.loop.step()
    assert progress(port.orders) == [(6, 6, 0)]


def test_one_that_is_preempted_is_given_up(model: Path) -> None:
    engine, port = exporting_engine(model, max_num_batched_tokens=16)
    port.pending.append(asked_for(200))
    engine.loop.step()
    scheduler = engine.loop.scheduler
    (sequence,) = scheduler._running.sequences
    scheduler._preempt(sequence, 0.0)
    engine.loop.step()
    engine.loop.step()
    assert isinstance(port.orders[-1], Refuse)
    assert not engine.loop.has_work
    scheduler.check_integrity()


class TestTheWire:
    @pytest.fixture
    def ends(self, tmp_path: Path) -> Iterator[tuple[Sender, list[News], zmq.Socket[bytes]]]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind(f"ipc://{tmp_path}/sender")
        dealer.connect(f"ipc://{tmp_path}/sender")
        told: list[News] = []
        yield Sender(router, KVLayout("a", b"", "DRAM", 0, "m", ()), told.append, 0.0), told, dealer
        context.destroy(linger=0)

    def send(self, ends: tuple[Sender, list[News], zmq.Socket[bytes]], message: object) -> None:
        sender, _, dealer = ends
        dealer.send(TransferCodec().encode(message))  # type: ignore[arg-type]
        assert sender._socket.poll(5000)
        sender.read()

    def hear(self, ends: tuple[Sender, list[News], zmq.Socket[bytes]]) -> ToReceiver:
        assert ends[2].poll(5000)
        return TransferCodec().decode_to_receiver(ends[2].recv())

    def test_blocks_that_were_kept_too_long_are_not_vouched_for(
        self, ends: tuple[Sender, list[News], zmq.Socket[bytes]]
    ) -> None:
        sender, told, _ = ends
        self.send(ends, AskForLayout())
        assert isinstance(self.hear(ends), KVLayout)
        self.send(ends, AskForBlocks(7, request("r", [1] * 40), 2, True))
        (asked,) = told
        assert isinstance(asked, Asked)
        sender.obey(Offer(asked.transfer, (4, 5), 0), 1.0)
        sender.obey(Ready(asked.transfer, 2, 2, 0, None), 2.0)
        assert self.hear(ends) == BlocksOffered(7, (4, 5), 0)
        assert self.hear(ends) == BlocksReady(7, 2, 2, 0)
        sender.tick(2.0 + READ_TIMEOUT_S)
        assert self.hear(ends) == SenderAlive()
        assert len(sender) == 1
        sender.tick(3.0 + READ_TIMEOUT_S)
        assert told[-1] == TransferEnded(asked.transfer)
        assert self.hear(ends) == SenderAlive()
        self.send(ends, BlocksRead(7))
        assert self.hear(ends) == ReadConfirmed(7, was_kept=False)

    def test_a_receiver_that_has_gone_keeps_nothing(
        self, ends: tuple[Sender, list[News], zmq.Socket[bytes]]
    ) -> None:
        sender, told, dealer = ends
        self.send(ends, AskForBlocks(7, request("r", [1] * 40), 2, True))
        dealer.close(0)
        for second in range(1, 200):
            sender._socket.poll(10)
            sender.tick(float(second))
            if len(told) > 1:
                break
        assert told[-1] == TransferEnded(told[0].transfer)  # type: ignore[union-attr]
        assert not len(sender)
