"""Moves KV between engines, as a collaborator of the engine's loop: exports, which other engines read from this
engine, and imports, for which requests wait before the scheduler. Knows no peer, socket or bytes.

KV is computed for a receiver by an ordinary request for a single token, which no client sees. Its blocks are exported
from its first step on. While a step runs, the receiver learns layer by layer what the step has written.

Requests that wait for an import hold up no other request. A request that waits can be aborted and has its deadline,
like any other. When the transfer fails, the request continues, and this engine computes the missing KV.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from penstock.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, PenstockError
from penstock.core.kv_transfer import KVSource
from penstock.core.messages import EngineStats, RequestRejected
from penstock.core.plan import Chunk, StepPlan, TokenEvent
from penstock.core.request import FinishReason, Request, SamplingParams
from penstock.engine.collaborator import Arrival, Collaborator, RecordedExchange
from penstock.engine.transfer.port import (
    Asked,
    CancelFetch,
    Fetch,
    Fetched,
    KVPort,
    LoopCalls,
    Marker,
    Offer,
    Ready,
    Refuse,
    TransferKey,
)
from penstock.scheduler.exchange import BlockExport, BlockImport


@dataclass(slots=True)
class _Prefill:
    transfer: TransferKey
    request_id: str
    num_blocks: int
    export: BlockExport | None = None


@dataclass(frozen=True, slots=True)
class _Running:
    """A chunk of the running step: the blocks that are whole in every layer before the step, and after it."""

    transfer: TransferKey
    num_whole_blocks: int
    num_begun_blocks: int


def _past_images(request: Request, num_tokens: int) -> int:
    """Return the length of a prefix of at least `num_tokens` that does not end within an image."""
    return max([num_tokens, *(image.end for image in request.images if image.start < num_tokens)])


class KVExports:
    def __init__(self, port: KVPort, exchange: RecordedExchange, block_size: int, calls: LoopCalls) -> None:
        self._port = port
        self._exchange = exchange
        self._block_size = block_size
        self._calls = calls
        self._prefills: dict[str, _Prefill] = {}  # that are not done, by request id
        self._exports: dict[TransferKey, BlockExport] = {}
        self._running: list[_Running] = []
        self._num_layers_begun = 0  # of the step that runs
        self._preempted: list[str] = []  # of the step that runs: requests that had begun before
        self._num_asked = 0

    def asked(self, news: Asked) -> None:
        if not news.computes:
            self._export_cached(news)
            return
        self._num_asked += 1
        request = self._prefill_request(news)
        self._prefills[request.id] = _Prefill(news.transfer, request.id, news.num_blocks)
        try:
            self._calls.add(request)
        except PenstockError as error:
            self._give_up(request.id, error.message)

    def over(self, transfer: TransferKey) -> None:
        """End an export whose receiver has read everything, or has gone."""
        for request_id in [each.request_id for each in self._prefills.values() if each.transfer == transfer]:
            del self._prefills[request_id]
            self._calls.abort(request_id)
        export = self._exports.pop(transfer, None)
        if export is not None:
            self._exchange.finish_export(export)

    def begin_step(self, plan: StepPlan) -> None:
        """Note a plan that is about to be executed."""
        if not self._prefills:
            return
        for chunk in plan.chunks:
            prefill = self._prefills.get(chunk.request_id)
            if prefill is not None:
                self._begin_chunk(prefill, chunk)

    def layer_begins(self, layer: int) -> None:
        """Note that the step has written all layers before this one. If memory is short, a step runs in several
        parts, each of which begins with the first layer. The blocks of such a step are reported only at its end."""
        if not self._running:
            return
        in_order = layer == self._num_layers_begun
        self._num_layers_begun = layer + 1 if in_order else -1
        if not layer or not in_order:
            return
        marker = self._calls.mark()
        for chunk in self._running:
            self._port.order(
                Ready(chunk.transfer, chunk.num_whole_blocks, chunk.num_begun_blocks, layer, marker)
            )

    def end_step(self, missing: tuple[Chunk, ...]) -> None:
        """End the step. The chunks in `missing` were not computed."""
        for request_id in self._preempted:  # only now, since the step had them in it
            self._give_up(request_id, "it was preempted")
        self._preempted.clear()
        if not self._running:
            return
        for chunk in missing:
            if chunk.request_id in self._prefills:
                self._give_up(chunk.request_id, "there was not enough memory")
        marker = self._calls.mark()
        alive = {prefill.transfer for prefill in self._prefills.values()}
        for running in self._running:
            if running.transfer in alive:
                num_blocks = running.num_begun_blocks
                self._port.order(Ready(running.transfer, num_blocks, num_blocks, 0, marker))
        self._running.clear()
        self._num_layers_begun = 0

    def take_events(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Take the events of requests that are computed for receivers. Returns the other events."""
        if not self._prefills:
            return events
        others = []
        for event in events:
            prefill = self._prefills.get(event.request_id)
            if prefill is None:
                others.append(event)
            elif event.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
                del self._prefills[event.request_id]
            elif event.finish_reason is not None:
                self._give_up(event.request_id, event.error or f"it ended by {event.finish_reason}")
        return others

    def take_rejections(self, rejections: list[RequestRejected]) -> list[RequestRejected]:
        others = []
        for rejected in rejections:
            if rejected.request_id in self._prefills:
                self._give_up(rejected.request_id, rejected.message)
            else:
                others.append(rejected)
        return others

    def _begin_chunk(self, prefill: _Prefill, chunk: Chunk) -> None:
        if chunk.begins:
            if prefill.export is not None:  # and now it begins anew, with other blocks
                self._preempted.append(prefill.request_id)
                return
            self._export_table(prefill, chunk)
        whole = min(chunk.start // self._block_size, prefill.num_blocks)
        begun = min((chunk.start + chunk.num_tokens) // self._block_size, prefill.num_blocks)
        self._running.append(_Running(prefill.transfer, whole, begun))

    def _export_table(self, prefill: _Prefill, chunk: Chunk) -> None:
        export = self._exchange.begin_export(chunk.new_block_ids[: prefill.num_blocks])
        prefill.export = self._exports[prefill.transfer] = export
        self._port.order(Offer(prefill.transfer, export.block_ids, chunk.start))
        num_cached = min(chunk.start // self._block_size, prefill.num_blocks)
        if num_cached:
            self._port.order(Ready(prefill.transfer, num_cached, num_cached, 0, self._calls.mark()))

    def _export_cached(self, news: Asked) -> None:
        export = self._exchange.export_prefix(self._prefill_request(news))
        self._exports[news.transfer] = export
        num_blocks = len(export.block_ids)
        self._port.order(Offer(news.transfer, export.block_ids, num_blocks * self._block_size))
        self._port.order(Ready(news.transfer, num_blocks, num_blocks, 0, self._calls.mark()))

    def _prefill_request(self, news: Asked) -> Request:
        """Return a request for the first blocks of a request, and one token more, since the last token is always
        computed."""
        wanted = news.request
        known = (*wanted.prompt_token_ids, *wanted.output_token_ids)
        num_tokens = _past_images(wanted, news.num_blocks * self._block_size + 1)
        return Request(
            id=f"prefill {self._num_asked} for another engine",
            prompt_token_ids=known[:num_tokens],
            images=tuple(image for image in wanted.images if image.start < num_tokens),
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            tenant=wanted.tenant,
            tier=wanted.tier,
            cache_salt=wanted.cache_salt,
            adapter=wanted.adapter,
        )

    def _give_up(self, request_id: str, reason: str) -> None:
        """Refuse the rest. Blocks that were offered stay as they are until the receiver has read them."""
        prefill = self._prefills.pop(request_id)
        self._calls.abort(request_id)
        self._port.order(Refuse(prefill.transfer, reason))


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class FetchCounters:
    """Counters since the engine started."""

    num_begun: int = 0
    num_failed: int = 0  # fetches that delivered too few blocks
    num_tokens: int = 0
    num_read_bytes: int = 0  # of blocks that senders had cached
    read_s: float = 0.0


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
        """Return the number of waiting requests."""
        return len(self._waiting) + len(self._served)

    def enter(self, request: Request, source: KVSource) -> None:
        """Let a request wait for its KV. Raises InvalidRequest or Overloaded, and then leaves no trace."""
        if request.id in self._waiting:
            raise InvalidRequest(f"A request with the id {request.id!r} is already being served.")
        if len(self) >= self._max_waiting:
            raise Overloaded(f"{len(self)} requests wait for KV of other engines.", retry_after_s=1.0)
        self._waiting[request.id] = _Waiting(request, source)

    def leave(self, request_id: str) -> None:
        """Remove a request. Its blocks are free once nothing writes to them any more."""
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
        self.counters.num_read_bytes += news.num_read_bytes
        self.counters.read_s += news.read_s
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
        """Return the requests whose wait is over, each with an error if it cannot continue. `may_wait`: other
        requests run, so that blocks may be freed for imports without room."""
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
        """Return a request's first event, in which tokens computed by another engine do not count as cached."""
        num_computed = self._computed_elsewhere.pop(event.request_id, 0)
        if event.num_cached_tokens is None or not num_computed:
            return event
        return msgspec.structs.replace(
            event, num_cached_tokens=max(0, event.num_cached_tokens - num_computed)
        )

    def _begin(self, waiting: _Waiting, *, may_wait: bool) -> bool:
        """Begin an import. Returns False when there is nothing to wait for."""
        request = waiting.request
        if not self._exchange.num_missing(request):
            return False
        begun = self._exchange.begin_import(request)
        if begun is None:
            # After the copies of the next plan, there is room.
            return may_wait or bool(self._imports) or self._exchange.lacks_copies
        waiting.begun = begun
        self._imports[begun.number] = begun, request.id
        self.counters.num_begun += 1
        self._port.order(
            Fetch(begun.number, waiting.source, request, begun.num_found, begun.block_ids, self._mark())
        )
        return True


class KVTransfers(Collaborator):
    """Manages requests that wait for KV of other engines, and KV that other engines read."""

    wakes_worker = True

    def __init__(
        self, port: KVPort, exchange: RecordedExchange, calls: LoopCalls, *, block_size: int, max_waiting: int
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
            kv_read_bytes=counters.num_read_bytes,
            kv_read_s=counters.read_s,
        )
