"""Weights are told apart by what is in their files."""

from __future__ import annotations

import random
from pathlib import Path

from penstock.models.load import weights_identity


def write(folder: Path, seed: int, name: str = "model.safetensors") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / name).write_bytes(b"header" * 20_000 + random.Random(seed).randbytes(3_000_000))
    return folder


def test_other_weights_of_the_same_shape_have_another_identity(tmp_path: Path) -> None:
    first, copy, other = (write(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert weights_identity(first) == weights_identity(copy)
    assert weights_identity(first) != weights_identity(other)


def test_a_single_file_has_an_identity_wherever_it_lies(tmp_path: Path) -> None:
    first = write(tmp_path / "a", 1, "x.gguf") / "x.gguf"
    renamed = write(tmp_path / "b", 1, "y.gguf") / "y.gguf"
    other = write(tmp_path / "c", 2, "x.gguf") / "x.gguf"
    assert weights_identity(first) == weights_identity(renamed)
    assert weights_identity(first) != weights_identity(other)
