"""The actor that runs on a node of a Ray cluster and starts one engine process. The worker is the same as on one
machine; it leaves when the actor ends.

Imported by Ray on the node, where Penstock must be installed. Never imports the engine, nor Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from penstock.cluster.endpoints import KeyPair, with_key


class EngineHost:
    """The body of the actor. Ray runs its methods on one event loop."""

    def __init__(self, node_address: str) -> None:
        self._node_address = node_address
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, engine: bytes, model_path: str, log_level: str, log_format: str) -> str:
        """Start the engine process; returns its endpoint, with the key to it. `engine` is its config as JSON."""
        keys = KeyPair.make()
        key_file = self._folder / "key"
        key_file.touch(mode=0o600)
        key_file.write_text(keys.secret)
        address = f"tcp://{self._node_address}:{_free_port(self._node_address)}"
        command = [sys.executable, "-m", "penstock.cluster.worker", "--endpoint", address]
        command += ["--key-file", str(key_file), "--model-path", model_path, "--parent-pid", str(os.getpid())]
        command += ["--log-level", log_level, "--log-format", log_format]
        self._process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(engine)
        self._process.stdin.close()
        return with_key(address, keys.public)

    async def wait(self) -> int:
        """The exit code of the engine process."""
        assert self._process is not None, "start() comes first"
        code = await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        return code

    async def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def _free_port(node_address: str) -> int:
    """A free port. Another process could take it first; then the engine fails and is started again."""
    with socket.socket() as probe:
        probe.bind((node_address, 0))
        return int(probe.getsockname()[1])
