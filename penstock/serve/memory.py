"""The memory of a gateway process: when garbage is collected, and how much free memory the process keeps."""

from __future__ import annotations

import ctypes
import gc

# A request makes hundreds of objects and hardly a cycle among them: a search for cycles at every 700th object finds
# nothing.
GC_THRESHOLDS = (20_000, 20, 50)
# Parameters of glibc's `mallopt`, from <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
MAPPED_BYTES = 1 << 20  # buffers of this size are mapped one by one, so that freeing one returns its memory
MAX_FREE_BYTES = 8 << 20  # at the end of a heap


def settle_memory() -> None:
    """Call once the long-lived objects of a process are built."""
    gc.collect()
    gc.freeze()  # what lives as long as the process costs the garbage collector nothing
    gc.set_threshold(*GC_THRESHOLDS)
    return_large_buffers()


def return_large_buffers() -> None:
    """Let the C library return the memory of large buffers, such as bodies of requests, when they are freed. By
    default glibc raises the size from which it maps buffers to 32 MiB, as soon as such buffers are freed; later
    buffers then leave holes in the heaps of threads, which stay with the process. Does nothing on other C
    libraries."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, MAX_FREE_BYTES)
