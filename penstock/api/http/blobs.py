"""Answers with the bytes of a blob: a file as the framework does it, an object of a store piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import IO
from urllib.parse import quote

from starlette.responses import FileResponse, Response, StreamingResponse

from penstock.core.errors import NotFound
from penstock.gateway.blobs.blobs import Blobs

_PIECE_BYTES = 1 << 20


async def blob_response(
    blobs: Blobs,
    blob_id: str,
    *,
    missing: str,
    media_type: str,
    filename: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Raises NotFound with the sentence `missing`, and StoreUnavailable, before anything is sent. A store that fails
    later cuts the answer off, which clients see from its length."""
    path = blobs.local_path(blob_id)
    if path is not None:
        if not await asyncio.to_thread(path.exists):
            raise NotFound(missing)
        return FileResponse(path, headers=headers, media_type=media_type, filename=filename)
    try:
        num_bytes = await asyncio.to_thread(blobs.num_bytes, blob_id)
        opened = await asyncio.to_thread(blobs.open, blob_id)
    except FileNotFoundError as error:
        raise NotFound(missing) from error
    all_headers = {**(headers or {}), "content-length": str(num_bytes)}
    if filename is not None:
        all_headers["content-disposition"] = f"attachment; filename*=utf-8''{quote(filename)}"
    return StreamingResponse(_pieces(opened), headers=all_headers, media_type=media_type)


async def _pieces(opened: IO[bytes]) -> AsyncIterator[bytes]:
    with opened:
        while piece := await asyncio.to_thread(opened.read, _PIECE_BYTES):
            yield piece
