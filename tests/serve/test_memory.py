"""Large buffers that are freed go back to the system, and memory in use moves into large pages."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# Buffers that go to a heap leave holes between the small ones, which stay.
SCRIPT = """
import os
from penstock.serve.process import return_large_buffers

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

return_large_buffers()
kept = []
before = resident_bytes()
for _ in range(3):
    large = []
    for _ in range(4):
        large.append(b"x" * (8 << 20))
        kept.append(b"x" * (64 << 10))
    large.clear()
print(resident_bytes() - before)
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallopt"),
    reason="only glibc keeps the memory of large buffers",
)
def test_large_buffers_go_back() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 12 << 20


# Memory of which one page in 512 is in use, and memory that is full of objects.
LARGE_PAGES_SCRIPT = """
import mmap
from penstock.serve.process import use_large_pages

def kilobytes(field):
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))

sparse = mmap.mmap(-1, 128 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for start in range(0, len(sparse), 2 << 20):
    sparse[start] = 1
objects = [[number] for number in range(300_000)]
before = kilobytes("Rss:")
num_bytes = use_large_pages()
print(num_bytes >> 10, kilobytes("AnonHugePages:"), kilobytes("Rss:") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux collapses pages")
def test_memory_in_use_moves_into_large_pages() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LARGE_PAGES_SCRIPT], check=True, capture_output=True, text=True
    )
    moved_kb, large_kb, grown_kb = map(int, done.stdout.split())
    if not moved_kb:
        pytest.skip("this system has no large pages, or does not collapse pages")
    assert large_kb >= moved_kb >= 8 << 10
    assert grown_kb < 32 << 10  # the memory that is mostly free has stayed as it was
