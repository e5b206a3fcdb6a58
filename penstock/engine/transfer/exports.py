"""Exports: KV that other engines read from this one, computed for them if necessary. Knows no socket.

KV is computed for a receiver by an ordinary request for a single token, which no client sees. Its blocks are exported
from its first step on, and the receiver is told layer by layer what each step has written, while the step runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.errors import PenstockError
from penstock.core.messages import RequestRejected
from penstock.core.plan import Chunk, StepPlan, TokenEvent
from penstock.core.request import FinishReason, Request, SamplingParams
from penstock.engine.record import RecordedExchange
from penstock.engine.transfer.port import Asked, KVPort, LoopCalls, Offer, Ready, Refuse, TransferKey
from penstock.scheduler.exchange import BlockExport


@dataclass(slots=True)
class _Prefill:
    transfer: TransferKey
    request_id: str
    num_blocks: int
    export: BlockExport | None = None


@dataclass(frozen=True, slots=True)
class _Running:
    """A chunk of the step that runs: what is whole in every layer before it, and what will be after it."""

    transfer: TransferKey
    num_whole_blocks: int
    num_begun_blocks: int


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
        """The receiver has read everything, or has gone."""
        for request_id in [each.request_id for each in self._prefills.values() if each.transfer == transfer]:
            del self._prefills[request_id]
            self._calls.abort(request_id)
        export = self._exports.pop(transfer, None)
        if export is not None:
            self._exchange.finish_export(export)

    def begin_step(self, plan: StepPlan) -> None:
        """A plan is about to be executed."""
        if not self._prefills:
            return
        for chunk in plan.chunks:
            prefill = self._prefills.get(chunk.request_id)
            if prefill is not None:
                self._begin_chunk(prefill, chunk)

    def layer_begins(self, layer: int) -> None:
        """The step has written all layers before this one. A step that is done in several parts, for want of memory,
        begins with the first layer again: what it has written then shows only at its end."""
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
        """`missing` could not be computed."""
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
        """Take the events of requests that are computed for receivers; returns the others."""
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
        """The first blocks of a request, and one token more, since the last one is always computed."""
        wanted = news.request
        known = (*wanted.prompt_token_ids, *wanted.output_token_ids)
        return Request(
            id=f"prefill {self._num_asked} for another engine",
            prompt_token_ids=known[: news.num_blocks * self._block_size + 1],
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
