"""The types of batches, the protocol that an API implements for its batches, and their files: the lines of the
input, and the results."""

from __future__ import annotations

import codecs
import enum
import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Literal, Protocol

import msgspec

from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.identity import Principal
from penstock.gateway.blobs.blobs import Blobs, BlobWriter


class BatchStatus(enum.StrEnum):
    """validating → in_progress → finalizing → completed | expired; and from any of the first two,
    cancelling → cancelled. A batch that cannot be validated has failed."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"


ACTIVE = frozenset(
    {BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING}
)
CANCELLABLE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)

Outcome = Literal["succeeded", "errored", "canceled", "expired"]
Ending = Literal["canceled", "expired"]


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a batch's lines by outcome. Lines without an outcome have not run yet."""

    lines: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0

    @property
    def recorded(self) -> int:
        return self.succeeded + self.errored + self.canceled + self.expired


class LineError(msgspec.Struct, frozen=True):
    """Why a batch could not be validated."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Details(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields that the API of a batch shows, and that the runner only passes on."""

    input_file_id: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    completion_window: str | None = None
    metadata: dict[str, str] | None = None
    output_expires_after_s: float | None = None
    errors: list[LineError] = []


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    workspace_id: str
    kind: str  # the API whose dialect the batch is written in
    endpoint: str
    status: BatchStatus
    principal: Principal
    created_at: float  # Unix time, as all times here
    expires_at: float
    details: Details = Details()
    times: dict[str, float] = {}  # when it entered each status
    counts: Counts = Counts()
    ending: Ending | None = None  # why it stops before all its lines have run

    @property
    def is_active(self) -> bool:
        return self.status in ACTIVE

    @property
    def input_id(self) -> str:
        """Return the id of the batch's own copy of its lines, which no client can delete while the batch runs."""
        return f"{self.id}-input"

    @property
    def results_id(self) -> str:
        return f"{self.id}-results"

    def output_file_id(self, part: str) -> str:
        """Return the id of an output file. The id is the same after a restart, so that writing again replaces what a
        crash left."""
        return f"file-{hashlib.sha256(f'{self.id}:{part}'.encode()).hexdigest()[:24]}"


class BatchLine(msgspec.Struct, frozen=True):
    number: int  # from 1
    custom_id: str
    body: bytes  # JSON, as the endpoint takes it


class LineAnswer(msgspec.Struct, frozen=True):
    status_code: int
    body: bytes  # JSON, as the endpoint answers


class LineResult(msgspec.Struct, frozen=True):
    """The outcome of a line. A line that never ran has no answer."""

    number: int
    custom_id: str
    outcome: Outcome
    request_id: str = ""
    status_code: int = 0
    body: bytes = b""


class BatchDialect(Protocol):
    """The format of the batches of one API."""

    # Two files that the workspace sees, output and errors; or else one that it does not.
    lists_output_files: bool
    max_lines: int

    def read_line(self, batch: Batch, number: int, raw: bytes) -> BatchLine:
        """Raises InvalidRequest, with a param, for a line that spoils its batch."""
        ...

    async def answer(self, batch: Batch, line: BatchLine, request_id: str) -> LineAnswer:
        """Run one line as the live endpoint would. Raises the PenstockError that the endpoint raises."""
        ...

    def refusal(self, error: PenstockError, request_id: str) -> LineAnswer:
        """Return the answer of the endpoint to an error."""
        ...

    def result_line(self, batch: Batch, result: LineResult) -> bytes:
        """One line of output, without its end."""
        ...


def batch_values(batch: Batch) -> dict[str, Any]:
    """Return a batch as a row of its table."""
    return {
        "id": batch.id,
        "workspace_id": batch.workspace_id,
        "kind": batch.kind,
        "endpoint": batch.endpoint,
        "status": batch.status.value,
        "principal": msgspec.to_builtins(batch.principal),
        "details": msgspec.to_builtins(batch.details),
        "times": batch.times,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        "ending": batch.ending,
        **{f"num_{name}": count for name, count in msgspec.structs.asdict(batch.counts).items()},
    }


# msgspec builds the description of a class when the class is first used, and two database threads that do so at
# the same time can crash the process. This line builds the description at import.
msgspec.json.Decoder(Batch)


def batch_from_row(row: Any) -> Batch:
    # Names are a kind of str of their own.
    values = {str(name): value for name, value in row._mapping.items()}
    counts = {name: values.pop(f"num_{name}") for name in Counts.__struct_fields__}
    return msgspec.convert({**values, "counts": counts}, Batch)


MAX_LINE_BYTES = 16 << 20
MAX_BLANK_LINES = 100_000  # each costs time, and a file may consist of hundreds of millions
MAX_ERRORS_SHOWN = 100


