"""Writes the plan log: every scheduler call of a run, for replay and diagnosis. See `core.plan_log`."""

from __future__ import annotations

from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.plan import StepPlan, StepResult
from penstock.core.plan_log import AbortCall, AddCall, CommitCall, LogHeader, PlanCall, PlanLogEncoder
from penstock.core.request import Request


class PlanRecorder:
    def __init__(self, path: Path, header: LogHeader) -> None:
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(f"Cannot write the plan log {path}: {error.strerror}.") from error
        self._encoder = PlanLogEncoder()
        self._file.write(self._encoder.encode(header))

    def add(self, request: Request, now: float) -> None:
        self._file.write(self._encoder.encode(AddCall(now, request)))

    def abort(self, request_id: str, now: float) -> None:
        self._file.write(self._encoder.encode(AbortCall(now, request_id)))

    def plan(self, plan: StepPlan | None, now: float) -> None:
        self._file.write(self._encoder.encode(PlanCall(now, plan)))

    def commit(self, result: StepResult, now: float) -> None:
        self._file.write(self._encoder.encode(CommitCall(now, result)))

    def close(self) -> None:
        self._file.close()
