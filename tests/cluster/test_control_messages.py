"""Questions of a gateway to the leader."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import zmq

from penstock.cluster.control_messages import ControlServer, CurveChannel
from penstock.cluster.transport import KeyPair, with_key


async def test_a_question_may_be_given_up_at_the_moment_when_its_time_ends() -> None:
    """As when a leader was killed, and the next one is heard of just when the time for an answer is over."""
    leader, client = KeyPair.make(), KeyPair.make()
    channel = CurveChannel(with_key("tcp://127.0.0.1:9", leader.public), client, timeout_s=0.0)
    errors: list[Exception] = []

    def give_up() -> None:
        try:
            channel.give_up()
        except Exception as error:
            errors.append(error)

    asking = asyncio.create_task(channel.ask(b"a question"))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(give_up)  # after the timeout, and before the task hears of it
    with pytest.raises(TimeoutError):
        await asking
    channel.close()
    assert not errors


class BrokenOnce:
    """A socket whose first message cannot be read."""

    def __init__(self) -> None:
        self.arriving: list[list[bytes]] = [[], [b"gateway", b"1", b"a question"]]
        self.sent: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()

    async def poll(self, timeout_ms: int) -> bool:
        if not self.arriving:
            await self.sent
        return bool(self.arriving)

    async def recv_multipart(self) -> list[bytes]:
        if frames := self.arriving.pop(0):
            return frames
        raise zmq.ZMQError(zmq.EFSM)

    async def send_multipart(self, frames: list[bytes]) -> None:
        self.sent.set_result(frames)


async def test_a_message_that_cannot_be_taken_keeps_no_gateway_without_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.cluster.control_messages.PAUSE_S", 0.0)

    async def answer(number: int, line: bytes) -> bytes:
        return line.upper()

    tokens: Any = None
    server = ControlServer("127.0.0.1", tokens, answer, lambda number: None)
    socket: Any = BrokenOnce()
    serving = asyncio.create_task(server._serve(socket))
    async with asyncio.timeout(60):
        assert await socket.sent == [b"gateway", b"1", b"A QUESTION"]
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
