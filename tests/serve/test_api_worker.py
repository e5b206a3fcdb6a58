"""An API worker process on its own: what it says, and when it leaves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.config import ServeConfig
from penstock.serve.api_workers import Begin, Drain, encode_line

pytestmark = pytest.mark.slow  # three processes that import everything

WAIT_S = 60


def worker_without_engine(folder: Path) -> subprocess.Popen[bytes]:
    """It waits for an engine that never comes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        descriptor = listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.serve.api_worker"], stdin=subprocess.PIPE, pass_fds=(descriptor,)
        )
        begin = Begin(
            config=ServeConfig(),
            members=(),
            models={},
            control_socket=str(folder / "control.sock"),
            listener_fd=descriptor,
            is_open=True,
            siblings=(str(folder / "0.sock"),),
            number=0,
        )
        assert process.stdin is not None
        process.stdin.write(encode_line(begin))
        process.stdin.flush()
        return process


def test_a_worker_that_waits_for_an_engine_leaves_with_its_parent(tmp_path: Path) -> None:
    process = worker_without_engine(tmp_path)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(WAIT_S) == 0


def test_a_worker_that_waits_for_an_engine_leaves_when_told_to(tmp_path: Path) -> None:
    process = worker_without_engine(tmp_path)
    assert process.stdin is not None
    process.stdin.write(encode_line(Drain()))
    process.stdin.flush()
    assert process.wait(WAIT_S) == 0
    process.stdin.close()


def test_what_is_printed_in_a_worker_does_not_fill_the_pipe_that_the_parent_reads() -> None:
    script = """
import sys
from penstock.serve.api_worker import _take_standard_output

replies = _take_standard_output()
print("x" * 1_000_000, flush=True)
replies.write(b"ready")
"""
    with open(os.devnull, "wb") as nowhere:
        process = subprocess.run(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=nowhere, timeout=WAIT_S, check=True
        )
    assert process.stdout == b"ready"
