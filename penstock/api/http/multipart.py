"""Forms with a file in them, read piece by piece: the file goes on to its upload and is never whole in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Self

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from penstock.api.http.parsing import check_encoding
from penstock.core.errors import InvalidRequest, RequestTooLarge
from penstock.gateway.answers.stream import ReaderGone
from penstock.gateway.files import Upload

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_MAX_BYTES_AROUND_FILE = 1 << 20
_MAX_FIELDS = 32
_MAX_PARTS = _MAX_FIELDS + 1  # with the file
_MAX_FIELD_BYTES = 16 << 10
_MAX_HEADER_BYTES = 8 << 10


class UploadForm:
    """The parts of a form that were read so far. `upload` is set when the file's part begins."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.upload: Upload | None = None


class _Part:
    """One part of the form while it is being read."""

    def __init__(self) -> None:
        self.name = ""
        self.filename: str | None = None
        self.data = bytearray()
        self._header_name = bytearray()
        self._header_value = bytearray()

    def add_header(self, *, name: bytes = b"", value: bytes = b"") -> None:
        self._header_name += name
        self._header_value += value
        if len(self._header_name) + len(self._header_value) > _MAX_HEADER_BYTES:
            raise InvalidRequest("A part of the form has a header that is too long.")

    def end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._header_value))
            self.name = options.get(b"name", b"").decode("utf-8", "replace")
            if b"filename" in options:
                self.filename = options[b"filename"].decode("utf-8", "replace")
        self._header_name.clear()
        self._header_value.clear()


class UploadReader:
    """Reads one form, within an `async with` block, at whose end an upload that became no file is abandoned."""

    def __init__(
        self,
        request: Request,
        begin: Callable[[], Awaitable[Upload]],
        *,
        file_field: str,
        max_file_bytes: int,
    ) -> None:
        self._request = request
        self._bytes_left = max_file_bytes + _MAX_BYTES_AROUND_FILE
        self._begin = begin
        self._file_field = file_field
        self._part = _Part()
        self._num_parts = 0
        self._file_data: list[bytes] = []  # parsed, and not yet handed to the upload
        self._wants_upload = False
        self._is_complete = False
        self.form = UploadForm()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.form.upload is not None:
            await self.form.upload.abandon()

    async def read(self) -> tuple[UploadForm, Upload]:
        """Return the form, and its file."""
        check_encoding(self._request.headers.get("content-encoding", "identity"), ("identity",))
        try:
            parser = MultipartParser(self._boundary(), self._callbacks())
        except FormParserError as error:
            raise InvalidRequest("The boundary of the form cannot be used.") from error
        while True:
            message = await self._request.receive()
            if message["type"] == "http.disconnect":
                raise ReaderGone
            body = message.get("body", b"")
            self._bytes_left -= len(body)
            if self._bytes_left < 0:
                raise RequestTooLarge("The form is larger than this server takes.")
            try:
                parser.write(body)
            except FormParserError as error:
                raise InvalidRequest("The form in the request body cannot be read.") from error
            await self._hand_on()
            if not message.get("more_body", False):
                break
        if not self._is_complete:
            raise InvalidRequest("The form in the request body is cut off.")
        if self.form.upload is None:
            raise InvalidRequest("The form has no file.", param=self._file_field)
        return self.form, self.form.upload

    def _boundary(self) -> bytes:
        kind, options = parse_options_header(self._request.headers.get("content-type"))
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise InvalidRequest("Send the file as multipart/form-data.")
        return options[b"boundary"]

    def _callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._on_part_begin,
            "on_header_field": lambda data, start, end: self._part.add_header(name=data[start:end]),
            "on_header_value": lambda data, start, end: self._part.add_header(value=data[start:end]),
            "on_header_end": lambda: self._part.end_header(),
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def _on_part_begin(self) -> None:
        self._num_parts += 1  # not of different names alone: each part costs as much, whatever its name
        if self._num_parts > _MAX_PARTS:
            raise InvalidRequest(f"The form has more than {_MAX_FIELDS} fields.")
        self._part = _Part()

    def _on_headers_finished(self) -> None:
        if self._part.name == self._file_field:  # with a file name or, from some clients, without
            if self._wants_upload:
                raise InvalidRequest("The form has more than one file.", param=self._file_field)
            self._wants_upload = True
            self.form.filename = self._part.filename or ""

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part.name == self._file_field:
            self._file_data.append(data[start:end])
            return
        self._part.data += data[start:end]
        if len(self._part.data) > _MAX_FIELD_BYTES:
            raise RequestTooLarge(f"A field of the form has more than {_MAX_FIELD_BYTES} bytes.")

    def _on_part_end(self) -> None:
        if self._part.name == self._file_field:
            return
        self.form.fields[self._part.name] = self._part.data.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._is_complete = True

    async def _hand_on(self) -> None:
        if self._wants_upload and self.form.upload is None:
            self.form.upload = await self._begin()
        data, self._file_data = self._file_data, []
        if self.form.upload is not None:
            for piece in data:
                await self.form.upload.write(piece)
