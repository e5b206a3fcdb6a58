"""KV transfers between engines, as a collaborator of the engine's loop."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.messages import EngineStats, RequestRejected
from penstock.core.plan import Chunk, StepPlan, TokenEvent
from penstock.engine.collaborator import Arrival, Collaborator
from penstock.engine.record import RecordedExchange
from penstock.engine.transfer.exports import KVExports
from penstock.engine.transfer.imports import KVImports
from penstock.engine.transfer.port import Asked, Fetched, KVPort, LoopCalls


class KVTransfers(Collaborator):
    """Requests that wait for KV of other engines, and KV that other engines read here."""

    wakes_worker = True

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
        self.imports = KVImports(port, exchange, block_size, max_waiting=max_waiting, mark=calls.mark)
        self.exports = KVExports(port, exchange, block_size, calls)

    def __len__(self) -> int:
        return len(self.imports)

    def must_wait(self, arrival: Arrival) -> bool:
        return arrival.kv_source is not None and arrival.request.pooling is None

    def enter(self, arrival: Arrival, now: float) -> None:
        assert arrival.kv_source is not None
        self.imports.enter(arrival.request, arrival.kv_source)

    def forget(self, request_id: str) -> None:
        self.imports.leave(request_id)

    def ready(self, now: float, *, is_idle: bool) -> Iterator[tuple[Arrival, PenstockError | None]]:
        for news in self._port.news():
            if isinstance(news, Fetched):
                self.imports.fetched(news)
            elif isinstance(news, Asked):
                self.exports.asked(news)
            else:
                self.exports.over(news.transfer)
        for request, error in self.imports.served(now, may_wait=not is_idle):
            yield Arrival(request), error

    def executing(self, plan: StepPlan) -> None:
        self.exports.begin_step(plan)

    def executed(self, missing: tuple[Chunk, ...]) -> None:
        self.exports.end_step(missing)

    def for_clients(self, events: list[TokenEvent]) -> list[TokenEvent]:
        corrected = self.imports.corrected
        return [corrected(event) for event in self.exports.take_events(events)]

    def rejections_for_clients(self, rejections: list[RequestRejected]) -> list[RequestRejected]:
        return self.exports.take_rejections(rejections)

    def add_stats(self, stats: EngineStats) -> EngineStats:
        counters = self.imports.counters
        return msgspec.structs.replace(
            stats,
            kv_fetches=counters.num_begun,
            kv_fetches_failed=counters.num_failed,
            kv_fetched_tokens=counters.num_tokens,
        )
