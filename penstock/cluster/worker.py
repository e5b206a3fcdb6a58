"""Runs the engine process: messages in, steps, messages out. Run as `python -m penstock.cluster.worker`.

The only module of this room that imports the engine. One thread does everything. It reads its inbox between steps, so
a request or an abort takes effect at the next step. It sends one message per step to each gateway, or one per
millisecond if steps are shorter.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from penstock.cluster.transport import AcceptedClients, EngineKeys, KeyPair, bind, connect, with_key
from penstock.core.engine_config import EngineConfig, Rendezvous, decode_rendezvous
from penstock.core.errors import ConfigError, EngineUnavailable, PenstockError
from penstock.core.log_format import set_up_logs
from penstock.core.messages import (
    HEARTBEAT_INTERVAL_S,
    AbortRequests,
    AddRequest,
    Codec,
    EngineFailed,
    EngineStats,
    FromEngine,
    Hello,
    KVEvent,
    LoadProgress,
    RequestRejected,
    RestartKVEvents,
    Shutdown,
    StepOutputs,
)
from penstock.core.plan import TokenEvent
from penstock.engine.build import Engine, build_engine
from penstock.engine.startup import preload, prepare
from penstock.engine.transfer.port import Wire

if TYPE_CHECKING:
    from penstock.engine.transfer.thread import TransferThread

logger = logging.getLogger(__name__)

# An idle engine also looks for expired requests and for its parent as often as it sends its stats.
IDLE_POLL_S = HEARTBEAT_INTERVAL_S
# The poll while all requests wait for KV of other engines; a socket signals its arrival.
STUCK_POLL_S = 0.05
STATS_INTERVAL_S = 0.1
KV_EVENTS_INTERVAL_S = 0.02
EVENTS_INTERVAL_S = 0.001  # the events of shorter steps travel together
BROKEN_RECORDS_EXIT_CODE = 3
# An engine that fails at once may do so before the process that started it has connected.
FIRST_HELLO_TIMEOUT_S = 5.0
_READABLE = int(zmq.POLLIN)
_decode_config = msgspec.json.Decoder(EngineConfig).decode


class _Interval:
    """Tells when to do something that is done at most once in an interval."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._done_s = 0.0

    def is_due(self, *, at_once: bool = False) -> bool:
        """Return whether the action is due now. Saying so begins the next interval."""
        now = time.monotonic()
        if not at_once and now - self._done_s < self._interval_s:
            return False
        self._done_s = now
        return True


