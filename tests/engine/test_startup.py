from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from penstock.core.engine_config import EngineConfig, ModelConfig, ParallelConfig
from penstock.engine import startup
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
    monkeypatch.setattr(startup, "DEVICES", tmp_path / "dev")
    names: list[str] = []

    def advise(descriptor: int, *_: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return names


def test_the_compiler_is_read_ahead(advised: list[str]) -> None:
    reading = startup.read_compiler_ahead()
    assert reading is not None
    reading.join()
    assert advised == ["libtriton.so", "ptxas"]


def test_nothing_is_read_where_nothing_will_be_compiled(
    advised: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dev" / "nvidia0").unlink()
    assert startup.read_compiler_ahead() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert startup.read_compiler_ahead() is None
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
    opening = startup.open_gpu_ahead()
    assert opening is not None
    opening.join()
    return driver.asked


@pytest.mark.usefixtures("advised")
def test_the_first_gpu_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _opened(monkeypatch, _Driver()) == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


@pytest.mark.usefixtures("advised")
def test_a_driver_that_refuses_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _opened(monkeypatch, _Driver(refusing="cuInit")) == ["cuInit"]


@pytest.mark.usefixtures("advised")
def test_a_missing_driver_is_for_torch_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    opening = startup.open_gpu_ahead()
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
    monkeypatch.setattr(startup, "open_gpu_ahead", lambda: opened.append(True))
    config = EngineConfig(
        model=ModelConfig(model=model_path, device=device),
        parallel=ParallelConfig(tensor_parallel_size=tensor_parallel),
    )
    startup.prepare(config, Path(model_path))
    assert bool(opened) == opens


def test_an_engine_that_was_not_preloaded_keeps_its_bytecode_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Path] = []
    monkeypatch.setattr(startup, "keep_bytecode", kept.append)
    startup.prepare(EngineConfig(model=ModelConfig(model=ECHO_MODEL)), Path(ECHO_MODEL), tmp_path)
    assert kept == [tmp_path]


# A package whose parts import each other, slowly, as Triton's do.
PACKAGE = {
    "triton/__init__.py": "import time; time.sleep(0.1); import triton.runtime; import triton.backends.nvidia.driver",
    "triton/runtime/__init__.py": "import triton.runtime.cache",
    "triton/runtime/cache.py": "",
    "triton/backends/__init__.py": "import time; time.sleep(0.1)",
    "triton/backends/nvidia/__init__.py": "",
    "triton/backends/nvidia/driver.py": "import triton\nclass CudaUtils:\n    made = []\n"
    "    def __init__(self): self.made.append(1)",
}
# Many threads begin at once with everything that a start does.
START = """
import builtins, ctypes, sys, threading
from pathlib import Path
from penstock.core.engine_config import EngineConfig, ModelConfig
from penstock.engine import startup

startup.DEVICES = Path(sys.argv[1])
ctypes.CDLL = lambda name: type("Driver", (), {"__getattr__": lambda self, name: lambda *_: 0})()
importers, errors = set(), []
builtins.importers = importers
gate = threading.Barrier(16)

def start(number):
    gate.wait()
    try:
        if number % 2:
            startup.prepare(EngineConfig(model=ModelConfig(model="model")), Path("model"))
            startup.read_compiler_ahead()
        building = startup.load_compiler()
        building.join()
        import triton.backends.nvidia.driver
    except BaseException as error:
        errors.append(repr(error))

threads = [threading.Thread(target=start, args=(number,)) for number in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(importers), errors, len(sys.modules["triton.backends.nvidia.driver"].CudaUtils.made))
"""


def test_one_thread_imports_the_compiler_whatever_asks_for_it(tmp_path: Path) -> None:
    """Two threads that import it, one of them a part of it first, end in a deadlock that Python reports."""
    for name, source in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"import threading; importers.add(threading.get_ident())\n{source}")
    devices = tmp_path / "dev"
    devices.mkdir()
    (devices / "nvidia0").touch()
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START, str(devices)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.communicate() == ("1 [] 1\n", "")


def test_without_triton_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    startup._load_compiler.cache_clear()
    try:
        assert startup.load_compiler() is None
    finally:
        startup._load_compiler.cache_clear()
