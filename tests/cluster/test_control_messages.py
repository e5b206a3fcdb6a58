"""Questions of a gateway to the leader."""

from __future__ import annotations

import asyncio

import pytest

from penstock.cluster.control_messages import CurveChannel
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
