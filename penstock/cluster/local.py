"""Engines as child processes on this machine. Never imports the engine, and restarts nothing: `supervisor` does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from penstock.cluster.replica import ReplicaSpec, RunningReplica

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


class LocalLauncher:
    """Each process listens on a socket in a private folder of its own: no other user of the machine can reach it.

    `gpus` are the devices of this machine, as CUDA_VISIBLE_DEVICES names them. A process gets one for each of its
    ranks, those with the fewest processes so far; where there are none it sees what its parent sees."""

    def __init__(
        self, *, gpus: Sequence[str] = (), log_level: str = "INFO", log_format: str = "text"
    ) -> None:
        self._gpu_uses = dict.fromkeys(gpus, 0)
        self._log_level = log_level
        self._log_format = log_format

    async def launch(self, spec: ReplicaSpec, replica_id: str) -> RunningReplica:
        folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        endpoint = f"ipc://{folder / 'engine.sock'}"
        command = [sys.executable, "-m", "penstock.cluster.worker", "--endpoint", endpoint]
        command += ["--model-path", spec.model_path, "--log-level", self._log_level]
        command += ["--log-format", self._log_format, "--parent-pid", str(os.getpid())]
        gpus = self._take_gpus(spec.engine.parallel.num_ranks)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else None,
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(spec.engine))
        process.stdin.close()
        return _LocalProcess(process, endpoint, folder, partial(self._give_back_gpus, gpus))

    def _take_gpus(self, count: int) -> list[str]:
        taken = sorted(self._gpu_uses, key=lambda gpu: self._gpu_uses[gpu])[:count]
        for gpu in taken:
            self._gpu_uses[gpu] += 1
        return taken

    def _give_back_gpus(self, gpus: Sequence[str]) -> None:
        for gpu in gpus:
            self._gpu_uses[gpu] -= 1


class _LocalProcess:
    """Implements `replica.RunningReplica`."""

    def __init__(
        self, process: asyncio.subprocess.Process, endpoint: str, folder: Path, on_end: Callable[[], None]
    ) -> None:
        self._process = process
        self._endpoint = endpoint
        self._folder = folder
        self._on_end = on_end

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self) -> None:
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            log.warning(
                "engine process %d did not leave in %.0f s; killing it", self._process.pid, STOP_TIMEOUT_S
            )
            self.kill()
            await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._on_end()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
