"""The connection of gateways of a shared fleet to the leader: questions and answers over TCP, encrypted (CURVE), for
holders of the join token. Knows no message.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import zmq
import zmq.asyncio

from penstock.cluster.host_record import JoinTokens
from penstock.cluster.ports import free_port
from penstock.cluster.transport import AcceptedClients, KeyPair, bind, connect, with_key

logger = logging.getLogger(__name__)

SILENT_S = 3.0  # after which a gateway counts as gone; it reports twice a second
ANSWER_TIMEOUT_S = 2.0
MAX_MESSAGE_BYTES = 1 << 24
MAX_ANSWERING = 256  # questions at a time; more are dropped, and asked again


class ControlServer:
    """Listens on an address of this machine. `answer` gets the number of a client and its message; `forget` is called
    with the number of a client that has gone silent."""

    def __init__(
        self,
        host: str,
        tokens: JoinTokens,
        answer: Callable[[int, bytes], Awaitable[bytes]],
        forget: Callable[[int], None],
    ) -> None:
        self._host = host
        self._tokens = tokens
        self._answer = answer
        self._forget = forget
        self._numbers = itertools.count(1)
        self._clients: dict[bytes, tuple[int, float]] = {}  # number, and when it was last heard
        self._answering: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Yields the endpoint for gateways."""
        keys = KeyPair.make()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        accepted = AcceptedClients(context, self._tokens.accepted_clients())
        socket: zmq.asyncio.Socket = zmq.asyncio.Context.shadow(context.underlying).socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        host = f"[{self._host}]" if ":" in self._host else self._host
        address = f"tcp://{host}:{free_port(self._host)}"
        bind(socket, address, keys.secret)
        serving = asyncio.create_task(self._serve(socket))
        try:
            yield with_key(address, keys.public)
        finally:
            tasks = (serving, *self._answering)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            socket.close()
            accepted.close()
            context.term()

    async def _serve(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            if await socket.poll(int(SILENT_S * 1000)):
                client, *frames = await socket.recv_multipart()
                self._heard(client)
                if len(frames) == 2 and len(self._answering) < MAX_ANSWERING:
                    task = asyncio.create_task(self._reply(socket, client, frames[0], frames[1]))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)
            self._forget_silent()

    async def _reply(self, socket: zmq.asyncio.Socket, client: bytes, number: bytes, line: bytes) -> None:
        try:
            answer = await self._answer(self._clients[client][0], line)
        except (msgspec.MsgspecError, ValueError) as error:
            logger.warning("a gateway's message could not be read: %s", error)
            return
        await socket.send_multipart([client, number, answer])

    def _heard(self, client: bytes) -> None:
        known = self._clients.get(client)
        number = next(self._numbers) if known is None else known[0]
        self._clients[client] = number, time.monotonic()

    def _forget_silent(self) -> None:
        oldest_s = time.monotonic() - SILENT_S
        for client, (number, heard_s) in list(self._clients.items()):
            if heard_s < oldest_s:
                del self._clients[client]
                self._forget(number)


class CurveChannel:
    """Implements `control_messages.Channel`. One question at a time."""

    def __init__(self, endpoint: str, keys: KeyPair, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._asked = 0
        connect(self._socket, endpoint, keys)

    async def ask(self, line: bytes) -> bytes:
        self._asked += 1
        number = str(self._asked).encode()
        async with asyncio.timeout(self._timeout_s):  # a TimeoutError is an OSError
            await self._socket.send_multipart([number, line])
            while True:
                answered, answer = await self._socket.recv_multipart()
                if answered == number:
                    return bytes(answer)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
