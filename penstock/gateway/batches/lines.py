"""Reads a batch's lines from its file, and writes its output files. Runs in threads; knows no event loop."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from penstock.core.errors import InvalidRequest
from penstock.gateway.batches.batch import Batch, BatchDialect, BatchLine, Counts, LineError, LineResult
from penstock.gateway.blobs.blobs import Blobs, BlobWriter

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
