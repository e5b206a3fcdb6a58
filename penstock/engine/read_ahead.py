"""Has the system read the compiler of GPU kernels from disk while torch is imported.

That is a library of 400 MB. Read in small pieces, as it is first used, it costs a machine that was just switched on
three seconds of its start.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from pathlib import Path

GPU_DEVICES = Path("/dev")
PARTS = ("_C/libtriton*.so", "backends/nvidia/bin/ptxas")


def read_compiler_ahead() -> threading.Thread | None:
    """Returns at once. None where there is no GPU to compile for, or no compiler."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None or not any(GPU_DEVICES.glob("nvidia[0-9]*")):
        return None
    package = Path(spec.origin).parent
    paths = [path for part in PARTS for path in sorted(package.glob(part))]
    reading = threading.Thread(target=_read_ahead, args=(paths,), name="read-ahead", daemon=True)
    reading.start()
    return reading


def _read_ahead(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
