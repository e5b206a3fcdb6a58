from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.core.engine_config import EngineConfig, ModelConfig, ParallelConfig
from penstock.engine import build, head_start
from penstock.engine.echo import ECHO_MODEL


@pytest.fixture
def advised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that the system was told of, on a machine with one GPU and a compiler."""
    for name in ("_C/libtriton.so", "backends/nvidia/bin/ptxas", "dev/nvidia0"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"code")
    spec = ModuleSpec("triton", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(head_start, "DEVICES", tmp_path / "dev")
    names: list[str] = []

    def advise(descriptor: int, *_: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return names


def test_the_compiler_is_read_ahead(advised: list[str]) -> None:
    reading = head_start.read_compiler_ahead()
    assert reading is not None
    reading.join()
    assert advised == ["libtriton.so", "ptxas"]


def test_nothing_is_read_where_nothing_will_be_compiled(
    advised: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dev" / "nvidia0").unlink()
    assert head_start.read_compiler_ahead() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert head_start.read_compiler_ahead() is None
    assert not advised


class _Driver:
    """Libcuda, as far as it is asked here."""

    def __init__(self, refusing: str = "") -> None:
        self.asked: list[str] = []
        self._refusing = refusing

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*_: object) -> int:
            self.asked.append(name)
            return 100 if name == self._refusing else 0

        return call


def _opened(monkeypatch: pytest.MonkeyPatch, driver: _Driver) -> list[str]:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    compiler = ModuleType("triton.backends.nvidia.driver")
    compiler.CudaUtils = lambda: driver.asked.append("CudaUtils")  # type: ignore[attr-defined]
    for name in ("triton", "triton.backends", "triton.backends.nvidia"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, compiler.__name__, compiler)
    opening = head_start.open_gpu_ahead()
    assert opening is not None
    opening.join()
    return driver.asked


@pytest.mark.usefixtures("advised")
def test_the_first_gpu_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "CudaUtils"]
    assert _opened(monkeypatch, _Driver()) == steps


@pytest.mark.usefixtures("advised")
def test_a_driver_that_refuses_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _opened(monkeypatch, _Driver(refusing="cuInit")) == ["cuInit"]


@pytest.mark.usefixtures("advised")
def test_a_missing_driver_is_for_torch_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    opening = head_start.open_gpu_ahead()
    assert opening is not None
    opening.join()


@pytest.mark.parametrize(
    ("model_path", "device", "tensor_parallel", "opens"),
    [("model", "auto", 1, True), ("model", "cuda", 1, True), ("model", "cpu", 1, False),
     ("model", "auto", 2, False), (ECHO_MODEL, "auto", 1, False)],
)  # fmt: skip
def test_only_an_engine_that_may_use_a_gpu_opens_it(
    monkeypatch: pytest.MonkeyPatch, model_path: str, device: Any, tensor_parallel: int, opens: bool
) -> None:
    opened: list[bool] = []
    monkeypatch.setattr(build, "open_gpu_ahead", lambda: opened.append(True))
    config = EngineConfig(
        model=ModelConfig(model=model_path, device=device),
        parallel=ParallelConfig(tensor_parallel_size=tensor_parallel),
    )
    build.prepare(config, Path(model_path))
    assert bool(opened) == opens


def test_an_engine_that_was_not_preloaded_keeps_its_bytecode_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Path] = []
    monkeypatch.setattr(build, "keep_bytecode", kept.append)
    build.prepare(EngineConfig(model=ModelConfig(model=ECHO_MODEL)), Path(ECHO_MODEL), tmp_path)
    assert kept == [tmp_path]
