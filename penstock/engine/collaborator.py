"""The protocol of optional parts that follow requests through the engine's loop. Imports no torch.

The collaborators of an engine are KV transfers between engines, LoRA adapters, grammars, the plan log and the watch
over parallel ranks. The loop calls each of them at the same points, and does not know which of them there are.

A collaborator may keep a waiting list before the scheduler: a request waits there until its KV has arrived, its
adapter is loaded or its grammar is compiled. Requests pass the collaborators in the loop's order.

`PlanRecorder` is the collaborator that writes the plan log: every scheduler call of a run, for replay and
diagnosis. See `core.plan_log`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from penstock.core.clock import Clock
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.kv_transfer import KVSource
from penstock.core.messages import EngineStats, RequestRejected
from penstock.core.plan import Chunk, Draft, StepPlan, StepResult, TokenEvent
from penstock.core.request import Request

if TYPE_CHECKING:
    from penstock.engine.grammar_masks import CompiledGrammar

from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.plan_log import (
    AbortCall,
    AddCall,
    BeginExportCall,
    BeginImportCall,
    CommitCall,
    ExchangeCall,
    FailCall,
    FinishExportCall,
    FinishImportCall,
    LogHeader,
    PlanCall,
    encode_record,
)
from penstock.scheduler.exchange import BlockExchange, BlockExport, BlockImport

NO_ADAPTERS = "This engine cannot apply LoRA adapters."
NO_IMAGES = "This engine's model takes text only, and the request has an image."
NO_GRAMMARS = "This engine cannot constrain answers: it has no tokenizer that grammars could be matched with."


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request on its way to the scheduler, with the results of collaborators for it."""

    request: Request
    kv_source: KVSource | None = None
    grammar: CompiledGrammar | None = None


