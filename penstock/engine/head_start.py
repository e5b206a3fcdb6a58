"""What a start on a GPU can do while torch is imported, which keeps one core busy for seconds."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import threading
from pathlib import Path

DEVICES = Path("/dev")
COMPILER_PARTS = ("_C/libtriton*.so", "backends/nvidia/bin/ptxas")
CUDA_LIBRARY = "libcuda.so.1"


def read_compiler_ahead() -> threading.Thread | None:
    """Have the system read the compiler of kernels from disk: 400 MB, which cost a machine that was just switched on
    three seconds where they are read in small pieces, as they are first used.

    Returns at once. None where there is no GPU to compile for, or no compiler."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None or not _has_gpu():
        return None
    package = Path(spec.origin).parent
    paths = [path for part in COMPILER_PARTS for path in sorted(package.glob(part))]
    return _start(threading.Thread(target=_read_ahead, args=(paths,), name="read-ahead", daemon=True))


def open_gpu_ahead() -> threading.Thread | None:
    """Let the driver find its devices and set up the first one, which torch then finds open: some tenths of a second.
    Then have Triton build its way to the driver, a small library, if this is the first time. CUDA_VISIBLE_DEVICES has
    to be what it will be.

    Returns at once. None where there is no GPU."""
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
    """If something is wrong, torch or Triton says so when it finds it itself."""
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
