"""Does work of a start on a GPU while torch is imported, which keeps one core busy for seconds, and compiles packages
that come without bytecode, which makes that import faster."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path

DEVICES = Path("/dev")
COMPILER_PARTS = ("_C/libtriton*.so", "backends/nvidia/bin/ptxas")
CUDA_LIBRARY = "libcuda.so.1"


def read_compiler_ahead() -> threading.Thread | None:
    """Have the system read the compiler of kernels from disk: 400 MB, which would take a machine that was just
    switched on three seconds in small pieces.

    Returns at once; None without a GPU or a compiler."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None or not _has_gpu():
        return None
    package = Path(spec.origin).parent
    paths = [path for part in COMPILER_PARTS for path in sorted(package.glob(part))]
    return _start(threading.Thread(target=_read_ahead, args=(paths,), name="read-ahead", daemon=True))


def open_gpu_ahead() -> threading.Thread | None:
    """Let the driver find its devices and set up the first one, which torch then finds open: some tenths of a second.
    Then have Triton build its small library for the driver, if this is the first time. CUDA_VISIBLE_DEVICES must be
    set.

    Returns at once; None without a GPU."""
    if not _has_gpu():
        return None
    return _start(threading.Thread(target=_open_gpu, name="open-gpu", daemon=True))


def _has_gpu() -> bool:
    return any(DEVICES.glob("nvidia[0-9]*"))


def _start(thread: threading.Thread) -> threading.Thread:
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
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # the one that torch uses
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


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
    """Compile packages without bytecode into a folder. Call this before torch is imported. Returns at once; None when
    there is nothing to compile."""
    specs = [spec for name in PACKAGES if (spec := importlib.util.find_spec(name)) and spec.origin]
    if not specs or _has_bytecode(specs[0]):
        return None
    if sys.dont_write_bytecode or not os.access(Path(specs[0].origin or "").parent, os.W_OK):
        sys.dont_write_bytecode = False
        sys.pycache_prefix = str(folder)
        if _has_bytecode(specs[0]):
            return None
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
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
