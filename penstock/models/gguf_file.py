"""Reads the structure of a GGUF file: metadata, and the place of each tensor. Imports no torch or numpy.

The file is mapped, not read; a string is decoded only when metadata needs it. Every count and length is checked
against the rest of the file before memory is allocated. A damaged file therefore gives a ModelLoadError, and never a
crash or a giant allocation. Does not know what the metadata or the tensors mean.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import ModelLoadError
from penstock.models.gguf_choice import split_parts

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4

# GGUF value type -> struct format of the scalar.
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING = 8
_ARRAY = 9

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Describes how a tensor type stores numbers: `block_bytes` for every `block_size` neighbours of a row."""

    name: str
    block_size: int
    block_bytes: int


FORMATS = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2),
    2: BlockFormat("Q4_0", 32, 18),
    3: BlockFormat("Q4_1", 32, 20),
    6: BlockFormat("Q5_0", 32, 22),
    7: BlockFormat("Q5_1", 32, 24),
    8: BlockFormat("Q8_0", 32, 34),
    10: BlockFormat("Q2_K", 256, 84),
    11: BlockFormat("Q3_K", 256, 110),
    12: BlockFormat("Q4_K", 256, 144),
    13: BlockFormat("Q5_K", 256, 176),
    14: BlockFormat("Q6_K", 256, 210),
    16: BlockFormat("IQ2_XXS", 256, 66),
    17: BlockFormat("IQ2_XS", 256, 74),
    18: BlockFormat("IQ3_XXS", 256, 98),
    19: BlockFormat("IQ1_S", 256, 50),
    20: BlockFormat("IQ4_NL", 32, 18),
    21: BlockFormat("IQ3_S", 256, 110),
    22: BlockFormat("IQ2_S", 256, 82),
    23: BlockFormat("IQ4_XS", 256, 136),
    29: BlockFormat("IQ1_M", 256, 56),
    30: BlockFormat("BF16", 1, 2),
    34: BlockFormat("TQ1_0", 256, 54),
    35: BlockFormat("TQ2_0", 256, 66),
    39: BlockFormat("MXFP4", 32, 17),
    40: BlockFormat("NVFP4", 64, 36),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # rows first, as in torch; GGUF stores the reverse
    format: BlockFormat
    offset: int  # bytes from the start of the file
    num_bytes: int
    part: int = 0  # of a split model, the file that holds the tensor


class GGUFFile:
    """An open GGUF file, or all files of a split model, of which any part may be named. `buffers` stay mapped for as
    long as this object or a view into them lives."""

    def __init__(self, path: Path) -> None:
        paths = split_parts(path)
        missing = [each.name for each in paths if not each.exists()]
        if missing and len(paths) > 1:
            raise ModelLoadError(
                f"{path.name} is one of {len(paths)} parts of a split model, and {missing[0]} is missing.",
                hint="Fetch the missing parts to the same folder.",
            )
        self.path = paths[0]
        first, *others = (_OneFile(each, number) for number, each in enumerate(paths))
        self.metadata = first.metadata
        self.buffers = [first.buffer]
        self.tensors = first.tensors
        self._check_part(first, 0, len(paths))
        for number, other in enumerate(others, 1):
            self._check_part(other, number, len(paths))
            twice = self.tensors.keys() & other.tensors.keys()
            if twice:
                raise ModelLoadError(f"{other.path.name} has the tensor {min(twice)!r} of another part.")
            self.tensors |= other.tensors
            self.buffers.append(other.buffer)
        announced = self.metadata.get("split.tensors.count", len(self.tensors))
        if announced != len(self.tensors):
            raise ModelLoadError(
                f"The parts of {self.path.name} hold {len(self.tensors)} of {announced} tensors.",
                hint="Fetch the parts again.",
            )

    def _check_part(self, part: _OneFile, number: int, count: int) -> None:
        stated = part.metadata.get("split.count", 1), part.metadata.get("split.no", 0)
        if stated == (count, number) or (count == 1 and stated[0] in (0, 1)):
            return
        raise ModelLoadError(
            f"{part.path.name} is one of {stated[0]} parts of a split model, number {int(stated[1]) + 1}, "
            "and its name says otherwise.",
            hint="Parts are named NAME-00001-of-00003.gguf, and so on.",
        )

    @property
    def architecture(self) -> str:
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ModelLoadError(f"{self.path.name} does not say its general.architecture.")
        return name


def gguf_architecture(path: Path) -> str | None:
    """Read the architecture of a file alone. Writers put it first, and vocabularies take long to read."""
    first = split_parts(path)[0]
    reader = _Reader(_map(first), first.name)
    for _ in range(_read_header(reader)[1]):
        key, value = reader.string(), reader.value(reader.u32())
        if key == "general.architecture":
            return str(value)
    return None


