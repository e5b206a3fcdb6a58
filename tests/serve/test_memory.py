"""Large buffers that are freed go back to the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# Buffers that go to a heap leave holes between the small ones, which stay.
SCRIPT = """
import os
from penstock.serve.memory import return_large_buffers

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
