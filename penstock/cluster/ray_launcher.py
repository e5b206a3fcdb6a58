"""Launches engines as actors of a Ray cluster, each in its own placement group. Restarts nothing: `supervisor` does.

The actor, `EngineHost`, runs on a node of the cluster, where Penstock must be installed, and starts one engine
process. The worker is the same as on one machine, and leaves when the actor ends. Ray is imported when the first
replica is launched; the engine is never imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.cluster.replica import ReplicaSpec, RunningReplica
from penstock.cluster.transport import EngineKeys, KeyPair, free_port, with_key
from penstock.core.errors import ConfigError, EngineUnavailable
from penstock.core.installation import install_command


class EngineHost:
    """The body of the actor. Ray runs its methods on one event loop."""

    def __init__(self, node_address: str) -> None:
        self._node_address = node_address
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, engine: bytes, model_path: str, log_level: str, log_format: str) -> str:
        """Start the engine process. Returns its endpoint, with the key. `engine` is the engine's config as JSON."""
        keys = KeyPair.make()
        key_file = self._folder / "key"
        EngineKeys(keys.secret).write(key_file)
        address = f"tcp://{self._node_address}:{free_port(self._node_address)}"
        command = [sys.executable, "-m", "penstock.cluster.worker", "--endpoint", address]
        command += ["--key-file", str(key_file), "--model-path", model_path, "--parent-pid", str(os.getpid())]
        command += ["--log-level", log_level, "--log-format", log_format]
        self._process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(engine)
        self._process.stdin.close()
        return with_key(address, keys.public)

    async def wait(self) -> int:
        """Wait for the exit code of the engine process."""
        assert self._process is not None, "start() comes first"
        code = await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        return code

    async def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 2.0  # for an actor to end its engine; then the actor is ended
RAY_TIMEOUT_S = 5.0  # for Ray to take something back
NOTICE_AFTER_S = 10.0  # without room for a replica, before that is said


class RayLauncher:
    def __init__(
        self, address: str | None = None, *, log_level: str = "INFO", log_format: str = "text"
    ) -> None:
        self._address = address
        self._log_level = log_level
        self._log_format = log_format
        self._joining = asyncio.Lock()

    async def launch(self, spec: ReplicaSpec, replica_id: str) -> RunningReplica:
        """Wait until a node has room, and start the engine process there."""
        ray = await self._join()
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = resources(spec, ray.cluster_resources())
        # One bundle: all ranks of an engine are processes of one machine.
        group = placement_group([needs], strategy="STRICT_PACK", name=f"penstock-{replica_id}")
        try:
            await _placed(group, replica_id, needs)
            strategy = PlacementGroupSchedulingStrategy(placement_group=group)
            actor_class = ray.remote(_Host).options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                name=replica_id,  # in a namespace of this server's own
                scheduling_strategy=strategy,
                max_restarts=0,
                max_concurrency=8,  # one call always waits for the end of the process
            )
            actor = actor_class.remote()
            endpoint = await actor.start.remote(
                msgspec.json.encode(spec.engine), spec.model_path, self._log_level, self._log_format
            )
        except ray.exceptions.RayError as error:
            await _aside(remove_placement_group, group)
            raise EngineUnavailable(
                f"Ray could not start {replica_id}: {error}.", retry_after_s=5.0
            ) from error
        except BaseException:
            await _aside(remove_placement_group, group)  # and with it the actor
            raise
        return _RayReplica(ray, actor, group, endpoint)

    async def _join(self) -> Any:
        """Return Ray, connected to its cluster."""
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ConfigError(
                "Ray is not installed.", hint=f"Run: {install_command('ray')}, here and on every node."
            ) from error
        async with self._joining:
            if not ray.is_initialized():
                await asyncio.to_thread(_connect, ray, self._address)
                _take_signals_back()
        return ray


class _Host(EngineHost):
    def __init__(self) -> None:
        import ray

        super().__init__(ray.util.get_node_ip_address())


