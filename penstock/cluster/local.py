"""One engine as a child process of the gateway: started, watched, restarted, stopped. Never imports the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.cluster.transport import ZmqEngineClient
from penstock.core.config import EngineConfig
from penstock.core.errors import EngineUnavailable
from penstock.core.messages import EngineReady, LoadProgress

log = logging.getLogger(__name__)

FIRST_RESTART_DELAY_S = 0.5
LAST_RESTART_DELAY_S = 30.0
STOP_TIMEOUT_S = 5.0


class LocalReplica:
    """Owns one worker process and the client that talks to it.

    A process that dies after it was ready is started again, with growing pauses; what it was serving ends with a
    retryable error. One that dies before it was ever ready is not: its own error is what the user must see.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        *,
        log_level: str = "INFO",
        log_format: str = "text",
        on_progress: Callable[[LoadProgress], None] | None = None,
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._log_level = log_level
        self._log_format = log_format
        # A socket in a private folder: no other user of the machine can reach the engine.
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        self._endpoint = f"ipc://{self._folder / 'engine.sock'}"
        self.client = ZmqEngineClient(self._endpoint, on_progress=on_progress)
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._was_ready = False
        self._stopping = False
        # Told why the engine process ended, and with None when a new one starts.
        self.on_change: Callable[[str | None], None] = lambda _: None

    @property
    def endpoint(self) -> str:
        """Where further gateways reach the engine, also after a restart."""
        return self._endpoint

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> EngineReady:
        """Returns when the engine can serve; raises its error when it cannot start."""
        await self._launch()
        self.client.start()
        self._watcher = asyncio.create_task(self._watch())
        ready = await self.client.wait_ready()
        self._was_ready = True
        return ready

    async def stop(self) -> None:
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            self.client.shut_down_engine()
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                log.warning("the engine did not leave in %.0f s; killing it", STOP_TIMEOUT_S)
                process.kill()
                await process.wait()
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        self.client.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _launch(self) -> None:
        command = [sys.executable, "-m", "penstock.cluster.worker", "--endpoint", self._endpoint]
        command += ["--model-path", str(self._model_path), "--log-level", self._log_level]
        command += ["--log-format", self._log_format]
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._config))
        process.stdin.close()
        self._process = process

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        delay_s = FIRST_RESTART_DELAY_S
        while True:
            process = self._process
            assert process is not None
            started_s = loop.time()
            code = await process.wait()
            if loop.time() - started_s > LAST_RESTART_DELAY_S:
                delay_s = FIRST_RESTART_DELAY_S
            if self._stopping:
                return
            await asyncio.sleep(0.05)  # its last words may still be in the socket
            ended = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
            message = f"The engine process ended {ended}."
            self.client.fail(EngineUnavailable(message, retry_after_s=5.0))
            self.on_change(message)
            if not self._was_ready:
                return
            log.error("the engine process ended %s; starting it again in %.1f s", ended, delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, LAST_RESTART_DELAY_S)
            await self._launch()
            self.client.start()
            self.on_change(None)