class Worker:
    """Serves any number of gateways; a request belongs to the gateway that sent it."""

    def __init__(self, endpoint: str, parent_pid: int | None = None, keys: EngineKeys | None = None) -> None:
        self._codec = Codec()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # so that a gateway that has gone is noticed
        self._keys = keys
        self._clients = AcceptedClients(self._context, keys.accepted) if keys and keys.accepted else None
        bind(self._socket, endpoint, None if keys is None else keys.secret)
        self._endpoint = endpoint
        self._inbox = zmq.Poller()
        self._inbox.register(self._socket, zmq.POLLIN)
        self._gateways: dict[bytes, None] = {}
        self._gateway_of: dict[str, bytes] = {}
        self._readers: set[bytes] = set()  # gateways that want KV events
        self._kv_events_every = _Interval(KV_EVENTS_INTERVAL_S)
        self._engine: Engine | None = None
        self._transfers: TransferThread | None = None
        self._stopping = False
        self._stats_every = _Interval(STATS_INTERVAL_S)
        self._events_every = _Interval(EVENTS_INTERVAL_S)
        self._unsent: list[TokenEvent] = []
        self._parent = parent_pid or os.getppid()

    def start(self, config: EngineConfig, model_path: Path, rendezvous: Rendezvous | None = None) -> None:
        def progress(stage: str, fraction: float) -> None:
            self._read_inbox(0.0)
            self._broadcast(LoadProgress(stage, fraction))

        engine = build_engine(config, model_path, on_progress=progress, rendezvous=rendezvous)
        self._engine = self._open_transfers(engine) if config.kv_transfer else engine
        # Loaded objects stay: the garbage collector need not visit them between steps.
        gc.collect()
        gc.freeze()
        gc.enable()
        self._broadcast(self._engine.ready)

    def _open_transfers(self, engine: Engine) -> Engine:
        """Open an endpoint at which other engines read KV, beside the endpoint for gateways."""
        if engine.shared_kv is None:
            raise ConfigError("--kv-transfer needs a model that has a KV cache.")
        wire = Wire(
            self._bind_beside, partial(connect, client_keys=None if self._keys is None else self._keys.client)
        )
        ranks = engine.ranks.kv_connections if engine.ranks is not None else ()
        self._transfers, opened = engine.shared_kv.open(wire, engine.loop, engine.recorder, ranks)
        self._inbox.register(self._transfers.news_bell, zmq.POLLIN)
        bytes_per_token = engine.shared_kv.memory.bytes_per_block // engine.ready.block_size
        ready = msgspec.structs.replace(engine.ready, kv_endpoint=opened, kv_bytes_per_token=bytes_per_token)
        return replace(engine, ready=ready)

    def _bind_beside(self, socket: zmq.Socket[bytes]) -> str:
        """Bind the endpoint for KV, on the network with a key of its own. Returns the endpoint."""
        here = self._endpoint
        if here.startswith("ipc://"):
            bind(socket, f"{here}.kv", None)
            return f"{here}.kv"
        keys = KeyPair.make()
        bind(socket, f"{here.rpartition(':')[0]}:*", keys.secret)
        return with_key(socket.getsockopt_string(zmq.LAST_ENDPOINT), keys.public)

    def run(self) -> None:
        engine = self._engine
        assert engine is not None, "start() comes first"
        loop = engine.loop
        while not self._stopping:
            busy = loop.has_work
            self._read_inbox(STUCK_POLL_S if busy and loop.is_stuck else 0.0 if busy else IDLE_POLL_S)
            if os.getppid() != self._parent:
                logger.warning("the gateway process has gone; leaving")
                return
            was_busy = busy or loop.has_work
            self._unsent += loop.step()
            is_idle = not loop.has_work
            events = self._take_unsent(at_once=is_idle or loop.step_s >= EVENTS_INTERVAL_S)
            became_idle = is_idle and was_busy
            kv_events = self._due_kv_events(at_once=became_idle)
            is_heartbeat = self._stats_every.is_due()
            stats = loop.stats() if is_heartbeat or became_idle else None
            self._send_outputs(events, stats, kv_events, to_all=is_heartbeat)
            for rejected in loop.take_rejections():
                gateway = self._gateway_of.pop(rejected.request_id, None)
                if gateway is not None:
                    self._send(gateway, rejected)

    def report_failure(self, error: BaseException) -> None:
        if not isinstance(error, PenstockError):
            error = EngineUnavailable(f"The engine stopped: {type(error).__name__}: {error}")
        self._wait_for_gateway()
        self._broadcast(EngineFailed(error.code, error.message, error.hint))

    def _wait_for_gateway(self) -> None:
        """Wait until at least one gateway has said hello, so that a message has a receiver."""
        give_up_s = time.monotonic() + FIRST_HELLO_TIMEOUT_S
        self._read_inbox(0.0)
        while not self._gateways and time.monotonic() < give_up_s and os.getppid() == self._parent:
            self._read_inbox(0.1)

    def leaves_in_order(self) -> bool:
        """Return whether the engine's records agree with each other at the end: no KV block was lost."""
        try:
            if self._engine is not None:
                self._engine.loop.scheduler.check_integrity()
        except AssertionError:
            logger.exception("the engine's records contradict each other")
            return False
        return True

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        if self._transfers is not None:
            self._transfers.close()
        self._socket.close()
        if self._clients is not None:
            self._clients.close()
        self._context.term()

    def _read_inbox(self, wait_s: float) -> None:
        if wait_s > 0:
            self._inbox.poll(int(wait_s * 1000))
        while self._has_mail:
            gateway, *messages = self._socket.recv_multipart()
            for data in messages:
                self._handle(gateway, data)

    @property
    def _has_mail(self) -> bool:
        """Return whether a message has come. Before every step, this is cheaper than a read that finds nothing."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE)

    def _handle(self, gateway: bytes, data: bytes) -> None:
        self._gateways[gateway] = None
        match self._codec.decode_to_engine(data):
            case AddRequest() as message:
                self._add(gateway, message)
            case AbortRequests(request_ids=request_ids):
                for request_id in request_ids:
                    self._gateway_of.pop(request_id, None)
                    if self._engine is not None:
                        self._engine.loop.abort(request_id)
            case Hello(wants_kv_events=wants_kv_events):
                if self._engine is not None:
                    self._send(gateway, self._engine.ready)
                if wants_kv_events:
                    self._readers.add(gateway)
                    self._restart_kv_events()
            case RestartKVEvents():
                self._restart_kv_events()
            case Shutdown():
                self._stopping = True

    def _add(self, gateway: bytes, message: AddRequest) -> None:
        request_id = message.request.id
        try:
            if self._engine is None:
                raise EngineUnavailable("The engine is still starting.", retry_after_s=1.0)
            self._engine.loop.add(message.request, message.timeout_s, message.kv_source)
        except PenstockError as error:
            self._send(gateway, RequestRejected(request_id, error.code, error.message, error.retry_after_s))
        else:
            self._gateway_of[request_id] = gateway

    def _take_unsent(self, *, at_once: bool) -> list[TokenEvent]:
        """Return the events to send now. A message wakes three threads, so an engine with very short steps sends the
        events of several steps in one message."""
        if not self._unsent or not self._events_every.is_due(at_once=at_once):
            return []
        events, self._unsent = self._unsent, []
        return events

    def _due_kv_events(self, *, at_once: bool) -> tuple[KVEvent, ...]:
        """Return the KV events to send now. All readers get the same stream, with events of several steps in one
        message."""
        if not self._readers or self._engine is None or not self._kv_events_every.is_due(at_once=at_once):
            return ()
        return tuple(self._engine.loop.scheduler.take_kv_events())

    def _restart_kv_events(self) -> None:
        if self._engine is not None:
            self._engine.loop.restart_kv_events()

    def _send_outputs(
        self,
        events: list[TokenEvent],
        stats: EngineStats | None,
        kv_events: tuple[KVEvent, ...],
        *,
        to_all: bool,
    ) -> None:
        """Send one message to each gateway whose requests have events, or to all gateways."""
        by_gateway: defaultdict[bytes, list[TokenEvent]] = defaultdict(list)
        for event in events:
            gateway = self._gateway_of.get(event.request_id)
            if gateway is None:
                continue
            by_gateway[gateway].append(event)
            if event.finish_reason is not None:
                del self._gateway_of[event.request_id]
        if kv_events:
            for gateway in self._readers:
                by_gateway[gateway]  # a message without tokens
        for gateway in tuple(self._gateways if to_all else by_gateway):
            for_reader = kv_events if gateway in self._readers else ()
            self._send(gateway, StepOutputs(tuple(by_gateway[gateway]), stats, for_reader))

    def _broadcast(self, message: FromEngine) -> None:
        for gateway in tuple(self._gateways):
            self._send(gateway, message)

    def _send(self, gateway: bytes, message: FromEngine) -> None:
        try:
            self._socket.send_multipart((gateway, self._codec.encode(message)))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(gateway)

    def _forget(self, gateway: bytes) -> None:
        """Abort the requests of a gateway that has gone."""
        self._gateways.pop(gateway, None)
        self._readers.discard(gateway)
        for request_id in [known for known, owner in self._gateway_of.items() if owner == gateway]:
            del self._gateway_of[request_id]
            if self._engine is not None:
                self._engine.loop.abort(request_id)


@dataclass(frozen=True, slots=True)
class _Job:
    """The job of this process. `problem` is the error that preparing the job raised, if any."""

    arguments: argparse.Namespace
    config: EngineConfig
    problem: Exception | None = None


def _job(arguments: list[str], config: bytes) -> _Job:
    job = _Job(_parser().parse_args(arguments), _decode_config(config))
    if job.arguments.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = job.arguments.gpus
    try:
        prepare(job.config, job.arguments.model_path, job.arguments.bytecode)
    except Exception as problem:
        return replace(job, problem=problem)
    return job


def _job_that_comes_later(bytecode: Path) -> _Job | None:
    """Read the job from standard input while this process imports what every engine needs; see `early`. Returns None
    when the parent closes standard input without a job."""

    def read() -> _Job | None:
        line = sys.stdin.buffer.readline()
        return _job(msgspec.json.decode(line, type=list[str]), sys.stdin.buffer.read()) if line else None

    with ThreadPoolExecutor(1) as reader:
        job = reader.submit(read)
        # A missing package raises again when the engine is built, and is reported from there.
        with contextlib.suppress(ImportError):
            preload("penstock.engine.decoder", bytecode)
        return job.result()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="One Penstock engine. `penstock serve` starts it.")
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--model-path", required=True, type=Path)
    parser.add_argument("--parent-pid", type=int, help="process to leave with, which may be gone already")
    parser.add_argument("--gpus", help="devices to use, as CUDA_VISIBLE_DEVICES names them")
    parser.add_argument("--bytecode", type=Path, help="folder for the bytecode of packages that have none")
    parser.add_argument("--key-file", type=Path, help="keys for an endpoint on the network")
    parser.add_argument("--rendezvous", type=Path, help="file that says where ranks of other nodes come")
    parser.add_argument("--log-level", default="INFO")
    parser.add_argument("--log-format", default="text", choices=("text", "json"))
    return parser


def main() -> int:
    # Ctrl-C and a service manager's SIGTERM reach the whole process group; the gateway drains first and then
    # sends Shutdown. If the gateway dies instead, run() notices.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.disable()  # while loading, which makes hardly any garbage
    faulthandler.enable()  # a crash in C code leaves the stacks of all threads in the log
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # so does a frozen engine, before it is killed
    given = sys.argv[1:]
    if given[:1] == ["--early"]:
        job = _job_that_comes_later(bytecode=Path(given[1]))
    else:
        job = _job(given, sys.stdin.buffer.read())
    if job is None:
        return 0
    arguments = job.arguments
    set_up_logs("engine", arguments.log_format, arguments.log_level)
    keys = EngineKeys.read(arguments.key_file) if arguments.key_file else None
    rendezvous = None
    if arguments.rendezvous is not None:
        rendezvous = decode_rendezvous(arguments.rendezvous.read_bytes())
    worker = Worker(arguments.endpoint, arguments.parent_pid, keys)
    is_started = False
    try:
        if job.problem is not None:
            raise job.problem
        worker.start(job.config, arguments.model_path, rendezvous)
        is_started = True
        worker.run()
    except Exception as error:
        # The message of a refused start says all that its user needs. Every other end leaves its traceback.
        if is_started or not isinstance(error, PenstockError):
            logger.exception("the engine failed")
        worker.report_failure(error)
        return 1
    else:
        return 0 if worker.leaves_in_order() else BROKEN_RECORDS_EXIT_CODE
    finally:
        worker.close()


if __name__ == "__main__":
    sys.exit(main())
