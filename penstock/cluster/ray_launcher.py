"""Launches engines as actors of a Ray cluster, each in its own placement group. Restarts nothing: `supervisor` does.

The actor, `EngineHost`, runs on a node of the cluster, where Penstock must be installed, and starts one engine
process. The worker is the same as on one machine, and leaves when the actor ends. A replica with several stages has
an actor for each, which may be on different nodes: the first starts the engine process, the others its ranks. Ray is
imported when the first replica is launched; the engine is never imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.cluster.replica import ReplicaSpec, RunningReplica
from penstock.cluster.transport import EngineKeys, KeyPair, with_key
from penstock.core.config import Placement
from penstock.core.engine_config import DEFAULT_CPU_KV_MEMORY, Rendezvous, decode_rendezvous
from penstock.core.errors import ConfigError, EngineUnavailable
from penstock.core.figures import format_bytes, parse_bytes
from penstock.core.machine import free_port, install_command


class EngineHost:
    """The body of the actor: one engine process, or the ranks of a stage. Ray runs its methods on one event loop."""

    def __init__(self, node_address: str) -> None:
        self._node_address = node_address
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(
        self,
        engine: bytes,
        model_path: str,
        log_level: str,
        log_format: str,
        *,
        has_other_nodes: bool = False,
    ) -> tuple[str, bytes]:
        """Start the engine process. Returns its endpoint, with the key, and, if it has ranks in other
        actors, the rendezvous as JSON. `engine` is the engine's config as JSON."""
        keys = KeyPair.make()
        key_file = self._folder / "key"
        EngineKeys(keys.secret).write(key_file)
        address = f"tcp://{self._node_address}:{free_port(self._node_address)}"
        arguments = ["--endpoint", address, "--key-file", str(key_file), "--model-path", model_path]
        arguments += ["--parent-pid", str(os.getpid()), "--log-level", log_level, "--log-format", log_format]
        rendezvous = b""
        if has_other_nodes:
            host = self._node_address
            made = Rendezvous(host=host, port=free_port(host), key=secrets.token_urlsafe(32), node_host=host)
            rendezvous = msgspec.json.encode(made)
            arguments += ["--rendezvous", str(self._write(rendezvous))]
        process = await self._run("penstock.cluster.worker", *arguments)
        assert process.stdin is not None
        process.stdin.write(engine)
        process.stdin.close()
        return with_key(address, keys.public), rendezvous

    async def start_ranks(self, rendezvous: bytes, ranks: list[int]) -> None:
        """Start processes that connect to the engine process of another actor, one for each rank."""
        there = decode_rendezvous(rendezvous)
        copy = self._write(msgspec.json.encode(replace(there, node_host=self._node_address)))
        for rank in ranks:
            await self._run("penstock.engine.parallel.rank", "--rendezvous", str(copy), str(rank))

    async def wait(self) -> int:
        """Wait for the exit code of the process that ends first."""
        assert self._processes, "start() comes first"
        ends = [asyncio.ensure_future(process.wait()) for process in self._processes]
        done, others = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)
        return done.pop().result()

    async def kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _run(self, *command: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *command, stdin=asyncio.subprocess.PIPE
        )
        self._processes.append(process)
        return process

    def _write(self, rendezvous: bytes) -> Path:
        path = self._folder / "rendezvous"
        path.touch(mode=0o600)
        path.write_bytes(rendezvous)
        return path


logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 2.0  # for an actor to end its engine; then the actor is ended
RAY_TIMEOUT_S = 5.0  # for Ray to take something back
NOTICE_AFTER_S = 10.0  # without room for a replica, before that is said
LAST_WORDS_S = 3.0  # for an engine to say which rank it lost
MAX_STAGES = 64
WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin")


