"""The memory of a gateway process: when garbage is collected, and how much free memory the process keeps."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
from collections.abc import Iterator
from pathlib import Path

# A request makes hundreds of objects and hardly a cycle among them: a search for cycles at every 700th object finds
# nothing.
GC_THRESHOLDS = (20_000, 20, 50)
# Parameters of glibc's `mallopt`, from <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
MAPPED_BYTES = 1 << 20  # buffers of this size are mapped one by one, so that freeing one returns its memory
MAX_FREE_BYTES = 8 << 20  # at the end of a heap
_MADV_COLLAPSE = 25  # since Linux 6.1
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_MIN_USED_SHARE = 0.5  # of a large page: less would waste memory


def settle_memory() -> None:
    """Call once the long-lived objects of a process are built."""
    gc.collect()
    gc.freeze()  # what lives as long as the process costs the garbage collector nothing
    gc.set_threshold(*GC_THRESHOLDS)
    return_large_buffers()
    use_large_pages()


def return_large_buffers() -> None:
    """Let the C library return the memory of large buffers, such as bodies of requests, when they are freed. By
    default glibc raises the size from which it maps buffers to 32 MiB, as soon as such buffers are freed; later
    buffers then leave holes in the heaps of threads, which stay with the process. Does nothing on other C
    libraries."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, MAX_FREE_BYTES)


def use_large_pages() -> int:
    """Move the memory of this process into large pages, as far as most of such a page is in use, and return how many
    bytes that were. A request runs hundreds of functions whose code and objects lie all over the heap: with pages of
    4 KiB, the processor spends much time on finding out where they are. Does nothing on other systems, and where
    large pages are switched off."""
    try:
        if "[never]" in (_LARGE_PAGES / "enabled").read_text():  # which the kernel itself may overlook
            return 0
        page_bytes = int((_LARGE_PAGES / "hpage_pmd_size").read_text())
        libc = ctypes.CDLL(None)
        mincore, madvise = libc.mincore, libc.madvise
    except (OSError, ValueError, AttributeError):
        return 0
    residency = (ctypes.c_ubyte * (page_bytes // mmap.PAGESIZE))()
    num_bytes = 0
    for start, end in _anonymous_memory():
        for address in range(-(-start // page_bytes) * page_bytes, end - page_bytes + 1, page_bytes):
            place, length = ctypes.c_void_p(address), ctypes.c_size_t(page_bytes)
            if mincore(place, length, residency) or sum(residency) < _MIN_USED_SHARE * len(residency):
                continue
            if madvise(place, length, _MADV_COLLAPSE) == 0:
                num_bytes += page_bytes
    return num_bytes


def _anonymous_memory() -> Iterator[tuple[int, int]]:
    """Yield the beginning and the end of each region that is private, writable, and part of no file."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            region, access, _, _, inode, *name = line.split(maxsplit=5)
            if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
                start, _, end = region.partition("-")
                yield int(start, 16), int(end, 16)
