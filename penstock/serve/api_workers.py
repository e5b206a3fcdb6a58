"""Several gateway processes on one socket, for machines with many cores. The parent starts the workers, tells them
which replicas there are, restarts a worker that dies, and drains all of them. Messages are JSON lines over a worker's
standard input and output.

Workers take about as many connections each. They share limits through memory, and everything else in the database. A
worker knows only the folder where the others report metrics and keep what they share.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import TypeAlias

import msgspec

from penstock.cluster.replica import Member
from penstock.core.config import ServeConfig
from penstock.core.machine import usable_cores
from penstock.core.messages import EngineReady

logger = logging.getLogger(__name__)

FIRST_RESTART_DELAY_S = 0.5
LAST_RESTART_DELAY_S = 30.0
START_TIMEOUT_S = 60.0
LEAVE_TIMEOUT_S = 5.0  # for a worker to end after its drain
MAX_API_WORKERS = 4  # unless the operator sets more


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first message to a worker. `listener_fd` is the inherited listening socket."""

    config: ServeConfig
    members: tuple[Member, ...]
    models: dict[str, EngineReady]  # the served models, which a fleet without replicas cannot report
    control_socket: str
    listener_fd: int
    is_open: bool
    siblings: tuple[str, ...]  # paths of the sockets where the workers, this one included, answer each other
    number: int  # the index of this worker in `siblings`


class Members(msgspec.Struct, frozen=True, tag="members"):
    """All replicas that exist now."""

    members: tuple[Member, ...]


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Leave as after SIGTERM: take requests for the lame-duck time, finish running answers, then end."""


class CutShort(msgspec.Struct, frozen=True, tag="cut_short"):
    """End now, in the middle of answers."""


ToWorker: TypeAlias = Begin | Members | Drain | CutShort


class WorkerReady(msgspec.Struct, frozen=True, tag="ready"):
    pass


def encode_line(message: ToWorker | WorkerReady) -> bytes:
    return msgspec.json.encode(message) + b"\n"


decode_to_worker = msgspec.json.Decoder(ToWorker).decode


def with_api_workers(config: ServeConfig, *, has_keys: bool) -> ServeConfig:
    """Choose the number of API processes if the operator has not set it.

    Passing requests on to external servers takes the gateway's own processor time, and a process uses one core. But
    several processes keep stored answers in the database, so there is one process where no keys have been made, and
    so perhaps no database. There is one, too, where an external server takes only this many requests at a time,
    because requests that wait for it are best in one queue."""
    if config.server.api_workers is not None or config.runs_engines or not has_keys:
        return config
    if any(server.max_concurrent is not None for server in config.external):
        return config
    server = msgspec.structs.replace(config.server, api_workers=min(usable_cores(), MAX_API_WORKERS))
    return msgspec.structs.replace(config, server=server)


class ApiWorkers:
    def __init__(
        self, config: ServeConfig, listener: socket.socket, control_socket: Path, *, is_open: bool
    ) -> None:
        self._config = config
        self._control_socket = control_socket
        self._members: tuple[Member, ...] = ()
        self.models: dict[str, EngineReady] = {}  # set if the fleet may scale down to no replica
        self._listener = listener
        self._is_open = is_open
        # The folder is private, because metrics are not for other users of the machine.
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-api-"))
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._restarting: list[asyncio.Task[None]] = []

    async def start(self) -> bool:
        """Start all workers, and return when every worker accepts connections."""
        numbers = range(self._config.server.num_api_workers)
        await asyncio.gather(*map(self._launch, numbers))
        self._restarting = [asyncio.create_task(self._restart_when_dead(number)) for number in numbers]
        return True

    def announce_members(self, members: tuple[Member, ...]) -> None:
        """Tell all workers, and workers that start later, which replicas exist now."""
        self._members = members
        self._tell_all(Members(members))

    async def drain(self) -> bool:
        """Return when all workers have ended, or their time to drain is over."""
        self._leave()
        self._tell_all(Drain())
        server = self._config.server
        await self._await_all(server.lame_duck_s + server.drain_timeout + LEAVE_TIMEOUT_S)
        return True

    async def cut_short(self) -> None:
        self._tell_all(CutShort())
        await self._await_all(LEAVE_TIMEOUT_S)

    async def stop(self) -> None:
        self._leave()
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
        await self._await_all(LEAVE_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _leave(self) -> None:
        """Stop restarting workers."""
        for task in self._restarting:
            task.cancel()

    async def _launch(self, number: int) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock.serve.api_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(self._listener.fileno(),),
        )
        self._processes[number] = process
        siblings = tuple(
            str(self._folder / f"{index}.sock") for index in range(self._config.server.num_api_workers)
        )
        begin = Begin(
            self._config,
            self._members,
            self.models,
            str(self._control_socket),
            self._listener.fileno(),
            self._is_open,
            siblings,
            number,
        )
        self._tell(process, begin)
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        if not line:
            raise RuntimeError(f"API worker {number} ended before it was ready")

    async def _restart_when_dead(self, number: int) -> None:
        """Start a worker again whenever it dies, with growing pauses."""
        delay_s = FIRST_RESTART_DELAY_S
        while True:
            code = await self._processes[number].wait()
            logger.error(
                "API worker %d ended with code %d; starting it again in %.1f s", number, code, delay_s
            )
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, LAST_RESTART_DELAY_S)
            try:
                await self._launch(number)
                delay_s = FIRST_RESTART_DELAY_S
            except (RuntimeError, TimeoutError):  # the next turn waits for the end of that process
                pass
            except OSError as error:  # the system has no process or memory left for now
                logger.error("API worker %d cannot be started: %s", number, error)

    def _tell_all(self, message: ToWorker) -> None:
        for process in self._processes.values():
            self._tell(process, message)

    def _tell(self, process: asyncio.subprocess.Process, message: ToWorker) -> None:
        if process.returncode is None and process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(encode_line(message))

    async def _await_all(self, timeout_s: float) -> None:
        waits = [process.wait() for process in self._processes.values()]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waits), timeout_s)
