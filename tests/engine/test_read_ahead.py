from __future__ import annotations

import importlib.util
import os
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from penstock.engine import read_ahead


@pytest.fixture
def advised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that the system was told of, on a machine with one GPU and a compiler."""
    for name in ("_C/libtriton.so", "backends/nvidia/bin/ptxas", "dev/nvidia0"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"code")
    spec = ModuleSpec("triton", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(read_ahead, "GPU_DEVICES", tmp_path / "dev")
    names: list[str] = []

    def advise(descriptor: int, *_: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return names


def test_the_compiler_is_read_ahead(advised: list[str]) -> None:
    reading = read_ahead.read_compiler_ahead()
    assert reading is not None
    reading.join()
    assert advised == ["libtriton.so", "ptxas"]


def test_nothing_is_read_where_nothing_will_be_compiled(
    advised: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dev" / "nvidia0").unlink()
    assert read_ahead.read_compiler_ahead() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert read_ahead.read_compiler_ahead() is None
    assert not advised
