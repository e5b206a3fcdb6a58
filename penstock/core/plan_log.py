"""A log of every call that crossed the scheduler's seam, so that a run can be replayed and its plans
compared.

JSON lines, one struct per line, tagged by `call`: a `LogHeader` with all that is needed to build the same
scheduler, then calls in the order they were made. A call that raised changed nothing and is not logged. Times
are those of the recording clock; only their differences mean anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec

from penstock.core.engine_config import SchedulerConfig
from penstock.core.errors import UsageError
from penstock.core.plan import Chunk, StepPlan, StepResult
from penstock.core.request import Request


class LogHeader(msgspec.Struct, frozen=True, kw_only=True, tag_field="call", tag="header"):
    config: SchedulerConfig
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool
    max_pinned_fraction: float
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_host_blocks: int = 0
    block_copy_s: float | None = None
    tile_tokens: int = 1
    halves_blocks: bool = False


class AddCall(msgspec.Struct, frozen=True, tag_field="call", tag="add"):
    now: float
    request: Request


class AbortCall(msgspec.Struct, frozen=True, tag_field="call", tag="abort"):
    now: float
    request_id: str


class FailCall(msgspec.Struct, frozen=True, tag_field="call", tag="fail"):
    now: float
    chunk: Chunk
    error: str


class PlanCall(msgspec.Struct, frozen=True, tag_field="call", tag="plan"):
    """`plan` is what the scheduler answered."""

    now: float
    plan: StepPlan | None


class CommitCall(msgspec.Struct, frozen=True, tag_field="call", tag="commit"):
    """The plan committed is the recorded one whose step_id is `result.step_id`."""

    now: float
    result: StepResult


class BeginImportCall(msgspec.Struct, frozen=True, tag_field="call", tag="begin_import"):
    """Room was asked for, for KV of a request that another engine has."""

    now: float
    request: Request


class FinishImportCall(msgspec.Struct, frozen=True, tag_field="call", tag="finish_import"):
    now: float
    number: int
    num_filled: int


class BeginExportCall(msgspec.Struct, frozen=True, tag_field="call", tag="begin_export"):
    """Blocks of a running request, or else what is cached of a request, are kept for another engine."""

    now: float
    block_ids: tuple[int, ...] = ()
    request: Request | None = None


class FinishExportCall(msgspec.Struct, frozen=True, tag_field="call", tag="finish_export"):
    now: float
    number: int


ExchangeCall: TypeAlias = BeginImportCall | FinishImportCall | BeginExportCall | FinishExportCall
SchedulerCall: TypeAlias = AddCall | AbortCall | FailCall | PlanCall | CommitCall | ExchangeCall
LogRecord: TypeAlias = LogHeader | SchedulerCall


class PlanLogEncoder:
    """Turns records into lines, each with its newline. Log-probabilities and the contents of embeddings are left
    out: no plan depends on them."""

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()

    def encode(self, record: LogRecord) -> bytes:
        if isinstance(record, CommitCall):
            record = CommitCall(record.now, _without_numbers(record.result))
        return self._encoder.encode(record) + b"\n"


def _without_numbers(result: StepResult) -> StepResult:
    if all(token.logprobs is None and token.embedding is None for token in result.sampled):
        return result
    sampled = (
        msgspec.structs.replace(token, logprobs=None, embedding=None if token.embedding is None else b"")
        for token in result.sampled
    )
    return msgspec.structs.replace(result, sampled=tuple(sampled))


def read_plan_log(lines: Iterable[bytes]) -> tuple[LogHeader, Iterator[SchedulerCall]]:
    """The header, and the calls as they are read. `lines` may be a file opened in binary mode."""
    records = _decode(lines)
    header = next(records, None)
    if not isinstance(header, LogHeader):
        raise UsageError("The plan log does not begin with a header.", hint="Was the file cut at its start?")
    return header, _calls(records)


def _decode(lines: Iterable[bytes]) -> Iterator[LogRecord]:
    decoder: msgspec.json.Decoder[LogRecord] = msgspec.json.Decoder(LogRecord)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise UsageError(
                f"Line {number} of the plan log cannot be read: {error}.",
                hint="The last line of a log is cut when its process was killed; remove it.",
            ) from None


def _calls(records: Iterable[LogRecord]) -> Iterator[SchedulerCall]:
    for record in records:
        if isinstance(record, LogHeader):
            raise UsageError("The plan log holds a second header.", hint="Keep one run per file.")
        yield record
