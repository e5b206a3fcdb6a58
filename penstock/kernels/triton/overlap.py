"""Kernels that overlap. Each kernel may start while the kernel before it drains (programmatic dependent launch), and
waits for that kernel's results before its first access to anything that the step computes. Launch with
`launch_pdl=True`."""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401 (the interpreter looks for it)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if triton.knobs.runtime.interpret:

    @triton.jit
    def wait_for_previous():
        """Nothing overlaps in the interpreter."""

    @triton.jit
    def let_next_start():
        """Nothing overlaps in the interpreter."""

else:

    @triton.jit
    def let_next_start():
        """For kernels that read something before `wait_for_previous`. That may only be what no kernel of this step
        writes, such as weights and what the host sent before it: kernels before the previous one may be running
        still."""
        gdc_launch_dependents()

    @triton.jit
    def wait_for_previous():
        """Let the next kernel start, and wait for the one before. Comes before the first load or store."""
        gdc_launch_dependents()
        gdc_wait()
