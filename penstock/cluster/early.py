"""Starts an engine process before its model and settings are known. Light to import.

Python and torch take a second or more to load. Meanwhile the server reads its settings, its database and its own
modules, and only then knows what to launch; by that time this process has loaded Python and torch.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import msgspec

from penstock.core.engine_config import EngineConfig

logger = logging.getLogger(__name__)

WORKER = "penstock.cluster.worker"


class EarlyProcess:
    """A process for one engine on this machine. If it is never taken, it ends with `close` or with its parent."""

    def __init__(self, bytecode: Path) -> None:
        """`bytecode` is a folder for the bytecode of packages that were installed without any."""
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-m", WORKER, "--early", str(bytecode)], stdin=subprocess.PIPE
        )

    def take(self, arguments: list[str], config: EngineConfig) -> subprocess.Popen[bytes] | None:
        """Turn the process into an engine and return it; None if it was taken already or has ended."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None
        try:
            with process.stdin as stdin:
                stdin.write(msgspec.json.encode(arguments) + b"\n" + msgspec.json.encode(config))
        except BrokenPipeError:
            logger.warning("the engine process that was started early ended with %d", process.wait())
            return None
        return process

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()  # The process does nothing yet that needs an orderly end.
        process.communicate()
