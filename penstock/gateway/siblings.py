"""Asks all gateway processes of a server one question, such as for their samples, and gathers the answers.

Each process listens on a private Unix socket. A question is one line; the answer is what follows, until the end of
the connection, with a last line that says that the answer is whole. A server of one process asks only itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

ANSWER_TIMEOUT_S = 2.0
MAX_QUESTION_BYTES = 1 << 12
MAX_ANSWER_BYTES = 1 << 26
_END = b"\n# whole\n"

Answer = Callable[[str], bytes]  # of what follows the topic in a question


class Siblings:
    """`sockets` has one path for each process; `number` is this process's place. `answers` has one function for each
    topic, which must not block or raise."""

    def __init__(self, sockets: Sequence[str] = (), number: int = 0) -> None:
        self._sockets = [f"{path}.ask" for path in sockets]
        self.number = number
        self.num_processes = max(1, len(sockets))
        # A private folder of these processes, for what they share; None for a server of one process.
        self.folder = Path(sockets[0]).parent if len(sockets) > 1 else None
        # Names of this server and of this process, for what is kept in a database.
        self.server = Path(sockets[0]).parent.name[:64] if sockets else secrets.token_hex(8)
        self.process = secrets.token_hex(8)
        self.answers: dict[str, Answer] = {}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        if not self._sockets:
            yield
            return
        server = await asyncio.start_unix_server(
            self._tell, self._sockets[self.number], limit=MAX_QUESTION_BYTES
        )
        async with server:
            yield

    async def ask(self, topic: str, detail: str = "") -> list[bytes]:
        """The answers of this process, and of all others that answer in time."""
        others = [path for index, path in enumerate(self._sockets) if index != self.number]
        question = f"{topic} {detail}\n".encode()
        answers = await asyncio.gather(*(_ask(path, question) for path in others))
        return [self.answers[topic](detail), *(answer for answer in answers if answer is not None)]

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, TimeoutError, ValueError):
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    topic, _, detail = (await reader.readline()).decode().strip().partition(" ")
                    answer = self.answers.get(topic)
                    if answer is not None:
                        writer.write(answer(detail) + _END)
                        await writer.drain()
        finally:
            writer.close()


async def _ask(path: str, question: bytes) -> bytes | None:
    """One process's answer; None when there is no whole answer, because the process is starting or has died."""
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_ANSWER_BYTES)
            try:
                writer.write(question)
                return (await reader.readuntil(_END))[: -len(_END)]
            finally:
                writer.close()
    return None
