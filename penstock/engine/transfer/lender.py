"""The lender's end of the wire to engines that borrow KV. Runs in the transfer thread; decides nothing about blocks.

A loan ends when the borrower gives it back, cancels it, has gone, or keeps it too long. The borrower's word that it
has read everything is answered with whether the loan was still there: only then may it trust what it read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import zmq

from penstock.core.kv_transfer import (
    BlocksReady,
    Borrow,
    CancelBorrow,
    CannotLend,
    GiveBack,
    Introduce,
    KVLayout,
    LenderAlive,
    Lent,
    Returned,
    ToBorrower,
    TransferCodec,
)
from penstock.engine.transfer.port import Asked, BorrowKey, Lend, News, Over, Ready, Refuse

ALIVE_INTERVAL_S = 0.5
# Between the last block's being ready and its being read: far more than any transfer takes.
LOAN_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Loan:
    num_blocks: int | None = None  # None until blocks are lent
    ready_s: float | None = None  # since when there is nothing more to come


class Lender:
    def __init__(
        self, socket: zmq.Socket[bytes], layout: KVLayout, tell: Callable[[News], None], now: float
    ) -> None:
        """`socket` is a ROUTER that is bound; `tell` passes news on to the loop."""
        self._socket = socket
        self._layout = layout
        self._tell = tell
        self._codec = TransferCodec()
        self._loans: dict[BorrowKey, _Loan] = {}
        self._alive_s = now

    def __len__(self) -> int:
        return len(self._loans)

    def read(self) -> None:
        """Handle all messages that are there."""
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            borrower, data = self._socket.recv_multipart()
            self._handle(borrower, data)

    def obey(self, order: Lend | Ready | Refuse, now: float) -> None:
        loan = self._loans.get(order.borrow)
        if loan is None:  # the borrower has gone, and the loop is being told
            return
        borrower, fetch = order.borrow
        match order:
            case Lend():
                loan.num_blocks = len(order.block_ids)
                self._send(borrower, Lent(fetch, order.block_ids, order.num_cached_tokens))
            case Ready():
                if order.marker is not None:
                    order.marker.synchronize()
                if order.num_whole_blocks == loan.num_blocks:
                    loan.ready_s = now
                self._send(
                    borrower,
                    BlocksReady(fetch, order.num_whole_blocks, order.num_begun_blocks, order.num_layers),
                )
            case Refuse():
                loan.ready_s = now
                self._send(borrower, CannotLend(fetch, order.reason))

    def tick(self, now: float) -> None:
        """Tell borrowers that we live, and end loans that were kept too long. Call it now and then."""
        if now - self._alive_s < ALIVE_INTERVAL_S:
            return
        self._alive_s = now
        for borrower in {borrower for borrower, _ in self._loans}:
            self._send(borrower, LenderAlive())
        for key, loan in tuple(self._loans.items()):
            if loan.ready_s is not None and now - loan.ready_s > LOAN_TIMEOUT_S:
                self._end(key)

    def _handle(self, borrower: bytes, data: bytes) -> None:
        match self._codec.decode_to_lender(data):
            case Introduce():
                self._send(borrower, self._layout)
            case Borrow() as message:
                key = borrower, message.fetch
                self._loans[key] = _Loan()
                self._tell(Asked(key, message.request, message.num_blocks, message.computes))
            case GiveBack(fetch=fetch):
                was_kept = self._end((borrower, fetch))
                self._send(borrower, Returned(fetch, was_kept))
            case CancelBorrow(fetch=fetch):
                self._end((borrower, fetch))

    def _end(self, key: BorrowKey) -> bool:
        if self._loans.pop(key, None) is None:
            return False
        self._tell(Over(key))
        return True

    def _send(self, borrower: bytes, message: ToBorrower) -> None:
        try:
            self._socket.send_multipart((borrower, self._codec.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            for key in [key for key in self._loans if key[0] == borrower]:
                self._end(key)