class Collaborator:
    """An optional part of an engine. Every method does nothing by default: a collaborator overrides what it needs."""

    # True if a socket wakes the worker when a waiting request can continue, so that the worker need not poll.
    wakes_worker = False

    def __len__(self) -> int:
        """Return the number of requests on the waiting list."""
        return 0

    def must_wait(self, arrival: Arrival) -> bool:
        """Return whether this request has to pass this collaborator's waiting list."""
        return False

    def enter(self, arrival: Arrival, now: float) -> None:
        """Put a request on the waiting list. Raises InvalidRequest or Overloaded; the request is then forgotten."""

    def ready(self, now: float, *, is_idle: bool) -> Iterable[tuple[Arrival, PenstockError | None]]:
        """Take the requests off the waiting list that can continue, or must end with an error. `is_idle`: the engine
        has nothing to compute, so this call may sleep for a moment."""
        return ()

    def forget(self, request_id: str) -> None:
        """A request has ended, was aborted or was rejected. Unknown ids are ignored."""

    def before_step(self) -> None:
        """Raise if the engine cannot continue."""

    def added(self, request: Request, now: float) -> None:
        """The scheduler has accepted a request."""

    def aborting(self, request_id: str, now: float) -> None:
        """The scheduler is about to be told that a request is aborted."""

    def planned(self, plan: StepPlan | None, drafts: Mapping[str, Draft], now: float) -> None:
        """The scheduler has answered a call of `plan`, with these drafts."""

    def executing(self, plan: StepPlan) -> None:
        """The executor is about to run a plan."""

    def executed(self, missing: tuple[Chunk, ...]) -> None:
        """The executor has run or queued a plan, except for the chunks in `missing`."""

    def failing(self, chunk: Chunk, error: str, now: float) -> None:
        """The scheduler is about to be told that a chunk was not computed."""

    def committed(self, result: StepResult, now: float) -> None:
        """The scheduler has taken the result of a step."""

    def for_clients(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Return the events for clients, which may differ from the scheduler's."""
        return events

    def rejections_for_clients(self, rejections: list[RequestRejected]) -> list[RequestRejected]:
        """Return the rejections for clients."""
        return rejections

    def add_stats(self, stats: EngineStats) -> EngineStats:
        """Return the engine's figures with the figures of this collaborator."""
        return stats

    def close(self) -> None:
        """Close threads and files."""


class Refusal(Collaborator):
    """Stands in for a collaborator that this engine does not have: refuses the requests that need it."""

    def __init__(self, message: str, is_needed: Callable[[Request], bool]) -> None:
        self._message = message
        self._is_needed = is_needed

    def must_wait(self, arrival: Arrival) -> bool:
        return self._is_needed(arrival.request)

    def enter(self, arrival: Arrival, now: float) -> None:
        raise InvalidRequest(self._message)


class StepWatch(Collaborator):
    """Calls a function before every step, which raises when the executor cannot continue."""

    def __init__(self, check: Callable[[], None]) -> None:
        self.before_step = check  # type: ignore[method-assign]


class MemoryWatch(Collaborator):
    """Adds a device's memory to the engine's figures. The driver is asked once a second: figures leave more often,
    and the driver may take a millisecond."""

    INTERVAL_S = 1.0

    def __init__(self, read: Callable[[], tuple[int, int]], clock: Clock) -> None:
        """`read` returns the free bytes of the device, and all of its bytes."""
        self._read = read
        self._clock = clock
        self._next_at_s = clock.now()
        self._free = self._total = 0

    def add_stats(self, stats: EngineStats) -> EngineStats:
        now = self._clock.now()
        if now >= self._next_at_s:
            self._next_at_s = now + self.INTERVAL_S
            self._free, self._total = self._read()
        return msgspec.structs.replace(
            stats, gpu_memory_bytes=self._total, gpu_memory_used_bytes=self._total - self._free
        )


def refuse_adapters() -> Refusal:
    return Refusal(NO_ADAPTERS, lambda request: request.adapter is not None)


def refuse_grammars() -> Refusal:
    return Refusal(NO_GRAMMARS, lambda request: request.sampling.grammar is not None)


def refuse_images() -> Refusal:
    return Refusal(NO_IMAGES, lambda request: bool(request.images))


class PlanRecorder(Collaborator):
    def __init__(self, path: Path, header: LogHeader) -> None:
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(f"Cannot write the plan log {path}: {error.strerror}.") from error
        self._file.write(encode_record(header))

    def added(self, request: Request, now: float) -> None:
        self._file.write(encode_record(AddCall(now, request)))

    def aborting(self, request_id: str, now: float) -> None:
        self._file.write(encode_record(AbortCall(now, request_id)))

    def failing(self, chunk: Chunk, error: str, now: float) -> None:
        self._file.write(encode_record(FailCall(now, chunk, error)))

    def planned(self, plan: StepPlan | None, drafts: Mapping[str, Draft], now: float) -> None:
        self._file.write(encode_record(PlanCall(now, plan, dict(drafts))))

    def committed(self, result: StepResult, now: float) -> None:
        self._file.write(encode_record(CommitCall(now, result)))

    def exchange(self, call: ExchangeCall) -> None:
        self._file.write(encode_record(call))

    def close(self) -> None:
        self._file.close()


class RecordedExchange:
    """Wraps a scheduler's block exchange, and records its calls."""

    def __init__(self, exchange: BlockExchange, clock: Clock, recorder: PlanRecorder | None) -> None:
        self._exchange = exchange
        self._clock = clock
        self._recorder = recorder

    def num_missing(self, request: Request) -> int:
        return self._exchange.num_missing(request)

    @property
    def lacks_copies(self) -> bool:
        return self._exchange.lacks_copies

    def begin_import(self, request: Request) -> BlockImport | None:
        begun = self._exchange.begin_import(request)
        self._record(BeginImportCall(self._clock.now(), request))
        return begun

    def finish_import(self, begun: BlockImport, num_filled: int) -> None:
        self._exchange.finish_import(begun.number, num_filled)
        self._record(FinishImportCall(self._clock.now(), begun.number, num_filled))

    def begin_export(self, block_ids: tuple[int, ...]) -> BlockExport:
        export = self._exchange.begin_export(block_ids)
        self._record(BeginExportCall(self._clock.now(), block_ids))
        return export

    def export_prefix(self, request: Request) -> BlockExport:
        export = self._exchange.export_prefix(request)
        self._record(BeginExportCall(self._clock.now(), request=request))
        return export

    def finish_export(self, export: BlockExport) -> None:
        self._exchange.finish_export(export.number)
        self._record(FinishExportCall(self._clock.now(), export.number))

    def _record(self, call: ExchangeCall) -> None:
        if self._recorder is not None:
            self._recorder.exchange(call)
