"""Connects the ranks of a replica on several nodes over TCP. Imports no torch.

The first rank listens at an address of its node until all ranks have connected, and no longer. In a handshake, both
ends of a connection prove that they know the key of the rendezvous, before anything else is read. A rank makes two
connections: one for the messages of the first rank, and one to the store through which `torch.distributed` finds the
ranks. Torch's own TCP store does not ask for a key, so it is not used.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal, TypeAlias

import msgspec

from penstock import __version__
from penstock.core.engine_config import Rendezvous
from penstock.core.errors import ConfigError, EngineUnavailable, PenstockError
from penstock.core.machine import notice_loss

logger = logging.getLogger(__name__)

_HANDSHAKE_TIMEOUT_S = 10  # for a peer that has connected to prove that it knows the key
_MAX_UNAUTHENTICATED = 32  # connections that have not proved it yet
_CONNECT_TIMEOUT_S = 10.0
_RETRY_S = 0.1
JOIN_TIMEOUT_S = 120.0  # for ranks of other nodes
_MAX_HELLO_BYTES = 1 << 12
_MAX_CALL_BYTES = 1 << 24
_NONCE_BYTES = 32

Purpose: TypeAlias = Literal["messages", "store"]


class Hello(msgspec.Struct, frozen=True):
    """The first message of a rank that has proved itself."""

    rank: int
    purpose: Purpose
    version: str = __version__


class StoreCall(msgspec.Struct, frozen=True):
    name: Literal["set", "get", "add", "wait", "check", "delete"]
    keys: tuple[str, ...]
    value: bytes = b""
    number: int = 0
    timeout_s: float | None = None


class StoreAnswer(msgspec.Struct, frozen=True):
    value: bytes = b""
    number: int = 0
    is_late: bool = False  # the keys did not come in time


_decode_hello = msgspec.msgpack.Decoder(Hello).decode
_decode_call = msgspec.msgpack.Decoder(StoreCall).decode
_decode_answer = msgspec.msgpack.Decoder(StoreAnswer).decode


class StoreTable:
    """The keys of the store, on the first rank. Any number of threads may call it."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def call(self, call: StoreCall) -> StoreAnswer:
        with self._changed:
            if call.name == "set":
                self._values[call.keys[0]] = call.value
                self._changed.notify_all()
            elif call.name == "add":
                number = int(self._values.get(call.keys[0], b"0")) + call.number
                self._values[call.keys[0]] = str(number).encode()
                self._changed.notify_all()
                return StoreAnswer(number=number)
            elif call.name == "delete":
                return StoreAnswer(number=self._values.pop(call.keys[0], None) is not None)
            elif call.name == "check":
                return StoreAnswer(number=self._has(call.keys))
            elif not self._changed.wait_for(lambda: self._has(call.keys), call.timeout_s):
                return StoreAnswer(is_late=True)
            elif call.name == "get":
                return StoreAnswer(self._values[call.keys[0]])
            return StoreAnswer()

    def _has(self, keys: Iterable[str]) -> bool:
        return all(key in self._values for key in keys)


