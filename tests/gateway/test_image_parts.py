"""Files of many small parts, which would keep decoders busy for hours, are refused; what encoders write is not."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import pytest
from PIL import Image

from penstock.core.errors import InvalidRequest
from penstock.core.gateway_config import GatewayConfig
from penstock.gateway.images import MAX_PARTS, MAX_SCANS, checked_image, has_too_many_parts
from penstock.gateway.prompts import ImagePart


def written(kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((320, 240), 90).convert("RGB").save(file, kind, **options)
    return file.getvalue()


def with_scans(number: int) -> bytes:
    """A progressive JPEG whose last scan comes `number` times."""
    data = written("JPEG", progressive=True)
    start = data.rfind(b"\xff\xda")
    return data[:start] + data[start:-2] * number + data[-2:]


def with_chunks(number: int) -> bytes:
    empty = struct.pack(">I", 0) + b"abCd" + struct.pack(">I", zlib.crc32(b"abCd"))
    data = written("PNG")
    return data[:33] + empty * number + data[33:]


def with_blocks(block: bytes, number: int) -> bytes:
    data = written("GIF")
    colours_end = 13 + (3 << ((data[10] & 7) + 1))
    return data[:colours_end] + block * number + data[colours_end:]


HOSTILE = {
    "scans of a JPEG": with_scans(MAX_SCANS + 1),
    "segments of a JPEG": b"\xff\xd8" + b"\xff\xfe\x00\x02" * MAX_PARTS + written("JPEG")[2:],
    "chunks of a PNG": with_chunks(MAX_PARTS),
    "comments of a GIF": with_blocks(b"\x21\xfe\x00", MAX_PARTS),
    "blocks of one comment of a GIF": with_blocks(b"\x21\xfe" + b"\x01x" * MAX_PARTS + b"\0", 1),
    "zeros in a GIF": with_blocks(b"\0", MAX_PARTS),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_files_of_very_many_parts_are_refused_before_they_are_decoded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "open", None)
    with pytest.raises(InvalidRequest, match="too many parts"):
        checked_image(ImagePart(url="", param="here"), HOSTILE[name], GatewayConfig())


@pytest.mark.parametrize(
    "data",
    [
        written("JPEG"),
        written("JPEG", progressive=True, quality=100),
        written("JPEG", exif=b"Exif\0\0" + b"\xff\xda" * 30_000),
        # A phone's photograph with a film behind it.
        written("JPEG") + b"\xff\xda\0\x02" * MAX_PARTS,
        with_scans(20),
        written("PNG"),
        with_chunks(1000),
        written("GIF", comment=b"x" * 10_000),
        written("WEBP"),
    ],
)
def test_files_as_encoders_write_them_are_read(data: bytes) -> None:
    assert checked_image(ImagePart(url=""), data, GatewayConfig()).width == 320


def test_broken_files_are_left_to_the_decoder() -> None:
    for data in (
        b"\xff\xd8",
        b"\xff\xd8\xff\xe0",
        b"\x89PNG\r\n\x1a\n\0",
        b"GIF89a",
        b"GIF89a" + b"\xff" * 8,
        b"",
    ):
        assert not has_too_many_parts(data)
