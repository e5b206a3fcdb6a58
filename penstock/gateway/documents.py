"""Text files in prompts: the text that the model reads of a document, and the uploaded files that requests name by
id. Nothing but text is read: a PDF document or another binary file is refused with a sentence that names its position
in the request.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import re

import msgspec

from penstock.core.errors import InvalidRequest, quoted
from penstock.core.shares import Holding
from penstock.gateway.files import FileStore, StoredFile
from penstock.gateway.prompts import (
    FilePart,
    GenerationRequest,
    Prompt,
    TextPart,
    are_texts,
    parts_of,
    with_parts,
)
from penstock.gateway.turns import in_thread

MAX_BYTES = 32 << 20  # of all uploaded files that one request names; as much as a body may have by default
_SLICE_CHARS = 1 << 18  # decoded at once; a multiple of four
_DATA_URL = re.compile(r"data:[^,]{0,256};base64,")


def described(kind: str, body: str, **fields: str | None) -> str:
    """Return a text between tags, after the fields that have a value."""
    lines = [f"<{name}>{value}</{name}>" for name, value in fields.items() if value]
    return "\n".join([f"<{kind}>", *lines, body, f"</{kind}>"])


def text_of_base64(data: str, param: str) -> str:
    """Return the text of a file that is part of the request, as base64 or as a data URL."""
    if (head := _DATA_URL.match(data)) is not None:
        data = data[head.end() :]
    decoded = bytearray()
    try:
        for start in range(0, len(data), _SLICE_CHARS):
            if decoded and data[start - 1] == "=":
                raise ValueError("there is more behind its end")
            decoded += base64.b64decode(data[start : start + _SLICE_CHARS], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"The base64 text of a file is damaged: {error}.", param=param) from error
    return text_of_file(decoded, param)


def text_of_file(data: bytes | bytearray, param: str) -> str:
    """Return the text of a file. Raises InvalidRequest for a file that is no text in UTF-8. Decodes slice by slice,
    because in between other threads have their turns."""
    if data.startswith(b"%PDF-"):
        raise InvalidRequest("PDF documents cannot be read here.", param=param, hint="Send their text.")
    try:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        starts = range(0, len(data), _SLICE_CHARS)
        text = "".join([decoder.decode(data[start : start + _SLICE_CHARS]) for start in starts])
        text += decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InvalidRequest("A file is not text in UTF-8. Only such files can be read.", param=param)
    return text


def attached_text(file_id: str | None, data: str | None, filename: str | None, param: str) -> TextPart:
    """Return the part that stands for a file of OpenAI's APIs, which is uploaded or inside the request."""
    if data:
        return TextPart(described("document", text_of_base64(data, param), title=filename))
    if not file_id:
        raise InvalidRequest(f"{param} has a file with neither file_data nor file_id.", param=param)
    return FilePart(file_id=file_id, title=filename, param=param)


class DocumentReader:
    def __init__(self) -> None:
        self.files: FileStore | None = None  # set where there is a store

    async def read_request(self, request: GenerationRequest, held: Holding) -> GenerationRequest:
        """Return the request with the text of all the files that it names."""
        if are_texts(request.prompts):
            return request
        workspace_id = request.principal.workspace_id
        prompts = [await self.read(prompt, workspace_id, held) for prompt in request.prompts]
        return msgspec.structs.replace(request, prompts=tuple(prompts))

    async def read(self, prompt: Prompt, workspace_id: str, held: Holding) -> Prompt:
        """Raises RateLimited where the workspace holds too many bytes of files."""
        parts = parts_of(prompt, FilePart)
        if not parts:
            return prompt
        files: dict[str, StoredFile] = {}
        num_bytes = 0
        for part in parts:
            if part.file_id not in files:
                files[part.file_id] = await self._find(part, workspace_id)
            num_bytes += files[part.file_id].num_bytes
            if num_bytes > MAX_BYTES:
                raise InvalidRequest(
                    f"The files of the request have more than {MAX_BYTES:,} bytes together.", param=part.param
                )
        held.take(num_bytes)
        texts = {
            part.file_id: await self._text(part) for part in {part.file_id: part for part in parts}.values()
        }

        def changed(part: TextPart) -> TextPart:
            if not isinstance(part, FilePart):
                return part
            title = part.title or files[part.file_id].filename
            return TextPart(
                described("document", texts[part.file_id], title=title, context=part.context), part.cache
            )

        return with_parts(prompt, changed)

    async def _find(self, part: FilePart, workspace_id: str) -> StoredFile:
        if self.files is None:
            raise InvalidRequest("This server stores no files.", param=part.param)
        return await self.files.get(workspace_id, part.file_id)

    async def _text(self, part: FilePart) -> str:
        assert self.files is not None
        blobs = self.files.blobs

        def read() -> str:
            with blobs.open(part.file_id) as opened:
                return text_of_file(opened.read(), part.param)

        try:
            return await in_thread(read)
        except OSError as error:
            raise InvalidRequest(f"The file {quoted(part.file_id)} is gone.", param=part.param) from error
