"""The key by which Triton finds the kernels that it compiled earlier on disk.

Triton hashes all its files, 400 MB, before it looks for a kernel. This takes half a second, and two seconds on a
machine that has just been switched on. The wheel that Triton was installed from lists the hashes of all files, so a
hash of that list says as much. Later edits in the installed package go unnoticed.
"""

from __future__ import annotations

import functools
import hashlib
from importlib import metadata


@functools.cache
def know_compiler_by_its_wheel() -> bool:
    """Set the key. Returns False if Triton was not installed from a wheel, or keeps its key in another place."""
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
