"""Asks the DNS for SRV records (RFC 2782), which the system's resolver does not tell programs of.

One question over UDP to each name server in turn, and over TCP where the answer does not fit. Knows no servers and no
URLs.
"""

from __future__ import annotations

import asyncio
import secrets
import struct
from pathlib import Path

RESOLVER_FILE = Path("/etc/resolv.conf")
PORT = 53
ANSWER_TIMEOUT_S = 2.0
MAX_JUMPS = 64  # of a name that is written as a reference to another place
_SRV, _INTERNET = 33, 1
_WANTS_RECURSION, _IS_CUT, _CODE = 0x0100, 0x0200, 0x000F
_NO_SUCH_NAME = 3


class BadAnswer(OSError):
    """A name server answered something that is no answer to the question."""


async def srv_targets(host: str, servers: list[tuple[str, int]] | None = None) -> list[tuple[str, int]]:
    """Return the targets of a name such as _http._tcp.gpus.example, with their ports, of the best priority only.
    Raises OSError where no name server knows."""
    name_servers = servers or _name_servers()
    problem: Exception = OSError("no name server is known")
    for address, port in name_servers:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return _best(await _ask(host, address, port))
        except (OSError, TimeoutError) as error:
            problem = error
    raise OSError(f"no SRV records: {str(problem) or 'no answer in time'}") from problem


def _name_servers() -> list[tuple[str, int]]:
    lines = RESOLVER_FILE.read_text().splitlines()
    found = [line.split()[1] for line in lines if line.startswith("nameserver") and len(line.split()) > 1]
    return [(address, PORT) for address in found]


def _best(records: list[tuple[int, int, str]]) -> list[tuple[str, int]]:
    """Return the targets of the lowest priority number, which are to be used before all others. Weights are left to
    the router."""
    first = min((priority for priority, _, _ in records), default=0)
    return sorted({(target, port) for priority, port, target in records if priority == first and target})


async def _ask(host: str, address: str, port: int) -> list[tuple[int, int, str]]:
    number = secrets.randbits(16)
    question = _question(number, host)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[bytes] = loop.create_future()
    transport, _ = await loop.create_datagram_endpoint(lambda: _Asking(answer), remote_addr=(address, port))
    try:
        transport.sendto(question)
        data = await answer
    finally:
        transport.close()
    if _header(data)[1] & _IS_CUT:
        data = await _ask_by_tcp(question, address, port)
    return _read(data, number, question)


async def _ask_by_tcp(question: bytes, address: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(address, port)
    try:
        writer.write(struct.pack("!H", len(question)) + question)
        (length,) = struct.unpack("!H", await reader.readexactly(2))
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise BadAnswer("the name server broke off") from error
    finally:
        writer.close()


class _Asking(asyncio.DatagramProtocol):
    """The socket is connected, so that only the server that was asked can answer."""

    def __init__(self, answer: asyncio.Future[bytes]) -> None:
        self._answer = answer

    def datagram_received(self, data: bytes, address: object) -> None:
        if not self._answer.done():
            self._answer.set_result(data)

    def error_received(self, error: Exception) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)


def _question(number: int, host: str) -> bytes:
    labels = [label.encode("ascii") for label in host.rstrip(".").split(".")]
    if not all(0 < len(label) < 64 for label in labels):
        raise OSError(f"{host!r} is no name of the DNS")
    name = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    return (
        struct.pack("!6H", number, _WANTS_RECURSION, 1, 0, 0, 0) + name + struct.pack("!2H", _SRV, _INTERNET)
    )


def _header(data: bytes) -> tuple[int, ...]:
    if len(data) < 12:
        raise BadAnswer("the answer is too short")
    return struct.unpack_from("!6H", data)


def _read(data: bytes, number: int, question: bytes) -> list[tuple[int, int, str]]:
    """Priority, port and target of every record. Raises BadAnswer."""
    answered, flags, num_questions, num_answers, _, _ = _header(data)
    if answered != number or num_questions != 1 or data[12 : len(question)].lower() != question[12:].lower():
        raise BadAnswer("the answer is to another question")
    if flags & _CODE == _NO_SUCH_NAME:
        return []
    if flags & _CODE:
        raise BadAnswer(f"the name server answers with the code {flags & _CODE}")
    place, records = len(question), []
    try:
        for _ in range(num_answers):
            _, place = _name(data, place)
            kind, _, _, length = struct.unpack_from("!HHIH", data, place)
            place += 10
            if kind == _SRV:
                priority, _, port = struct.unpack_from("!3H", data, place)
                records.append((priority, port, _name(data, place + 6)[0]))
            place += length
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise BadAnswer("the answer cannot be read") from error
    return records


def _name(data: bytes, place: int) -> tuple[str, int]:
    """Return a name, and the place behind it. A name may go on at an earlier place."""
    labels: list[str] = []
    end: int | None = None
    for _ in range(MAX_JUMPS * 2):
        length = data[place]
        if length >= 0xC0:
            end = place + 2 if end is None else end
            place = (length & 0x3F) << 8 | data[place + 1]
        elif length == 0:
            return ".".join(labels), place + 1 if end is None else end
        else:
            labels.append(data[place + 1 : place + 1 + length].decode("ascii"))
            place += 1 + length
    raise BadAnswer("a name has no end")
