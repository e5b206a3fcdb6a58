"""Makes the start of an engine process faster. Light to import.

A start waits for the import of torch, which takes seconds of one core, for the driver to open the GPU, and for Triton
to find the kernels that it compiled before. The functions, in the order of a start:

- `preload` runs before the engine's job is known, in a process that the server starts early (`cluster/early.py`).
- `prepare` runs when the job is known.
- `keep_bytecode` compiles packages that were installed without bytecode.
- `read_compiler_ahead` has the system read the kernels' compiler from disk.
- `open_gpu_ahead` has the driver open the GPU.
- `load_compiler` imports Triton. **No other function of a start does**, and threads of this module import nothing:
  two threads that import Triton at the same time, one of them a part of it first, each wait for a lock that the other
  holds, and Python ends one of the imports with an error.
- `know_compiler_by_its_wheel` spares Triton the reading of all its files.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import os
import subprocess
import sys
import threading
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from penstock.core.engine_config import EngineConfig
from penstock.core.machine import usable_cores
from penstock.engine.echo import ECHO_MODEL

DEVICES = Path("/dev")
COMPILER_PARTS = ("_C/libtriton*.so", "backends/nvidia/bin/ptxas")
CUDA_LIBRARY = "libcuda.so.1"

_importing = threading.Lock()


def preload(module: str, bytecode: Path) -> None:
    """Import the module that most engines need, before the job is known. `bytecode` is a folder for the bytecode of
    packages that have none."""
    keep_bytecode(bytecode)
    read_compiler_ahead()
    importlib.import_module(module)
    if _has_gpu():
        load_compiler()


def prepare(config: EngineConfig, model_path: Path, bytecode: Path | None = None) -> None:
    """Begin work that needs no torch, once the job is known and CUDA_VISIBLE_DEVICES is set. Pass `bytecode` if
    nothing is preloaded."""
    if bytecode is not None:
        keep_bytecode(bytecode)
    is_alone = config.parallel.num_ranks == 1  # ranks are processes of their own
    if str(model_path) != ECHO_MODEL and config.model.device != "cpu" and is_alone:
        open_gpu_ahead()


def read_compiler_ahead() -> threading.Thread | None:
    """Read the kernel compiler (400 MB) from disk in the background. Read in small pieces, it takes three seconds on
    a machine that was just switched on.

    Returns at once; None without a GPU or a compiler."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None or not _has_gpu():
        return None
    package = Path(spec.origin).parent
    paths = [path for part in COMPILER_PARTS for path in sorted(package.glob(part))]
    return _start(_read_ahead, paths)


def open_gpu_ahead() -> threading.Thread | None:
    """Let the driver set up the first GPU in the background, which saves torch some tenths of a second.
    CUDA_VISIBLE_DEVICES must be set.

    Returns at once; None without a GPU."""
    return _start(_open_gpu) if _has_gpu() else None


def load_compiler() -> threading.Thread | None:
    """Import Triton, in the thread that asks first; all others wait until it is there. Then have Triton build its
    small library for the driver, if this is the first start, in the thread that is returned.

    Returns None without Triton."""
    with _importing:
        return _load_compiler()


@functools.cache
def _load_compiler() -> threading.Thread | None:
    if importlib.util.find_spec("triton") is None:
        return None
    # The package first: a thread that imports a submodule first would hold its lock while it waits for the package.

    know_compiler_by_its_wheel()
    try:
        import triton.backends.nvidia.driver as driver
    except ImportError:  # another vendor's Triton
        return None
    return _start(_build_driver_library, driver)


@functools.cache
def know_compiler_by_its_wheel() -> bool:
    """Set the key by which Triton finds kernels on disk to a hash of its wheel's list of files. Triton would hash all
    its files, 400 MB, which takes from half a second to two. Later edits of the installed package go unnoticed.
    Returns False if Triton was not installed from a wheel, or keeps its key in another place."""
    from triton.runtime import cache

    try:
        wheel = metadata.distribution("triton")
    except metadata.PackageNotFoundError:
        return False
    files = wheel.read_text("RECORD")
    if not files or "_C/libtriton" not in files or not hasattr(cache, "triton_key"):
        return False
    key = f"{wheel.version}-{hashlib.sha256(files.encode()).hexdigest()}"
    cache.triton_key = lambda: key
    return True


def _has_gpu() -> bool:
    return any(DEVICES.glob("nvidia[0-9]*"))


def _start(work: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, name=work.__name__, daemon=True)
    thread.start()
    return thread


def _read_ahead(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _open_gpu() -> None:
    """Open the GPU. Errors are ignored: torch or Triton reports them later."""
    try:
        cuda = ctypes.CDLL(CUDA_LIBRARY)
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # torch uses this context


def _build_driver_library(driver: Any) -> None:
    """Build and load the library, which Triton finds on disk from then on. Triton reports errors later."""
    with contextlib.suppress(Exception):
        driver.CudaUtils()


PACKAGES = ("torch", "numpy", "triton")
# Large parts of torch that no engine imports.
LEFT_OUT = r"/torch/(testing/_internal|_inductor|_dynamo|onnx|include)/"
MIN_CORES = 8  # with fewer cores, compilers would slow the import down

# The folder is set after the import of Python's own modules, which have bytecode; and in the variable, for processes
# that do not inherit it.
_COMPILER = f"""
import compileall, os, re, sys
folder, num_processes, *packages = sys.argv[1:]
if folder:
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = folder
for package in packages:
    compileall.compile_dir(package, quiet=2, workers=int(num_processes), rx=re.compile({LEFT_OUT!r}))
"""


def keep_bytecode(folder: Path) -> threading.Thread | None:
    """Compile packages without bytecode into a folder. Call this before torch is imported. Returns at once; None if
    there is nothing to compile."""
    specs = [spec for name in PACKAGES if (spec := importlib.util.find_spec(name)) and spec.origin]
    if not specs or _has_bytecode(specs[0]):
        return None
    if sys.dont_write_bytecode or not os.access(Path(specs[0].origin or "").parent, os.W_OK):
        sys.dont_write_bytecode = False
        sys.pycache_prefix = str(folder)
        if _has_bytecode(specs[0]):
            return None
    num_cores = usable_cores()
    if num_cores < MIN_CORES:
        return None
    packages = [str(Path(spec.origin or "").parent) for spec in specs]
    compiling = threading.Thread(target=_compile, args=(packages, num_cores // 2), daemon=True)
    compiling.start()
    return compiling


def _has_bytecode(spec: ModuleSpec) -> bool:
    return os.path.exists(importlib.util.cache_from_source(spec.origin or ""))


def _compile(packages: list[str], num_processes: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", _COMPILER, sys.pycache_prefix or "", str(num_processes), *packages]
    subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    )
