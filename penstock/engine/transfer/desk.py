"""What the engine's loop calls to let KV come and go: a borrowing and a lending desk behind one counter."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.core.errors import PenstockError
from penstock.core.kv_transfer import KVSource
from penstock.core.messages import RequestRejected
from penstock.core.plan import Chunk, StepPlan, TokenEvent
from penstock.core.request import Request
from penstock.engine.record import RecordedExchange
from penstock.engine.transfer.borrowing import BorrowingDesk
from penstock.engine.transfer.lending import LendingDesk
from penstock.engine.transfer.port import Asked, Fetched, KVPort, LoopCalls


class TransferDesk:
    def __init__(
        self,
        port: KVPort,
        exchange: RecordedExchange,
        calls: LoopCalls,
        *,
        block_size: int,
        max_waiting: int,
    ) -> None:
        """`max_waiting` bounds the requests that wait for KV."""
        self._port = port
        self.borrowing = BorrowingDesk(port, exchange, block_size, max_waiting=max_waiting, mark=calls.mark)
        self.lending = LendingDesk(port, exchange, block_size, calls)

    def __len__(self) -> int:
        """Requests that wait for KV."""
        return len(self.borrowing)

    def enter(self, request: Request, source: KVSource) -> None:
        self.borrowing.enter(request, source)

    def leave(self, request_id: str) -> None:
        self.borrowing.leave(request_id)

    def served(self, now: float, *, may_wait: bool) -> Iterator[tuple[Request, PenstockError | None]]:
        """Take in what the thread has to tell, and everyone whose wait is over."""
        for news in self._port.news():
            if isinstance(news, Fetched):
                self.borrowing.fetched(news)
            elif isinstance(news, Asked):
                self.lending.asked(news)
            else:
                self.lending.over(news.borrow)
        return self.borrowing.served(now, may_wait=may_wait)

    def begin_step(self, plan: StepPlan) -> None:
        self.lending.begin_step(plan)

    def end_step(self, missing: tuple[Chunk, ...]) -> None:
        self.lending.end_step(missing)

    def take_events(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Those for clients."""
        corrected = self.borrowing.corrected
        return [corrected(event) for event in self.lending.take_events(events)]

    def take_rejections(self, rejections: list[RequestRejected]) -> list[RequestRejected]:
        return self.lending.take_rejections(rejections)
