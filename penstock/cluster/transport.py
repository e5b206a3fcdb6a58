"""Connects a gateway to one engine process: ZeroMQ frames in, callbacks out.

Runs on the event loop of the gateway, without threads: the socket's file descriptor wakes the loop, which reads until
the socket is empty. Knows no engine, no HTTP and no policy. The engine's end is in `worker`.

An endpoint is a socket file of this machine, or `tcp://host:port#key` on the network. All traffic on the network is
encrypted (CURVE), and only clients with the key get an answer, because a CURVE server never sends its public key. The
key is made for one engine process, travels with the endpoint alone, and is never logged. In a shared fleet, clients
prove by keys of their own that they have the fleet's join token (`registry`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from penstock.core.errors import EngineUnavailable, PenstockError, error_from_code
from penstock.core.kv_transfer import KVSource
from penstock.core.machine import GONE_S
from penstock.core.messages import (
    AbortRequests,
    AddRequest,
    Codec,
    EngineFailed,
    EngineReady,
    EngineStats,
    FromEngine,
    Hello,
    KVEvent,
    LoadProgress,
    RequestRejected,
    RestartKVEvents,
    Shutdown,
    StepOutputs,
    ToEngine,
)
from penstock.core.plan import TokenEvent
from penstock.core.request import Request


class KeyPair(msgspec.Struct, frozen=True):
    """The CURVE keys of one engine or client. The public key of an engine is only for clients that may reach it."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return "KeyPair()"

    @staticmethod
    def make() -> KeyPair:
        public, secret = zmq.curve_keypair()
        return KeyPair(public.decode(), secret.decode())


class EngineKeys(msgspec.Struct, frozen=True):
    """The keys of an engine on the network: its file `--key-file`."""

    secret: str  # of the engine's own endpoints
    # Public keys of clients; empty: every client that knows the engine's public key.
    accepted: tuple[str, ...] = ()
    client: KeyPair | None = None  # for connections to other engines

    def write(self, path: Path) -> None:
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(self))

    @staticmethod
    def read(path: Path) -> EngineKeys:
        return _decode_keys(path.read_bytes())


_decode_keys = msgspec.json.Decoder(EngineKeys).decode


def with_key(address: str, public_key: str) -> str:
    return f"{address}#{public_key}"


def _watch_network(socket: zmq.Socket[Any], address: str) -> None:
    """Let connections end whose other machine is silently gone, without power or behind a cut network. The kernel
    answers for a frozen process, so its connections stay."""
    if address.startswith("tcp://"):
        socket.setsockopt(zmq.TCP_MAXRT, 1000 * GONE_S)  # when data waits to be confirmed
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)  # when none does
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, GONE_S // 3)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, GONE_S // 5)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def bind(socket: zmq.Socket[Any], address: str, secret_key: str | None) -> None:
    """Bind a socket to an address without a key."""
    _watch_network(socket, address)
    if secret_key is not None:
        socket.curve_secretkey = secret_key.encode()
        socket.curve_server = True
    socket.bind(address)


def connect(socket: zmq.Socket[Any], endpoint: str, client_keys: KeyPair | None = None) -> None:
    """Connect to an endpoint, with `client_keys` if the endpoint asks who connects."""
    address, _, server_key = endpoint.partition("#")
    _watch_network(socket, address)
    if server_key:
        keys = client_keys or KeyPair.make()
        socket.curve_publickey = keys.public.encode()
        socket.curve_secretkey = keys.secret.encode()
        socket.curve_serverkey = server_key.encode()
    socket.connect(address)