class RayLauncher:
    def __init__(
        self,
        address: str | None = None,
        *,
        placement: Placement = "pack",
        log_level: str = "INFO",
        log_format: str = "text",
    ) -> None:
        self._address = address
        self._placement = placement
        self._log_level = log_level
        self._log_format = log_format
        self._joining = asyncio.Lock()

    async def launch(self, spec: ReplicaSpec, replica_id: str) -> RunningReplica:
        """Wait until there is room, and start the engine process there, and the stages after the first beside it or
        on other nodes."""
        ray = await self._join()
        from ray.util.placement_group import placement_group, remove_placement_group

        needs = resources(spec, ray.cluster_resources())
        refuse_too_large(spec, needs, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        # One bundle for each stage: its ranks are processes of one machine.
        bundles = [needs] * spec.engine.parallel.pipeline_parallel_size
        strategy = self._placement.replace("-", "_").upper()
        group = placement_group(bundles, strategy=strategy, name=f"penstock-{replica_id}")
        try:
            await _placed(group, replica_id, bundles)
            hosts = [_host(ray, group, needs, replica_id, stage) for stage in range(len(bundles))]
            endpoint = await self._start(hosts, spec)
        except ray.exceptions.RayError as error:
            await _aside(remove_placement_group, group)
            raise EngineUnavailable(
                f"Ray could not start {replica_id}: {error}.", retry_after_s=5.0
            ) from error
        except BaseException:
            await _aside(remove_placement_group, group)  # and with it the actors
            raise
        return _RayReplica(ray, hosts, group, endpoint)

    async def _start(self, hosts: list[Any], spec: ReplicaSpec) -> str:
        """Start the processes of a replica. Returns its endpoint."""
        endpoint, rendezvous = await hosts[0].start.remote(
            msgspec.json.encode(spec.engine),
            spec.model_path,
            self._log_level,
            self._log_format,
            has_other_nodes=len(hosts) > 1,
        )
        size = spec.engine.parallel.tensor_parallel_size
        await asyncio.gather(
            *(
                host.start_ranks.remote(rendezvous, list(range(stage * size, (stage + 1) * size)))
                for stage, host in enumerate(hosts)
                if stage > 0
            )
        )
        return str(endpoint)

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


def _host(ray: Any, group: Any, needs: dict[str, float], replica_id: str, stage: int) -> Any:
    """Start the actor of a stage."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=stage)
    actor_class = ray.remote(_Host).options(
        num_cpus=needs["CPU"],
        num_gpus=needs.get("GPU", 0),
        memory=needs.get("memory", 0),
        name=f"{replica_id}-stage-{stage}" if stage else replica_id,  # in a namespace of this server's own
        scheduling_strategy=strategy,
        max_restarts=0,
        max_concurrency=8,  # one call always waits for the end of the process
    )
    return actor_class.remote()


class _RayReplica:
    """Implements `replica.RunningReplica`. When one of its actors loses a process, the replica ends as a whole."""

    def __init__(self, ray: Any, hosts: list[Any], group: Any, endpoint: str) -> None:
        self._ray = ray
        self._hosts = hosts  # the first has the engine process
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
        """Wait until the engine process has ended, or cannot continue without a rank of another actor."""
        engine, *ranks = [asyncio.ensure_future(self._exit_code_of(host)) for host in self._hosts]
        await asyncio.wait((engine, *ranks), return_when=asyncio.FIRST_COMPLETED)
        # The engine ends by itself when a rank has gone, and says why.
        await asyncio.wait((engine,), timeout=LAST_WORDS_S)
        for end in (engine, *ranks):
            end.cancel()
        if engine.done() and not engine.cancelled():
            return engine.result()
        logger.error(
            "a rank of %s has gone, and its engine has not noticed", self._endpoint.partition("#")[0]
        )
        return -signal.SIGKILL

    async def _exit_code_of(self, host: Any) -> int:
        try:
            return int(await host.wait.remote())
        except self._ray.exceptions.RayError as error:
            logger.error("Ray lost an engine's actor: %s", str(error).partition("\n")[0])
            return -signal.SIGKILL

    async def _kill(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await asyncio.gather(*(_awaited(host.kill.remote()) for host in self._hosts))
        await self._free()

    async def _free(self) -> None:
        """Free the resources of the replica."""
        await asyncio.gather(*(_aside(self._ray.kill, host) for host in self._hosts))
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
    """Return the resources of a node that one stage of a replica takes; most replicas have one stage."""
    engine, parallel = spec.engine, spec.engine.parallel
    num_threads = engine.num_threads or 1
    needs = {"CPU": float(max(1, -(-num_threads // parallel.pipeline_parallel_size)))}
    device = engine.model.device
    if device == "cuda" or (device == "auto" and cluster.get("GPU", 0.0) > 0.0):
        needs["GPU"] = float(parallel.ranks_per_stage)
    elif num_bytes := _memory(spec):
        needs["memory"] = float(num_bytes)
    return needs


def refuse_too_large(
    spec: ReplicaSpec, needs: dict[str, float], nodes: Sequence[Mapping[str, float]]
) -> None:
    """Raise ConfigError for a stage that needs more memory than any node has declared."""
    largest = max((node.get("memory", 0.0) for node in nodes), default=0.0)
    needed = needs.get("memory", 0.0)
    if largest and needed > largest:
        num_stages = spec.engine.parallel.pipeline_parallel_size
        part = f"Each of {num_stages} stages of {spec.model}" if num_stages > 1 else spec.model
        hint = "Add a larger node"
        if spec.engine.parallel.data_parallel_size == 1:  # else there can be no stages
            hint += ", or share the layers out over nodes: --pipeline-parallel-size "
            hint += f"{_num_stages(spec, int(largest))}"
        raise ConfigError(
            f"{part} needs {format_bytes(int(needed))} of memory, and the largest node of the Ray cluster has "
            f"{format_bytes(int(largest))}.",
            hint=f"{hint}.",
        )


def _num_stages(spec: ReplicaSpec, node_bytes: int) -> int:
    """Return the fewest stages of which each fits a node; the most that are allowed if none does."""
    for count in range(2, MAX_STAGES):
        parallel = replace(spec.engine.parallel, pipeline_parallel_size=count)
        if _memory(replace(spec, engine=replace(spec.engine, parallel=parallel))) <= node_bytes:
            return count
    return MAX_STAGES


def _memory(spec: ReplicaSpec) -> int:
    """Return the least memory that one stage takes on CPUs: its part of the weights as they are stored, and the KV
    cache of each of its ranks."""
    engine, parallel, path = spec.engine, spec.engine.parallel, Path(spec.model_path)
    if engine.model.load_format == "random" or not path.exists():
        return 0
    files = [path] if path.is_file() else list(path.iterdir())
    stored = max(
        sum(file.stat().st_size for file in files if file.suffix == suffix) for suffix in WEIGHT_SUFFIXES
    )
    cache = 0
    if engine.cache.num_kv_blocks is None:
        cache = parse_bytes(engine.cache.kv_cache_memory or DEFAULT_CPU_KV_MEMORY)
    return -(-stored // parallel.pipeline_parallel_size) + cache * parallel.ranks_per_stage


async def _placed(group: Any, replica_id: str, bundles: list[dict[str, float]]) -> None:
    placed = asyncio.ensure_future(_awaited(group.ready()))
    try:
        while not (await asyncio.wait((placed,), timeout=NOTICE_AFTER_S))[0]:
            wanted = ", ".join(f"{count:g} {name}" for name, count in bundles[0].items())
            times = f"{len(bundles)} times " if len(bundles) > 1 else ""
            logger.warning("%s waits for room in the Ray cluster: %s%s", replica_id, times, wanted)
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
