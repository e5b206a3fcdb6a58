from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import startup as bytecode


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what passes for torch, on a machine with many cores. Nothing else is installed."""
    folder = tmp_path / "site" / "torch"
    for name in ("__init__", "nn/__init__", "_inductor/ir"):
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    spec = importlib.util.spec_from_file_location("torch", folder / "__init__.py")

    def find(name: str) -> ModuleSpec | None:
        return spec if name == "torch" else None

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr("penstock.core.machine._folders", lambda *_: iter(()))  # no control group limits it
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    return folder


def _compiled(folder: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in folder.rglob("*.pyc")}


def test_missing_bytecode_is_compiled_beside_the_source(package: Path, tmp_path: Path) -> None:
    compiling = bytecode.keep_bytecode(tmp_path / "kept")
    assert compiling is not None
    compiling.join()
    assert sys.pycache_prefix is None
    assert _compiled(package) == {"__init__"}  # and nothing of what no engine imports
    assert bytecode.keep_bytecode(tmp_path / "kept") is None


def test_where_it_may_not_be_written_it_is_kept_elsewhere(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    kept = tmp_path / "kept"
    compiling = bytecode.keep_bytecode(kept)
    assert compiling is not None
    compiling.join()
    assert sys.pycache_prefix == str(kept)
    assert not sys.dont_write_bytecode
    assert _compiled(Path(f"{kept}{package}")) == {"__init__"}
    assert not _compiled(package)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    assert bytecode.keep_bytecode(kept) is None
    assert sys.pycache_prefix == str(kept)


def test_few_cores_compile_only_what_they_import(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert bytecode.keep_bytecode(tmp_path / "kept") is None
    assert sys.pycache_prefix == str(tmp_path / "kept")


def test_a_folder_that_cannot_be_written_is_no_error(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    compiling = bytecode.keep_bytecode(Path("/proc/nobody/bytecode"))
    assert compiling is not None
    compiling.join()


def test_without_torch_nothing_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert bytecode.keep_bytecode(tmp_path) is None


def test_the_next_process_imports_what_was_kept(tmp_path: Path) -> None:
    """With Python itself, on a package that it must not write to."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from pathlib import Path
from penstock.engine.startup import keep_bytecode
keep_bytecode(Path({str(tmp_path / "kept")!r}))
import torch
print(torch.__cached__)
"""
    environment: dict[str, Any] = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "kept")
    assert Path(done.stdout.strip()).exists()
    assert not (tmp_path / "torch" / "__pycache__").exists()
