"""Counts the parts of an image file. Decoders work for every part, however small.

A scan of 60 bytes in a progressive JPEG costs as much as a pass over all pixels, and a text of 1 kB in a PNG becomes
1 MB. A file of a few megabytes could therefore keep a thread busy for minutes or hours.
"""

from __future__ import annotations

import re

MAX_PARTS = 1 << 16  # markers, chunks or blocks; encoders write some thousands into the largest files
MAX_SCANS = 100  # of a JPEG; encoders write about ten
MAX_FILL_BYTES = 1 << 16  # of a JPEG, between its segments; encoders write none
MAX_RESOURCES = 1 << 14  # of Photoshop, in a JPEG; Photoshop writes about thirty
MAX_COMPRESSED_TEXTS = 100  # of a PNG, color profiles included; encoders write a few

_JPEG_START, _PNG_START, _GIF_START = b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"GIF8"
# Within a scan, 0xff is data when 0 follows, and a restart of the scan when 0xd0 to 0xd7 follows.
_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])")
_START_OF_SCAN, _END_OF_IMAGE, _PHOTOSHOP = 0xDA, 0xD9, 0xED
# Markers that no length follows, as Pillow reads them.
_WITHOUT_LENGTH = frozenset({0x01, 0xC8, 0xD8, _END_OF_IMAGE, *range(0xF0, 0xFE)})
_RESOURCE = b"8BIM"
_COMPRESSED = frozenset({b"zTXt", b"iTXt", b"iCCP"})
_GIF_HEADER_BYTES, _GIF_DESCRIPTOR, _GIF_EXTENSION = 13, 0x2C, 0x21


def has_too_many_parts(data: bytes) -> bool:
    """Return whether a decoder would take unreasonably long for the number of parts in a file. Files of other formats
    have none that are counted.

    The walks end at the bounds, so that they cost less than what they prevent.
    """
    if data.startswith(_JPEG_START):
        return _is_long_jpeg(data)
    if data.startswith(_PNG_START):
        return _is_long_png(data)
    return data.startswith(_GIF_START) and _is_long_gif(data)


def _is_long_jpeg(data: bytes) -> bool:
    place = num_scans = num_fill_bytes = num_resources = 0
    for _ in range(MAX_PARTS):
        found = _MARKER.search(data, place)
        if not num_scans:  # Pillow reads what stands between the segments before the first scan byte by byte
            num_fill_bytes += (found.start() if found else len(data)) - place
        if num_fill_bytes > MAX_FILL_BYTES:
            return True
        if found is None or ((marker := found[1][0]) == _END_OF_IMAGE and num_scans):
            return False
        num_scans += marker == _START_OF_SCAN
        place = found.end()
        if marker not in _WITHOUT_LENGTH:
            length = max(2, int.from_bytes(data[place : place + 2], "big"))
            if marker == _PHOTOSHOP:
                num_resources += data.count(_RESOURCE, place, place + length)
            place += length
        if num_scans > MAX_SCANS or num_resources > MAX_RESOURCES:
            return True
    return True


def _is_long_png(data: bytes) -> bool:
    place = len(_PNG_START)
    num_compressed = 0
    for _ in range(MAX_PARTS):
        if place >= len(data):
            return False
        num_compressed += data[place + 4 : place + 8] in _COMPRESSED
        if num_compressed > MAX_COMPRESSED_TEXTS:
            return True
        place += 12 + int.from_bytes(data[place : place + 4], "big")
    return True


def _is_long_gif(data: bytes) -> bool:
    """Count what comes before the first picture, which is the only one that is read."""
    place = _GIF_HEADER_BYTES
    if len(data) > place and (flags := data[10]) & 0x80:
        place += 3 << ((flags & 7) + 1)
    is_extension = False
    for _ in range(MAX_PARTS):
        if place >= len(data):
            return False
        kind = data[place]
        if is_extension:  # sub-blocks with their sizes, until one of size 0
            is_extension = kind != 0
            place += 1 + kind
        elif kind == _GIF_DESCRIPTOR:
            return False
        else:
            is_extension = kind == _GIF_EXTENSION
            place += 2 if is_extension else 1
    return True
