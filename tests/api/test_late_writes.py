"""Small writes of one turn leave together at its end, in order, and closing loses none of them."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api.http.exchange import MAX_HELD_BYTES, LateWrites


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.packets: list[bytes] = []
        self.is_closed = self.was_aborted = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        assert not self.is_closed
        self.packets.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.was_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0


def pair() -> tuple[Wire, LateWrites]:
    wire = Wire()
    return wire, LateWrites(wire, asyncio.get_running_loop())


async def test_writes_of_one_turn_are_one_packet_at_its_end() -> None:
    wire, late = pair()
    late.write(b"one")
    late.write(b"two")
    assert wire.packets == []
    assert late.get_write_buffer_size() == 6
    await asyncio.sleep(0)
    assert wire.packets == [b"onetwo"]
    assert late.get_write_buffer_size() == 0
    late.write(b"three")
    await asyncio.sleep(0)
    assert wire.packets == [b"onetwo", b"three"]


async def test_what_is_ready_goes_before_writes() -> None:
    """The reason for all this: one answer does not wake its reader before the other request has been worked on."""
    wire, late = pair()
    loop = asyncio.get_running_loop()
    order: list[object] = []
    loop.call_soon(lambda: (order.append("first"), late.write(b"answer")))
    loop.call_soon(lambda: order.append(("second", *wire.packets)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["first", ("second",)]
    assert wire.packets == [b"answer"]


async def test_much_leaves_at_once() -> None:
    """A transport with much to send pauses its writer, which must not see that a turn too late."""
    wire, late = pair()
    late.write(b"head")
    late.write(bytes(MAX_HELD_BYTES))
    assert wire.packets == [b"head" + bytes(MAX_HELD_BYTES)]
    late.write(b"rest")
    await asyncio.sleep(0)
    assert wire.packets[1:] == [b"rest"]


async def test_closing_and_handing_over_send_what_is_held() -> None:
    wire, late = pair()
    late.write(b"last")
    late.close()
    assert (wire.packets, wire.is_closed) == ([b"last"], True)
    late.write(b"nobody reads this")
    late.close()
    await asyncio.sleep(0)
    assert wire.packets == [b"last"]
    wire, late = pair()
    late.write(b"switching")
    assert late.unwrap() is wire
    assert wire.packets == [b"switching"]


async def test_aborting_drops_what_is_held() -> None:
    wire, late = pair()
    late.write(b"never")
    late.abort()
    assert wire.was_aborted
    assert late.get_write_buffer_size() == 0
    await asyncio.sleep(0)
    assert wire.packets == []


async def test_a_client_that_leaves_within_the_turn_is_written_nothing() -> None:
    wire, late = pair()
    late.write(b"late")
    wire.is_closed = True  # as the event loop does when the connection breaks
    await asyncio.sleep(0)
    assert wire.packets == []


Step = bytes | int  # bytes to write, or turns of the event loop to wait


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.one_of(st.binary(max_size=20), st.sampled_from([bytes(MAX_HELD_BYTES + 1)]), st.integers(0, 2))
    )
)
def test_a_client_gets_the_same_bytes(steps: list[Step]) -> None:
    async def run() -> tuple[Wire, int]:
        wire, late = pair()
        most_held = 0
        for step in steps:
            if isinstance(step, bytes):
                late.write(step)
                most_held = max(most_held, late.get_write_buffer_size())
            else:
                for _ in itertools.repeat(None, step):
                    await asyncio.sleep(0)
        late.close()
        return wire, most_held

    wire, most_held = asyncio.run(run())
    assert b"".join(wire.packets) == b"".join(step for step in steps if isinstance(step, bytes))
    assert most_held <= MAX_HELD_BYTES
