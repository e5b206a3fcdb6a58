"""The plan log holds every call of a scheduler, so that a run can be replayed and its plans compared. Also the lines
that the plan log and the dispatch log share.

JSON lines, one struct per line, tagged by `call`: a `LogHeader` with all that is needed to build the same scheduler,
then calls in the order they were made. A call that raised changed nothing and is not logged. Times are those of the
recording clock; only their differences mean anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, TypeVar

import msgspec

from penstock.core.engine_config import SchedulerConfig
from penstock.core.errors import PenstockError, UsageError, error_from_code
from penstock.core.plan import Chunk, Draft, StateSlots, StepPlan, StepResult, WindowLayout
from penstock.core.request import Request

T = TypeVar("T")
H = TypeVar("H")
R = TypeVar("R")


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
    states: StateSlots | None = None  # of a model whose layers have a fixed state
    windows: WindowLayout | None = None  # of a model whose layers have windows
    image_cache_tokens: int = 0
    masks_late: bool = False
    starts_late: bool = False
    num_ranks: int = 1  # with data-parallel attention: that each have blocks and slots of these numbers


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
    """A call of `plan`, with the drafts that the scheduler was given, by request, and its answer."""

    now: float
    plan: StepPlan | None
    drafts: dict[str, Draft] = {}


class CommitCall(msgspec.Struct, frozen=True, tag_field="call", tag="commit"):
    """A call of `commit`. Its plan is the recorded plan whose step_id is `result.step_id`."""

    now: float
    result: StepResult


class BeginImportCall(msgspec.Struct, frozen=True, tag_field="call", tag="begin_import"):
    """A request for blocks to be filled with KV of another engine."""

    now: float
    request: Request


class FinishImportCall(msgspec.Struct, frozen=True, tag_field="call", tag="finish_import"):
    now: float
    number: int
    num_filled: int


class BeginExportCall(msgspec.Struct, frozen=True, tag_field="call", tag="begin_export"):
    """Blocks of a running request, or the cached blocks of a request, are kept for another engine."""

    now: float
    block_ids: tuple[int, ...] = ()
    request: Request | None = None


class FinishExportCall(msgspec.Struct, frozen=True, tag_field="call", tag="finish_export"):
    now: float
    number: int


ExchangeCall: TypeAlias = BeginImportCall | FinishImportCall | BeginExportCall | FinishExportCall
SchedulerCall: TypeAlias = AddCall | AbortCall | FailCall | PlanCall | CommitCall | ExchangeCall
LogRecord: TypeAlias = LogHeader | SchedulerCall


def encode_record(record: LogRecord) -> bytes:
    """Return the line of a record, with its newline, without log-probabilities and the contents of embeddings and
    images: no plan depends on them."""
    if isinstance(record, CommitCall):
        record = CommitCall(record.now, _without_numbers(record.result))
    elif isinstance(record, AddCall | BeginImportCall | BeginExportCall) and record.request is not None:
        record = msgspec.structs.replace(record, request=record.request.without_image_data())
    return log_line(record)


def _without_numbers(result: StepResult) -> StepResult:
    if not result.scored and all(
        token.logprobs is None and token.embedding is None and not token.accepted_logprobs
        for token in result.sampled
    ):
        return result
    sampled = (
        msgspec.structs.replace(
            token, logprobs=None, embedding=None if token.embedding is None else b"", accepted_logprobs=()
        )
        for token in result.sampled
    )
    failed = tuple(chunk for chunk in result.scored if chunk.error is not None)
    return msgspec.structs.replace(result, sampled=tuple(sampled), scored=failed)


def read_plan_log(lines: Iterable[bytes]) -> tuple[LogHeader, Iterator[SchedulerCall]]:
    """Return the header, and the calls as they are read. `lines` may be a file opened in binary mode."""
    return read_log(lines, _DECODE_HEADER, _DECODE_CALL, "plan log")


def read_log(
    lines: Iterable[bytes],
    decode_header: Callable[[bytes], H],
    decode_record: Callable[[bytes], R],
    name: str,
) -> tuple[H, Iterator[R]]:
    """Return the header of a log of JSON lines, and its records as they are read. Empty lines are skipped."""
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())

    def decoded(where: str, line: bytes, decode: Callable[[bytes], T]) -> T:
        try:
            return decode(line)
        except msgspec.DecodeError as error:
            raise UsageError(
                f"{where} of the {name} cannot be read: {error}.",
                hint="The last line of a log is cut when its process was killed; remove it. A log begins with its "
                "header and holds one run.",
            ) from None

    header = decoded("The header", next(numbered, (1, b""))[1], decode_header)
    return header, (decoded(f"Line {number}", line, decode_record) for number, line in numbered)


def log_line(record: object) -> bytes:
    """Return a record of any log as a line, with its newline."""
    return encode_logged(record) + b"\n"


class LoggedError(msgspec.Struct, frozen=True):
    code: str
    message: str
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: PenstockError) -> LoggedError:
        return cls(error.code, error.message, error.retry_after_s)

    def rebuild(self) -> PenstockError:
        return error_from_code(self.code, self.message, retry_after_s=self.retry_after_s)


def _encode_error(value: object) -> object:
    if isinstance(value, PenstockError):
        return LoggedError.of(value)
    raise NotImplementedError(f"a {type(value).__name__} cannot be logged")


encode_logged = msgspec.json.Encoder(enc_hook=_encode_error).encode
_DECODE_HEADER = msgspec.json.Decoder(LogHeader).decode
_DECODE_CALL: Callable[[bytes], SchedulerCall] = msgspec.json.Decoder(SchedulerCall).decode
