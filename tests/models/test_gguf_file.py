"""A damaged GGUF file gives a ModelLoadError: no crash, no hang, no giant allocation."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ModelLoadError
from penstock.kernels.reference import TorchOps
from penstock.models.gguf_file import GGUFFile, gguf_architecture
from penstock.models.load import load_model, load_tokenizer, open_checkpoint
from tests.models.checkpoints import Reference
from tests.models.gguf_files import write_model


@pytest.fixture(scope="module")
def sound_file(llama: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "model.gguf"
    write_model(path, llama, GGMLQuantizationType.Q8_0)
    return path


@pytest.fixture(scope="module")
def damaged_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "model.gguf"


def header_size(path: Path) -> int:
    return min(tensor.offset for tensor in GGUFFile(path).tensors.values())


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def test_agrees_with_the_gguf_package(sound_file: Path) -> None:
    ours, theirs = GGUFFile(sound_file), GGUFReader(sound_file)
    assert gguf_architecture(sound_file) == ours.architecture
    own_fields = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}
    assert ours.metadata == {
        key: entry.contents() for key, entry in theirs.fields.items() if key not in own_fields
    }
    assert {name: (tensor.offset, tensor.num_bytes) for name, tensor in ours.tensors.items()} == {
        tensor.name: (tensor.data_offset, tensor.n_bytes) for tensor in theirs.tensors
    }


def test_every_kind_of_metadata(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = GGUFWriter(path, "llama")
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(kind, 7)
    writer.add_float32("float32", 0.5)
    writer.add_float64("float64", 0.25)
    writer.add_bool("bool", True)
    writer.add_array("strings", ["é", ""])
    writer.add_array("flags", [True, False])
    writer.add_tensor("t", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GGUFFile(path).metadata
    assert {metadata[f"{sign}int{size}"] for sign in ("", "u") for size in (8, 16, 32, 64)} == {7}
    assert (metadata["float32"], metadata["float64"], metadata["bool"]) == (0.5, 0.25, True)
    assert (metadata["strings"], metadata["flags"]) == (["é", ""], [True, False])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"GGU", "ends inside"),
        (b"GGML" + bytes(60), "letters GGUF"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "1,152,921,504,606,846,976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "1,099,511,627,776 metadata entries"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(40), "ends inside"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, 4, 1 << 50),
            "metadata values, more than it can hold",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, 8, 1) + b"\xff" * 8,
            "ends inside",
        ),
        (
            b"GGUF"
            + struct.pack("<IQQ", 3, 0, 1)
            + string("k")
            + struct.pack("<I", 9)
            + struct.pack("<IQ", 9, 1) * 9,
            "too deeply",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IQ", 99, 0), "type 99"),
    ],
)
def test_bad_headers(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=message):
        GGUFFile(path)


def tensor_entry(shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    entry = string("t") + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
    return b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry + struct.pack("<IQ", kind, offset) + bytes(200)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tensor_entry((1 << 62, 1 << 62), 0, 0), "cut short"),
        (tensor_entry((4,), 0, 1 << 40), "cut short"),
        (tensor_entry((4,), 0, 3), "not aligned"),
        (tensor_entry((0,), 0, 0), "shape"),
        (tensor_entry((1,) * 5, 0, 0), "5 dimensions"),
        (tensor_entry((33,), 8, 0), "rows of 33"),
        (tensor_entry((32,), 999, 0), "GGUF type 999"),
    ],
)
def test_bad_tensor_entries(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=message):
        GGUFFile(path)


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere(share: float, sound_file: Path, damaged_path: Path) -> None:
    data = sound_file.read_bytes()
    damaged_path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ModelLoadError):
        GGUFFile(damaged_path)


@settings(max_examples=150, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4
    )
)
def test_a_header_with_changed_bytes(
    changes: list[tuple[float, int]], sound_file: Path, damaged_path: Path
) -> None:
    data = bytearray(sound_file.read_bytes())
    size = header_size(sound_file)
    for share, value in changes:
        data[int(share * size)] = value
    damaged_path.write_bytes(data)
    ops = TorchOps()
    steps: list[Callable[[], object]] = [
        lambda: open_checkpoint(damaged_path),
        lambda: load_tokenizer(damaged_path),
        lambda: load_model(damaged_path, ops),
    ]
    for step in steps:
        # Some bytes do not matter; what matters is that nothing but a ModelLoadError comes out.
        with contextlib.suppress(ModelLoadError):
            step()


def test_a_part_of_a_split_model(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.add_tensor("t", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="one of 3 parts"):
        open_checkpoint(path)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + string("general.architecture")
        + struct.pack("<I", 8)
        + string("no-such")
    )
    with pytest.raises(ModelLoadError, match=r"'no-such' of a\.gguf is not known; known are .*gemma3.*llama"):
        open_checkpoint(path)
