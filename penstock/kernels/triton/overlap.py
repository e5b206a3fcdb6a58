"""Kernels that overlap, on GPUs that can do so (`targets`). Each kernel may start while the kernel before it drains
(programmatic dependent launch), and waits for that kernel's results before its first access to anything that the step
computes. Launch with `**launch_options()`."""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401 (the interpreter looks for it)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.kernels.triton.targets import current, overlaps


def launch_options() -> dict[str, bool]:
    return {"launch_pdl": True} if current().has_overlap else {}


@triton.jit
def let_next_start():
    """For kernels that read something before `wait_for_previous`. That may only be what no kernel of this step
    writes, such as weights and what the host sent before it: kernels before the previous one may be running still."""
    if overlaps():
        gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Let the next kernel start, and wait for the one before. Comes before the first load or store."""
    if overlaps():
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def let_next_run_beside():
    """Instead of `wait_for_previous`, for a kernel whose results the next kernel does not need before its end: wait
    for the one before, then let the next start. When the next kernel starts, what this one read is complete, so that
    the next may read the same at once, past the first-level cache, and call `wait_for_previous` before its first
    store."""
    if overlaps():
        gdc_wait()
        gdc_launch_dependents()
