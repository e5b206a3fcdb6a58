"""The sending end of KV transfers. Runs in the transfer thread; decides nothing about blocks.

A transfer ends when the receiver has read everything, cancels it, has gone, or takes too long. When the receiver says
that it has read everything, the sender answers whether the blocks were still kept: only then may the receiver trust
what it read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import zmq

from penstock.core.kv_transfer import (
    AskForBlocks,
    BlocksOffered,
    BlocksRead,
    BlocksReady,
    CancelTransfer,
    CannotSend,
    Introduce,
    KVLayout,
    ReadConfirmed,
    SenderAlive,
    ToReceiver,
    TransferCodec,
)
from penstock.engine.transfer.port import Asked, News, Offer, Over, Ready, Refuse, TransferKey

ALIVE_INTERVAL_S = 0.5
# Between the last block's being ready and its being read: far more than any transfer takes.
READ_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Sending:
    num_blocks: int | None = None  # None until blocks are offered
    ready_s: float | None = None  # since when there is nothing more to come


class Sender:
    def __init__(
        self, socket: zmq.Socket[bytes], layout: KVLayout, tell: Callable[[News], None], now: float
    ) -> None:
        """`socket` is a ROUTER that is bound; `tell` passes news on to the loop."""
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
        """Tell receivers that we live, and end exports that were kept too long. Call it now and then."""
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
            case Introduce():
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
        self._tell(Over(key))
        return True

    def _send(self, receiver: bytes, message: ToReceiver) -> None:
        try:
            self._socket.send_multipart((receiver, self._codec.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            for key in [key for key in self._exports if key[0] == receiver]:
                self._end(key)
