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
from penstock.gateway.image_bounds import (
    MAX_COMPRESSED_TEXTS,
    MAX_FILL_BYTES,
    MAX_PARTS,
    MAX_RESOURCES,
    MAX_SCANS,
    has_too_many_parts,
)
from penstock.gateway.images import checked_image
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


def behind_the_start(inserted: bytes) -> bytes:
    data = written("JPEG")
    return data[:2] + inserted + data[2:]


def with_chunks(number: int, kind: bytes = b"abCd", body: bytes = b"") -> bytes:
    chunk = struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    data = written("PNG")
    return data[:33] + chunk * number + data[33:]


def with_blocks(block: bytes, number: int) -> bytes:
    data = written("GIF")
    colours_end = 13 + (3 << ((data[10] & 7) + 1))
    return data[:colours_end] + block * number + data[colours_end:]


HOSTILE = {
    "scans of a JPEG": with_scans(MAX_SCANS + 1),
    "segments of a JPEG": b"\xff\xd8" + b"\xff\xfe\x00\x02" * MAX_PARTS + written("JPEG")[2:],
    # Pillow reads each of these bytes by a turn of a loop in Python: 20 MB of them take half a minute.
    "fill bytes of a JPEG": behind_the_start(b"\xff" * (MAX_FILL_BYTES + 10)),
    "data without a scan": behind_the_start(b"\xff\0" * (MAX_FILL_BYTES // 2 + 1)),
    "restarts without a scan": behind_the_start(b"\xff\xd0" * (MAX_FILL_BYTES // 2 + 1)),
    "fill bytes behind an end": behind_the_start(b"\xff\xd9" + b"\xff" * (MAX_FILL_BYTES + 10)),
    "fill bytes behind a marker without length": behind_the_start(
        (b"\xff\xf0\xff\xff" + b"\xff" * 65_533) * 2
    ),
    "resources of Photoshop": behind_the_start(
        (b"\xff\xed\xff\xff" + (b"8BIM" + bytes(8)) * 5461 + b"\0") * (MAX_RESOURCES // 5461 + 1)
    ),
    "chunks of a PNG": with_chunks(MAX_PARTS),
    "compressed texts of a PNG": with_chunks(MAX_COMPRESSED_TEXTS + 1, b"zTXt", b"k\0\0damaged"),
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
        with_chunks(20, b"zTXt", b"k\0\0" + zlib.compress(b"taken in May")),
        behind_the_start(b"\xff" * 100),
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
