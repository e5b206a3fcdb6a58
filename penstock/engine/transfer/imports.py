"""Imports: requests that wait for KV of another engine, before the scheduler. Knows no peer and no bytes.

Other requests do not wait with them. A request that waits can be aborted and has its deadline, like any other. When
the transfer fails, the request goes on: what did not come is computed here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from penstock.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, PenstockError
from penstock.core.kv_transfer import KVSource
from penstock.core.plan import TokenEvent
from penstock.core.request import Request
from penstock.engine.record import RecordedExchange
from penstock.engine.transfer.port import CancelFetch, Fetch, Fetched, KVPort, Marker
from penstock.scheduler.exchange import BlockImport

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class FetchCounters:
    """Since the engine started."""

    num_begun: int = 0
    num_failed: int = 0  # of which not all came
    num_tokens: int = 0


@dataclass(slots=True)
class _Waiting:
    request: Request
    source: KVSource
    begun: BlockImport | None = None  # None while there is no room


class KVImports:
    def __init__(
        self,
        port: KVPort,
        exchange: RecordedExchange,
        block_size: int,
        *,
        max_waiting: int,
        mark: Callable[[], Marker | None],
    ) -> None:
        self._port = port
        self._exchange = exchange
        self._block_size = block_size
        self._max_waiting = max_waiting
        self._mark = mark
        self._waiting: dict[str, _Waiting] = {}  # in order of arrival
        self._imports: dict[int, tuple[BlockImport, str]] = {}  # being filled, and for which request
        self._served: list[Request] = []
        self._computed_elsewhere: dict[str, int] = {}  # tokens, of requests that have no output yet
        self.counters = FetchCounters()

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting) + len(self._served)

    def enter(self, request: Request, source: KVSource) -> None:
        """Raises InvalidRequest or Overloaded, and then leaves no trace."""
        if request.id in self._waiting:
            raise InvalidRequest(f"A request with the id {request.id!r} is already being served.")
        if len(self) >= self._max_waiting:
            raise Overloaded(f"{len(self)} requests wait for KV of other engines.", retry_after_s=1.0)
        self._waiting[request.id] = _Waiting(request, source)

    def leave(self, request_id: str) -> None:
        """Its blocks are free once nothing is written to them any more."""
        self._computed_elsewhere.pop(request_id, None)
        self._served = [request for request in self._served if request.id != request_id]
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None and waiting.begun is not None:
            self._port.order(CancelFetch(waiting.begun.number))

    def fetched(self, news: Fetched) -> None:
        begun, request_id = self._imports.pop(news.number)
        self._exchange.finish_import(begun, news.num_filled)
        if news.trouble is not None:
            self.counters.num_failed += 1
            logger.warning("KV of %s did not all come from another engine: %s", request_id, news.trouble)
        self.counters.num_tokens += news.num_filled * self._block_size
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.begun is not begun:
            return
        del self._waiting[request_id]
        self._served.append(waiting.request)
        first_token = begun.num_found * self._block_size
        num_fetched = news.num_filled * self._block_size
        num_cached_there = min(max(0, news.num_cached_tokens - first_token), num_fetched)
        self._computed_elsewhere[request_id] = num_fetched - num_cached_there

    def served(self, now: float, *, may_wait: bool) -> Iterator[tuple[Request, PenstockError | None]]:
        """Requests whose wait is over, each with an error if it cannot go on. `may_wait`: requests run here, so that
        blocks may come free for imports that have none."""
        for waiting in tuple(self._waiting.values()):
            deadline_s = waiting.request.deadline_s
            if deadline_s is not None and deadline_s <= now:
                self.leave(waiting.request.id)
                yield (
                    waiting.request,
                    DeadlineExceeded("The request's deadline passed before its KV was there."),
                )
            elif waiting.begun is None and not self._begin(waiting, may_wait=may_wait):
                del self._waiting[waiting.request.id]
                yield waiting.request, None
        served, self._served = self._served, []
        for request in served:
            yield request, None

    def corrected(self, event: TokenEvent) -> TokenEvent:
        """A request's first event, in which what another engine computed for it does not count as cached."""
        num_computed = self._computed_elsewhere.pop(event.request_id, 0)
        if event.num_cached_tokens is None or not num_computed:
            return event
        return msgspec.structs.replace(
            event, num_cached_tokens=max(0, event.num_cached_tokens - num_computed)
        )

    def _begin(self, waiting: _Waiting, *, may_wait: bool) -> bool:
        """False when there is nothing to wait for."""
        request = waiting.request
        if not self._exchange.num_missing(request):
            return False
        begun = self._exchange.begin_import(request)
        if begun is None:
            return may_wait or bool(self._imports)
        waiting.begun = begun
        self._imports[begun.number] = begun, request.id
        self.counters.num_begun += 1
        self._port.order(
            Fetch(
                begun.number,
                waiting.source,
                request,
                begun.num_found,
                begun.block_ids,
                self._mark(),
            )
        )
        return True
