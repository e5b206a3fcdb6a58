from __future__ import annotations

import asyncio

import pytest

from penstock.cluster.held import HeldRequests
from penstock.control.holding import HoldingConfig
from penstock.core.errors import EngineUnavailable, Overloaded, PenstockError
from penstock.core.request import Request, SamplingParams


def request(request_id: str, model: str = "m", num_tokens: int = 3) -> Request:
    sampling = SamplingParams(max_tokens=1)
    return Request(id=request_id, prompt_token_ids=(0,) * num_tokens, sampling=sampling, model=model)


class Waiting:
    def __init__(self, config: HoldingConfig | None = None) -> None:
        self.held = HeldRequests(config)
        self.sent: list[str] = []
        self.failed: list[tuple[str, PenstockError]] = []

    def hold(self, request: Request, wait_s: float = 60.0) -> None:
        self.held.hold(
            request,
            wait_s=wait_s,
            send=lambda: self.sent.append(request.id),
            on_error=lambda error: self.failed.append((request.id, error)),
        )


async def test_requests_leave_in_the_order_they_came_and_only_those_of_the_model() -> None:
    waiting = Waiting()
    for name, model in (("a", "m"), ("b", "other"), ("c", ""), ("d", "m")):
        waiting.hold(request(name, model))
    assert (waiting.held.num_requests(), waiting.held.num_requests("m")) == (4, 3)
    assert waiting.held.num_tokens("other") == 6  # one of them would take any model
    waiting.held.release("m")
    assert waiting.sent == ["a", "c", "d"]
    waiting.held.release()
    assert waiting.sent[-1] == "b"
    assert waiting.held.num_tokens() == 0


async def test_who_waits_too_long_or_leaves_is_not_sent() -> None:
    waiting = Waiting()
    waiting.hold(request("late"), wait_s=0.0)
    waiting.hold(request("gone"))
    assert waiting.held.abort("gone")
    assert not waiting.held.abort("gone")
    await asyncio.sleep(0.01)
    waiting.held.release()
    assert waiting.sent == []
    ((name, error),) = waiting.failed
    assert name == "late"
    assert isinstance(error, EngineUnavailable)


async def test_there_is_room_for_so_many() -> None:
    told: list[None] = []
    waiting = Waiting(HoldingConfig(max_held_requests=2, max_held_tokens=10))
    waiting.held.on_held = lambda: told.append(None)
    waiting.hold(request("a", num_tokens=8))
    with pytest.raises(Overloaded):
        waiting.hold(request("b", num_tokens=3))
    waiting.hold(request("c", num_tokens=1))
    with pytest.raises(Overloaded):
        waiting.hold(request("d", num_tokens=1))
    assert len(told) == 2


async def test_what_finds_no_replica_may_be_held_again() -> None:
    held = HeldRequests()
    times = []

    def send() -> None:
        times.append("sent")
        if len(times) == 1:
            held.hold(request("a"), wait_s=60.0, send=send, on_error=lambda error: None)

    held.hold(request("a"), wait_s=60.0, send=send, on_error=lambda error: None)
    held.release()
    assert (len(times), held.num_requests()) == (1, 1)
    held.release()
    assert (len(times), held.num_requests()) == (2, 0)
