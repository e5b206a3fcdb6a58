"""A `penstock serve` of our own, in the background for as long as a command needs it."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from penstock.cli.chat_client import ChatClient
from penstock.cli.console import spinner
from penstock.core.errors import UsageError

_POLL_S = 0.1
_STOP_TIMEOUT_S = 10.0


@contextmanager
def background_server(model: str) -> Iterator[str]:
    """Serve `model` on a free loopback port and yield the URL once it is ready. The server ends with the block."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "penstock.main", "serve", "--model", model),
                *("--host", "127.0.0.1", "--port", str(port), "--drain-timeout", "0"),
                "--no-require-keys",  # it is ours alone, whatever keys other servers ask for
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C stops an answer, not the server
        )
        try:
            with spinner(f"Starting {model}"):
                _wait_until_ready(process, url, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: IO[str]) -> None:
    client = ChatClient(url)
    try:
        while not client.is_ready():
            if process.poll() is not None:
                raise UsageError(_last_error(log), hint="`penstock serve` with --debug shows more.")
            time.sleep(_POLL_S)
    finally:
        client.close()


def _last_error(log: IO[str]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    errors = [line.removeprefix("Error:").strip() for line in lines if line.startswith("Error:")]
    return errors[-1] if errors else f"The server did not start: {lines[-1] if lines else 'it said nothing'}."


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
