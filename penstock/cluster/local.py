"""Launches engines as child processes on this machine. Never imports the engine, and restarts nothing: `supervisor`
does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.cluster.early import WORKER, EarlyProcess
from penstock.cluster.replica import ReplicaSpec, RunningReplica
from penstock.cluster.transport import EngineKeys, KeyPair, with_key
from penstock.core.engine_config import EngineConfig
from penstock.core.machine import free_port

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class NetworkAddress:
    """The address at which engines of this machine listen for the gateways of a shared fleet."""

    host: str  # an address of this machine that gateways reach
    accepted: tuple[str, ...]  # public keys of clients
    client: KeyPair  # for connections to other engines

    def open(self, key_file: Path) -> tuple[str, str]:
        """Write the keys of a new engine. Returns its address, and the endpoint for gateways."""
        keys = KeyPair.make()
        EngineKeys(keys.secret, self.accepted, self.client).write(key_file)
        host = f"[{self.host}]" if ":" in self.host else self.host
        address = f"tcp://{host}:{free_port(self.host)}"
        return address, with_key(address, keys.public)


class LocalLauncher:
    """Launches engine processes. Each process listens on a socket in a private folder: no other user of the machine
    can reach it.

    With `network`, processes listen on an address of this machine instead, for gateways of a shared fleet elsewhere.
    `gpus` are the devices of this machine, as CUDA_VISIBLE_DEVICES names them. A process gets one for each of its
    ranks, the devices with the fewest processes so far; without `gpus` it sees the devices of its parent."""

    def __init__(
        self,
        *,
        gpus: Sequence[str] = (),
        log_level: str = "INFO",
        log_format: str = "text",
        early: EarlyProcess | None = None,
        bytecode: Path | None = None,
        network: NetworkAddress | None = None,
    ) -> None:
        """`early` becomes the first engine that is launched. All others keep the bytecode of packages that
        were installed without any in the folder `bytecode`."""
        self._early = early
        self._network = network
        self._bytecode = ["--bytecode", str(bytecode)] if bytecode is not None else []
        self._gpu_uses = dict.fromkeys(gpus, 0)
        self._log_level = log_level
        self._log_format = log_format

    async def launch(self, spec: ReplicaSpec, replica_id: str) -> RunningReplica:
        folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        key_file = folder / "key"
        if self._network is None:
            address = endpoint = f"ipc://{folder / 'engine.sock'}"
        else:
            address, endpoint = self._network.open(key_file)
        gpus = self._take_gpus(spec.engine.parallel.num_ranks)
        arguments = ["--endpoint", address, "--model-path", spec.model_path, "--log-level", self._log_level]
        arguments += ["--log-format", self._log_format, "--parent-pid", str(os.getpid())]
        if self._network is not None:
            arguments += ["--key-file", str(key_file)]
        if gpus:
            arguments += ["--gpus", ",".join(gpus)]
        process = await self._start(arguments, spec.engine)
        return _LocalProcess(process, endpoint, folder, partial(self._give_back_gpus, gpus))

    async def _start(self, arguments: list[str], config: EngineConfig) -> _Process:
        if self._early is not None and (early := self._early.take(arguments, config)) is not None:
            return _StartedProcess(early)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", WORKER, *arguments, *self._bytecode, stdin=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(config))
        process.stdin.close()
        return process

    def _take_gpus(self, count: int) -> list[str]:
        taken = sorted(self._gpu_uses, key=lambda gpu: self._gpu_uses[gpu])[:count]
        for gpu in taken:
            self._gpu_uses[gpu] += 1
        return taken

    def _give_back_gpus(self, gpus: Sequence[str]) -> None:
        for gpu in gpus:
            self._gpu_uses[gpu] -= 1


class _Process(Protocol):
    """The part of asyncio's Process that is used here."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int: ...

    def kill(self) -> None: ...


class _StartedProcess:
    """A process that was started before there was an event loop."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        threading.Thread(target=self._watch, args=(self._end.get_loop(),), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    def kill(self) -> None:
        self._process.kill()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # The event loop is closed, and no task waits any more.
            loop.call_soon_threadsafe(self._end.set_result, code)


class _LocalProcess:
    """Implements `replica.RunningReplica`."""

    def __init__(self, process: _Process, endpoint: str, folder: Path, on_end: Callable[[], None]) -> None:
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
            logger.warning(
                "engine process %d did not leave in %.0f s; killing it", self._process.pid, STOP_TIMEOUT_S
            )
            self.kill()
            await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._on_end()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