class RemoteTable:
    """The same store, called by another rank. Calls come one after the other, from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def call(self, call: StoreCall) -> StoreAnswer:
        with self._lock:
            self._connection.send_bytes(msgspec.msgpack.encode(call))
            return _decode_answer(self._connection.recv_bytes(_MAX_CALL_BYTES))


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """The access of a rank to the store when other ranks are on other nodes."""

    table: StoreTable | RemoteTable
    node_host: str  # the address of the rank's own node


class RankListener:
    """Accepts the connections of the other ranks, on the first rank: one from each rank for each purpose."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        ranks_elsewhere: Iterable[int],
        num_ranks: int,
        on_rank: Callable[[int, Connection], None],
        on_failure: Callable[[PenstockError], None],
    ) -> None:
        """`on_rank` gets the connection for messages of each rank of another node, `on_failure` the reason why a rank
        is not let in. Both are called in threads of their own."""
        self.table = StoreTable()
        self._key = rendezvous.key.encode()
        self._on_rank = on_rank
        self._on_failure = on_failure
        self._awaited: set[tuple[int, Purpose]] = {(rank, "store") for rank in range(1, num_ranks)}
        self._awaited |= {(rank, "messages") for rank in ranks_elsewhere}
        self._lock = threading.Lock()
        self._is_closed = False
        self._stores: list[Connection] = []
        self._unauthenticated = threading.Semaphore(_MAX_UNAUTHENTICATED)
        family = socket.AF_INET6 if ":" in rendezvous.host else socket.AF_INET
        try:
            self._socket = socket.create_server((rendezvous.host, rendezvous.port), family=family)
        except OSError as error:
            raise EngineUnavailable(
                f"Ranks cannot listen at {rendezvous.host} port {rendezvous.port}: {error.strerror}.",
                retry_after_s=5.0,
            ) from error
        threading.Thread(target=self._listen, name="rank-listener", daemon=True).start()

    def close(self) -> None:
        self._stop_listening()
        with self._lock:
            self._is_closed = True
            stores, self._stores = self._stores, []
        for connection in stores:
            disconnect(connection)

    def _stop_listening(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                return  # closed
            if not self._unauthenticated.acquire(blocking=False):
                accepted.close()
                continue
            threading.Thread(target=self._admit, args=(accepted,), daemon=True).start()

    def _admit(self, accepted: socket.socket) -> None:
        connection = None
        try:
            connection = _connection(accepted)
            _authenticate(connection, self._key, is_first_rank=True)
            hello = _decode_hello(connection.recv_bytes(_MAX_HELLO_BYTES))
            _set_read_timeout(connection, 0)
        except (OSError, EOFError, msgspec.DecodeError):
            logger.warning("a peer that connected to the ranks' rendezvous failed the handshake")
            if connection is not None:
                disconnect(connection)
            return
        finally:
            self._unauthenticated.release()
        if hello.version != __version__:
            disconnect(connection)
            sentence = f"Rank {hello.rank} runs Penstock {hello.version}, and the first rank {__version__}."
            self._on_failure(ConfigError(sentence, hint="Install the same version on every node."))
            return
        with self._lock:
            is_awaited = (hello.rank, hello.purpose) in self._awaited and not self._is_closed
            self._awaited.discard((hello.rank, hello.purpose))
            if is_awaited and hello.purpose == "store":
                self._stores.append(connection)
        if not is_awaited:
            disconnect(connection)
            return
        if not self._awaited:
            self._stop_listening()
        if hello.purpose == "messages":
            self._on_rank(hello.rank, connection)
        else:
            self._answer_calls(connection)

    def _answer_calls(self, connection: Connection) -> None:
        with suppress(OSError, EOFError, msgspec.DecodeError):
            while True:
                call = _decode_call(connection.recv_bytes(_MAX_CALL_BYTES))
                connection.send_bytes(msgspec.msgpack.encode(self.table.call(call)))


def connect(rendezvous: Rendezvous, rank: int, purpose: Purpose) -> Connection:
    """Connect to the first rank, which may not listen yet when a rank comes for messages. Raises OSError or EOFError
    when it never does, or does not know the key."""
    connection = _connection(_connect_socket(rendezvous, JOIN_TIMEOUT_S if purpose == "messages" else 0.0))
    _authenticate(connection, rendezvous.key.encode(), is_first_rank=False)
    connection.send_bytes(msgspec.msgpack.encode(Hello(rank, purpose)))
    _set_read_timeout(connection, 0)
    return connection


def _connect_socket(rendezvous: Rendezvous, timeout_s: float) -> socket.socket:
    gives_up_s = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection((rendezvous.host, rendezvous.port), _CONNECT_TIMEOUT_S)
        except OSError:
            if time.monotonic() > gives_up_s:
                raise
            time.sleep(_RETRY_S)


def disconnect(connection: Connection) -> None:
    """Close a connection that no thread reads from any more, or will wake to find it closed."""
    shut_down(connection)
    connection.close()


def shut_down(connection: Connection) -> None:
    """End a connection and wake the thread that reads from it. The connection is still to be closed."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)


def _connection(connected: socket.socket) -> Connection:
    """Return a connection over the socket, which proves itself in a bounded time and notices a peer that is gone."""
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    notice_loss(connected)
    connection = Connection(connected.detach())
    _set_read_timeout(connection, _HANDSHAKE_TIMEOUT_S)
    return connection


def _set_read_timeout(connection: Connection, seconds: int) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _authenticate(connection: Connection, key: bytes, *, is_first_rank: bool) -> None:
    """Prove to the peer that this end knows the key, without sending it, and have the peer prove the same."""
    here, there = (b"first", b"other") if is_first_rank else (b"other", b"first")
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.send_bytes(ours)
    theirs = connection.recv_bytes(_NONCE_BYTES)
    connection.send_bytes(hmac.digest(key, here + theirs + ours, "sha256"))
    proof = connection.recv_bytes(_NONCE_BYTES)
    if not hmac.compare_digest(proof, hmac.digest(key, there + ours + theirs, "sha256")):
        raise ConnectionRefusedError("The peer does not know the key of the rendezvous.")