class _RayReplica:
    """Implements `replica.RunningReplica`."""

    def __init__(self, ray: Any, actor: Any, group: Any, endpoint: str) -> None:
        self._ray = ray
        self._actor = actor
        self._group = group
        self._endpoint = endpoint
        self._was_killed = asyncio.Event()
        self._ended = asyncio.ensure_future(self._end())
        self._killing: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def pid(self) -> int | None:
        return None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        try:
            await asyncio.wait_for(self.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            logger.warning("an engine on Ray did not leave in %.0f s; killing it", STOP_TIMEOUT_S)
            self.kill()
            await self.wait()
        if self._killing is not None:
            await self._killing
        await self._free()

    def kill(self) -> None:
        if self._killing is None:
            self._was_killed.set()
            self._killing = asyncio.create_task(self._kill())

    async def _end(self) -> int:
        """End the replica without waiting for its node, which does not answer if it is gone."""
        exited = asyncio.ensure_future(self._exit_code())
        killed = asyncio.ensure_future(self._was_killed.wait())
        await asyncio.wait((exited, killed), return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        if exited.done():
            return exited.result()
        exited.cancel()
        return -signal.SIGKILL

    async def _exit_code(self) -> int:
        try:
            return int(await self._actor.wait.remote())
        except self._ray.exceptions.RayError as error:
            logger.error("Ray lost an engine's actor: %s", str(error).partition("\n")[0])
            return -signal.SIGKILL

    async def _kill(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
            await asyncio.wait_for(self._actor.kill.remote(), KILL_TIMEOUT_S)
        await self._free()

    async def _free(self) -> None:
        """Free the resources of the replica."""
        await _aside(self._ray.kill, self._actor)
        await _aside(self._ray.util.remove_placement_group, self._group)


def _connect(ray: Any, address: str | None) -> None:
    try:
        ray.init(
            address=address or "local",
            include_dashboard=None if address else False,
            log_to_driver=True,
            logging_level=logging.WARNING,
        )
    except ConnectionError as error:
        raise ConfigError(
            f"No Ray cluster answers at {address}.",
            hint="Start one with `ray start --head`, or leave it out.",
        ) from error


def _take_signals_back() -> None:
    """Restore the handlers of signals. Ray's own handlers would end the process instead of letting it drain."""
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError):  # signals are the main thread's
            signal.signal(number, signal.getsignal(number))


def resources(spec: ReplicaSpec, cluster: dict[str, float]) -> dict[str, float]:
    """Return the resources of a node that one replica takes."""
    needs = {"CPU": float(spec.engine.num_threads or 1)}
    device = spec.engine.model.device
    if device == "cuda" or (device == "auto" and cluster.get("GPU", 0.0) > 0.0):
        needs["GPU"] = float(spec.engine.parallel.num_ranks)
    return needs


async def _placed(group: Any, replica_id: str, needs: dict[str, float]) -> None:
    placed = asyncio.ensure_future(_awaited(group.ready()))
    try:
        while not (await asyncio.wait((placed,), timeout=NOTICE_AFTER_S))[0]:
            wanted = ", ".join(f"{count:g} {name}" for name, count in needs.items())
            logger.warning("%s waits for a node of the Ray cluster with %s free", replica_id, wanted)
        await placed
    finally:
        placed.cancel()


async def _aside(work: Callable[[Any], object], argument: Any) -> None:
    """Make a plain call of Ray in a thread, because the cluster may never answer: neither the event loop nor the end
    of this process waits for the call."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def run() -> None:
        with contextlib.suppress(Exception):  # a cluster that is gone has nothing to give back
            work(argument)
        with contextlib.suppress(RuntimeError):  # and no caller waits for the result
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, daemon=True).start()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(done.wait(), RAY_TIMEOUT_S)


async def _awaited(reference: Any) -> Any:
    return await reference