class _OneFile:
    def __init__(self, path: Path, part: int) -> None:
        self.path = path
        self._part = part
        self.buffer = _map(path)
        reader = _Reader(self.buffer, path.name)
        num_tensors, num_entries = _read_header(reader)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = reader.string()
            if key in self.metadata:
                raise reader.damaged(f"has the metadata key {key!r} twice")
            self.metadata[key] = reader.value(reader.u32())
        self.tensors = self._read_tensors(reader, num_tensors)

    def _read_tensors(self, reader: _Reader, num_tensors: int) -> dict[str, TensorInfo]:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise reader.damaged(f"has an alignment of {alignment!r}, which is not a power of two from 8 on")
        # Offsets count from the aligned end of the header, which is known only after the last entry.
        entries = [_read_tensor_entry(reader) for _ in range(num_tensors)]
        data_start = -(-reader.position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, format, offset in entries:
            num_bytes = math.prod(shape) // format.block_size * format.block_bytes
            start = data_start + offset
            if offset % alignment:
                raise reader.damaged(f"has the tensor {name!r} at an offset that is not aligned")
            if start + num_bytes > len(self.buffer):
                raise ModelLoadError(
                    f"{self.path.name} is cut short: the tensor {name!r} ends at byte {start + num_bytes:,}, "
                    f"the file at {len(self.buffer):,}.",
                    hint="Fetch the file again.",
                )
            if name in tensors:
                raise reader.damaged(f"has the tensor {name!r} twice")
            tensors[name] = TensorInfo(name, shape, format, start, num_bytes, self._part)
        return tensors


class _Reader:
    """A cursor over the header part of the file."""

    def __init__(self, buffer: mmap.mmap, file_name: str) -> None:
        self._buffer = buffer
        self._size = len(buffer)
        self._file_name = file_name
        self.position = 0

    def u32(self) -> int:
        return int(self._unpack(_U32))

    def u64(self) -> int:
        return int(self._unpack(_U64))

    def string(self) -> str:
        length = self.u64()
        return self.take(length).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            if depth == _MAX_NESTING:
                raise self.damaged("nests metadata arrays too deeply")
            return self._array(depth)
        return self._unpack(struct.Struct(self._scalar(kind)))

    def count(self, at_least_bytes_each: int, of_what: str) -> int:
        """Read a number of entries that follow. Each takes some bytes, so the rest of the file limits the number."""
        number = self.u64()
        if number * at_least_bytes_each > self._size - self.position:
            raise self.damaged(f"announces {number:,} {of_what}, more than it can hold")
        return number

    def damaged(self, how: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self._file_name} is not a valid GGUF file: it {how}.", hint="Fetch the file again."
        )

    def _array(self, depth: int) -> list[Any]:
        kind = self.u32()
        if kind == _STRING:
            return self._strings(self.count(8, "metadata strings"))
        if kind == _ARRAY:
            return [self.value(kind, depth + 1) for _ in range(self.count(12, "metadata arrays"))]
        item = struct.Struct(self._scalar(kind))
        number = self.count(item.size, "metadata values")
        return list(struct.unpack(f"<{number}{item.format[1:]}", self.take(number * item.size)))

    def _strings(self, number: int) -> list[str]:
        # Vocabularies hold hundreds of thousands of strings: this loop is most of the time it takes to open a file.
        buffer, unpack, size, position = self._buffer, _U64.unpack_from, self._size, self.position
        strings = []
        for _ in range(number):
            start = position + 8
            if start > size:
                raise self.damaged("ends inside its metadata")
            position = start + unpack(buffer, position)[0]
            if position > size:
                raise self.damaged("ends inside its metadata")
            strings.append(buffer[start:position].decode("utf-8", "replace"))
        self.position = position
        return strings

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self.damaged(f"has metadata of the unknown type {kind}")
        return _SCALARS[kind]

    def _unpack(self, item: struct.Struct) -> Any:
        return item.unpack(self.take(item.size))[0]

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > self._size:
            raise self.damaged("ends inside its metadata")
        data = self._buffer[self.position : end]
        self.position = end
        return data


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # A private writable mapping, because torch wants writable memory; nothing ever writes to it.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is empty.", hint="Fetch the file again.") from error


def _read_header(reader: _Reader) -> tuple[int, int]:
    if reader.take(4) != _MAGIC:
        raise reader.damaged("does not start with the letters GGUF")
    version = reader.u32()
    if version not in _VERSIONS:
        raise reader.damaged(f"has version {version}, and only 2 and 3 in little-endian order are known")
    # The smallest tensor entry is a 1-letter name with one dimension, the smallest metadata entry one byte.
    num_tensors = reader.count(33, "tensors")
    return num_tensors, reader.count(14, "metadata entries")


def _read_tensor_entry(reader: _Reader) -> tuple[str, tuple[int, ...], BlockFormat, int]:
    name = reader.string()
    num_dimensions = reader.u32()
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise reader.damaged(f"gives the tensor {name!r} {num_dimensions} dimensions")
    shape = tuple(reversed([reader.u64() for _ in range(num_dimensions)]))
    if min(shape) < 1:
        raise reader.damaged(f"gives the tensor {name!r} the shape {list(shape)}")
    kind = reader.u32()
    format = FORMATS.get(kind)
    if format is None:
        known = ", ".join(known_format.name for known_format in FORMATS.values())
        raise ModelLoadError(f"The tensor {name!r} has the GGUF type {kind}, which is not one of {known}.")
    if shape[-1] % format.block_size:
        raise reader.damaged(f"gives the {format.name} tensor {name!r} rows of {shape[-1]} numbers")
    return name, shape, format, reader.u64()
