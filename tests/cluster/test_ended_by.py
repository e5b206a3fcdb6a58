"""What is said of an engine process that a signal ended."""

from __future__ import annotations

import signal

from penstock.cluster.replica_process import ended_by


def test_memory_that_ran_out_is_named_for_sigkill_alone() -> None:
    assert "memory" in ended_by(signal.SIGKILL)
    assert ended_by(signal.SIGSEGV) == "was ended by signal 11"