class AcceptedClients:
    """Lets only clients with certain public keys reach the CURVE sockets of a context."""

    def __init__(self, context: zmq.Context[Any], public_keys: Iterable[str]) -> None:
        self._accepted = frozenset(key.encode() for key in public_keys)
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client with this public key may connect. Called by the authenticator."""
        return key in self._accepted

    def close(self) -> None:
        self._authenticator.stop()


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Listener:
    on_event: Callable[[TokenEvent], None] | None
    on_error: Callable[[PenstockError], None]


class ZmqEngineClient:
    """Implements `replica.EngineClient` and `replica.ReplicaClient`. `start` connects; `fail` is for the watcher of
    the process.

    With `on_events`, all events of a step are passed on at once; without, each goes to the `on_event` of its request.

    `on_ready` is called when `ready` changes, `on_stats` with every heartbeat. After `subscribe_kv_events` the
    engine also sends its KV events, in the order in which they happened, for `on_kv_events`; a caller that
    finds a gap in them calls `restart_kv_events`. `on_lost` is called when the connection is cut, which a socket file
    never is. Clients may share one `context`, which the caller then ends."""

    def __init__(
        self,
        endpoint: str,
        *,
        on_progress: Callable[[LoadProgress], None] | None = None,
        on_ready: Callable[[], None] | None = None,
        on_stats: Callable[[EngineStats], None] | None = None,
        on_events: Callable[[Sequence[TokenEvent]], None] | None = None,
        on_kv_events: Callable[[tuple[KVEvent, ...]], None] | None = None,
        on_lost: Callable[[], None] | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        client_keys: KeyPair | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._client_keys = client_keys
        self._on_lost = on_lost
        self._monitor: zmq.Socket[bytes] | None = None
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._on_stats = on_stats
        self._on_events = on_events
        self._on_kv_events = on_kv_events
        self._codec = Codec()
        self._context = context or zmq.Context()
        self._owns_context = context is None
        self._reads_kv_events = False
        self._socket: zmq.Socket[bytes] | None = None
        self._listeners: dict[str, _Listener] = {}
        self._outbox: list[bytes] = []  # messages that this turn of the event loop sends
        self._ready: EngineReady | None = None
        self._failure: PenstockError | None = None  # the reason why the engine is not ready, if known
        self._stats = EngineStats()
        self._fd = -1  # of the socket, while there is one
        self._loop: asyncio.AbstractEventLoop | None = None
        self._became_ready: asyncio.Future[EngineReady] | None = None

    @property
    def ready(self) -> EngineReady | None:
        return self._ready

    @property
    def failure(self) -> PenstockError | None:
        """Return the reason why the engine is not ready, if the engine or its supervisor gave one."""
        return self._failure

    @property
    def models(self) -> Mapping[str, EngineReady]:
        return {} if self._ready is None else {self._ready.model.name: self._ready}

    @property
    def stats(self) -> EngineStats:
        return self._stats

    def stats_of(self, model: str) -> EngineStats:
        return self._stats

    def num_engines_of(self, model: str) -> int:
        return 1

    def start(self) -> None:
        """Connect, and ask the engine to report when it is ready. Called again for a restarted engine: a fresh
        socket makes sure that nothing meant for the old process reaches the new one."""
        self._disconnect()
        self._failure = None
        self._loop = asyncio.get_running_loop()
        if self._became_ready is None or self._became_ready.done():
            self._became_ready = self._loop.create_future()
        socket = self._context.socket(zmq.DEALER)
        # Neither side may block the other: queues are bounded by the requests in flight, not by the socket.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        if self._on_lost is not None:
            self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._loop.add_reader(int(self._monitor.getsockopt(zmq.FD)), self._read_monitor)
            self._read_monitor()  # the descriptor signals new messages only to a reader that found none
        connect(socket, self._endpoint, self._client_keys)
        self._socket = socket
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._read)
        self._send(Hello(wants_kv_events=self._reads_kv_events))

    async def wait_ready(self) -> EngineReady:
        """Wait until the engine is ready. Raises the engine's own error when it could not start."""
        if self._became_ready is None:
            raise RuntimeError("start() comes first")
        return await asyncio.shield(self._became_ready)

    def add(
        self,
        request: Request,
        *,
        timeout_s: float | None,
        on_event: Callable[[TokenEvent], None] | None = None,
        on_error: Callable[[PenstockError], None],
        kv_source: KVSource | None = None,
    ) -> None:
        """Send a request. `kv_source` is another engine that has, or computes, the KV of the request's first
        tokens."""
        if self._ready is None:
            on_error(self._failure or EngineUnavailable("The engine is not ready yet.", retry_after_s=1.0))
            return
        self._listeners[request.id] = _Listener(on_event, on_error)
        self._send(AddRequest(request, timeout_s, kv_source))

    def abort(self, request_id: str) -> None:
        if self._listeners.pop(request_id, None) is not None:
            self._send(AbortRequests((request_id,)))

    def fail(self, error: PenstockError) -> None:
        """End every request of an engine that is gone."""
        was_ready = self._ready is not None
        self._ready = None
        self._failure = error
        self._stats = EngineStats()
        if was_ready and self._on_ready is not None:
            self._on_ready()
        # The requests may be tried on another engine, whatever ended this one.
        lost = error if isinstance(error, EngineUnavailable) else EngineUnavailable(error.message)
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.on_error(lost)
        if self._became_ready is not None and not self._became_ready.done():
            self._became_ready.set_exception(error)
            self._became_ready.exception()  # marks the error as seen: perhaps no caller waits

    def subscribe_kv_events(self) -> None:
        """Get KV events from now on, also after a restart: first `cleared`, then everything that the engine holds."""
        self._reads_kv_events = True
        self._send(Hello(wants_kv_events=True))

    def restart_kv_events(self) -> None:
        """Ask for KV events that start afresh: `cleared`, and then all that the engine holds."""
        self._send(RestartKVEvents())

    def shut_down_engine(self) -> None:
        self._send(Shutdown())

    def close(self) -> None:
        self._disconnect()
        if self._owns_context:
            self._context.term()

    def _disconnect(self) -> None:
        if self._socket is not None and self._loop is not None:
            self._loop.remove_reader(self._fd)
            if self._monitor is not None:
                self._loop.remove_reader(int(self._monitor.getsockopt(zmq.FD)))
                self._socket.disable_monitor()
                self._monitor.close()
                self._monitor = None
            self._socket.close()
            self._socket = None
            self._outbox.clear()

    def _send(self, message: ToEngine) -> None:
        """Send a message at the end of this turn of the event loop, together with all others: waking ZeroMQ's thread
        costs more than a message."""
        if self._socket is None or self._loop is None:
            return
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(self._codec.encode(message))

    def _flush(self) -> None:
        if self._socket is None or not self._outbox:
            return
        frames, self._outbox = self._outbox, []
        self._socket.send_multipart(frames, zmq.NOBLOCK)
        self._read()  # the descriptor signals edges, and sending may swallow one

    def _read(self) -> None:
        socket = self._socket
        while socket is not None and not socket.closed:
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(self._codec.decode_from_engine(data))

    def _read_monitor(self) -> None:
        """Tell of a connection that was cut: the engine's process or machine has ended."""
        is_cut = False
        while self._monitor is not None:
            try:
                self._monitor.recv_multipart(zmq.NOBLOCK)
                is_cut = True
            except zmq.Again:
                break
        if is_cut and self._on_lost is not None:
            self._on_lost()

    def _handle(self, message: FromEngine) -> None:
        match message:
            case StepOutputs():
                if message.stats is not None:
                    self._stats = message.stats
                    if self._on_stats is not None:
                        self._on_stats(message.stats)
                if message.kv_events and self._on_kv_events is not None:
                    self._on_kv_events(message.kv_events)
                if message.events:
                    self._deliver(message.events)
            case RequestRejected():
                listener = self._listeners.pop(message.request_id, None)
                if listener is not None:
                    error = error_from_code(
                        message.code, message.message, retry_after_s=message.retry_after_s
                    )
                    listener.on_error(error)
            case EngineReady():
                self._ready = message
                if self._became_ready is not None and not self._became_ready.done():
                    self._became_ready.set_result(message)
                if self._on_ready is not None:
                    self._on_ready()
            case LoadProgress():
                if self._on_progress is not None:
                    self._on_progress(message)
            case EngineFailed():
                error = error_from_code(message.code, message.message)
                error.hint = message.hint
                self.fail(error)

    def _deliver(self, events: Sequence[TokenEvent]) -> None:
        listeners = self._listeners
        if self._on_events is not None:
            for event in events:
                if event.finish_reason is not None:
                    listeners.pop(event.request_id, None)
            self._on_events(events)
            return
        for event in events:
            # Events of aborted requests may still be on their way; they have no listener any more.
            listener = listeners.get(event.request_id)
            if listener is None:
                continue
            if event.finish_reason is not None:
                del listeners[event.request_id]
            if listener.on_event is not None:
                listener.on_event(event)