def lines_of(batch: Batch, blobs: Blobs, dialect: BatchDialect) -> Iterator[BatchLine]:
    """Yield every line of a valid batch. Blank lines do not count."""
    for number, raw in _raw_lines(batch, blobs):
        yield dialect.read_line(batch, number, raw)


def validate(batch: Batch, blobs: Blobs, dialect: BatchDialect) -> tuple[int, list[LineError]]:
    """Return the number of lines, and their errors."""
    try:
        return _validate(batch, blobs, dialect)
    except _TooManyBlankLines:
        return 0, [LineError("too_many_lines", f"A batch may have at most {MAX_BLANK_LINES} blank lines.")]
    except _LineTooLong as error:
        return 0, [LineError("line_too_long", error.message, error.number)]


def _validate(batch: Batch, blobs: Blobs, dialect: BatchDialect) -> tuple[int, list[LineError]]:
    errors: list[LineError] = []
    custom_ids: set[str] = set()
    num_lines = 0
    for number, raw in _raw_lines(batch, blobs):
        num_lines = number
        if number > dialect.max_lines:
            message = f"A batch may have at most {dialect.max_lines} lines."
            return number, [LineError("too_many_lines", message, number)]
        try:
            line = dialect.read_line(batch, number, raw)
        except InvalidRequest as error:
            errors.append(LineError("invalid_line", error.message, number, error.param))
        else:
            if line.custom_id in custom_ids:
                message = f"The custom_id {line.custom_id[:64]!r} is used twice."
                errors.append(LineError("duplicate_custom_id", message, number, "custom_id"))
            custom_ids.add(line.custom_id)
        if len(errors) >= MAX_ERRORS_SHOWN:
            break
    if not num_lines:
        errors.append(LineError("empty_file", "The input file has no lines."))
    return num_lines, errors


class OutputWriter:
    """Writes the result of each line, in the order of the input. A line without a result gets the reason of the
    batch's early end. Writing again after a crash replaces what was there."""

    def __init__(self, batch: Batch, blobs: Blobs, dialect: BatchDialect) -> None:
        self._batch = batch
        self._blobs = blobs
        self._dialect = dialect
        self.num_bytes: dict[str, int] = {}  # of each file that has any, by the name of its part

    def write(self, read_results: Callable[[str, int], list[LineResult]]) -> Counts:
        counts = dict.fromkeys(("succeeded", "errored", "canceled", "expired"), 0)
        num_lines = 0
        with ExitStack() as stack:
            files: dict[str, BlobWriter] = {}
            for result in self._results(read_results):
                num_lines += 1
                counts[result.outcome] += 1
                part = self._part(result)
                if part not in files:
                    files[part] = stack.enter_context(self._blobs.writing(self.file_id(part)))
                data = self._dialect.result_line(self._batch, result) + b"\n"
                files[part].write(data)
                self.num_bytes[part] = self.num_bytes.get(part, 0) + len(data)
        return Counts(lines=num_lines, **counts)

    def file_id(self, part: str) -> str:
        lists = self._dialect.lists_output_files
        return self._batch.output_file_id(part) if lists else self._batch.results_id

    def _part(self, result: LineResult) -> str:
        if not self._dialect.lists_output_files or result.outcome == "succeeded":
            return "output"
        return "error"

    def _results(self, read_results: Callable[[str, int], list[LineResult]]) -> Iterator[LineResult]:
        recorded = _all_results(self._batch.id, read_results)
        upcoming = next(recorded, None)
        for line in lines_of(self._batch, self._blobs, self._dialect):
            if upcoming is not None and upcoming.number == line.number:
                yield upcoming
                upcoming = next(recorded, None)
            else:
                if self._batch.ending is None:
                    raise RuntimeError(f"line {line.number} of {self._batch.id} has no result")
                yield LineResult(line.number, line.custom_id, self._batch.ending)


def _all_results(batch_id: str, read_results: Callable[[str, int], list[LineResult]]) -> Iterator[LineResult]:
    first_line = 1
    while results := read_results(batch_id, first_line):
        yield from results
        first_line = results[-1].number + 1


class _TooManyBlankLines(Exception):
    """Raised for no batch that was found to be valid."""


class _LineTooLong(InvalidRequest):
    def __init__(self, number: int) -> None:
        super().__init__(f"A line may have at most {MAX_LINE_BYTES} bytes.")
        self.number = number


def _raw_lines(batch: Batch, blobs: Blobs) -> Iterator[tuple[int, bytes]]:
    number = num_blank = 0
    mark = codecs.BOM_UTF8  # which some editors write
    with blobs.open(batch.input_id) as file:
        while raw := file.readline(MAX_LINE_BYTES + 1):
            raw, mark = raw.removeprefix(mark), b""
            if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
                raise _LineTooLong(number + 1)
            if raw.isspace():
                num_blank += 1
                if num_blank > MAX_BLANK_LINES:
                    raise _TooManyBlankLines
                continue
            number += 1
            yield number, raw
