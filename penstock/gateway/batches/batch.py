"""The types of batches, and the protocol that an API implements for its batches. Does no I/O."""

from __future__ import annotations

import enum
import hashlib
from typing import Any, Literal, Protocol

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.identity import Principal


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
    values = {
        str(name): value for name, value in row._mapping.items()
    }  # names are a kind of str of their own
    counts = {name: values.pop(f"num_{name}") for name in Counts.__struct_fields__}
    return msgspec.convert({**values, "counts": counts}, Batch)
