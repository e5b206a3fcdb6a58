"""An API worker process on its own: what it says, and when it leaves."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.core.config import ServeConfig
from penstock.serve.api_workers import Begin, Drain, encode_line

pytestmark = pytest.mark.slow  # two processes that import everything

WAIT_S = 240
# A worker that prints when it has taken its standard output.
PRINTING = """
import sys
from penstock.serve import api_worker

take = api_worker._take_standard_output

def take_and_print():
    replies = take()
    print("x" * 1_000_000, flush=True)
    replies.write(b"ready")
    return replies

api_worker._take_standard_output = take_and_print
sys.exit(api_worker.main())
"""


def worker_without_engine(
    folder: Path, program: Sequence[str] = ("-m", "penstock.serve.api_worker"), **outputs: int
) -> subprocess.Popen[bytes]:
    """It waits for an engine that never comes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        descriptor = listener.fileno()
        process = subprocess.Popen(
            [sys.executable, *program], stdin=subprocess.PIPE, pass_fds=(descriptor,), **outputs
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


def test_what_a_worker_prints_does_not_fill_the_pipe_that_the_parent_reads_and_it_leaves_when_told_to(
    tmp_path: Path,
) -> None:
    process = worker_without_engine(
        tmp_path, ("-c", PRINTING), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(encode_line(Drain()))
        process.stdin.flush()
        assert process.wait(WAIT_S) == 0
        assert process.stdout.read() == b"ready"
    finally:
        process.kill()
        process.stdin.close()
        process.stdout.close()


def test_a_gateway_starts_without_modules_that_few_requests_need() -> None:
    slow = "{'torch', 'numpy', 'jwt', 'cryptography', 'sqlalchemy.dialects.postgresql', 'httpx', 'rich'}"
    modules = "penstock.serve.server, penstock.serve.api_worker, penstock.api.app"
    script = f"import sys, {modules}; print(*({slow} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
