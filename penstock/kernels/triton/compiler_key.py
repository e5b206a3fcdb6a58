"""By what Triton knows on disk which of its kernels it compiled itself.

Of its own it reads all its files before it looks for a kernel, 400 MB, to hash them: half a second, and two on a
machine that has just been switched on. The wheel that it was installed from lists the hashes of all of them, so one
of that list says as much. Later edits in the installed package go unnoticed.
"""

from __future__ import annotations

import functools
import hashlib
from importlib import metadata


@functools.cache
def know_compiler_by_its_wheel() -> bool:
    """False where Triton does not come from a wheel, or keeps its key elsewhere than it used to."""
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
