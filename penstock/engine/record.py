"""Writes the plan log: every scheduler call of a run, for replay and diagnosis. See `core.plan_log`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.core.clock import Clock
from penstock.core.errors import ConfigError
from penstock.core.plan import Chunk, Draft, StepPlan, StepResult
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
from penstock.core.request import Request
from penstock.engine.collaborator import Collaborator
from penstock.scheduler.exchange import BlockExchange, BlockExport, BlockImport


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
