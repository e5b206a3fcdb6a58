from __future__ import annotations

import pytest

from penstock.core.errors import Overloaded
from penstock.core.request import Request, SamplingParams
from penstock.dispatch.requests import WaitingConfig, WaitingRoom


def request(request_id: str, model: str = "m", num_tokens: int = 3) -> Request:
    sampling = SamplingParams(max_tokens=1)
    return Request(id=request_id, prompt_token_ids=(0,) * num_tokens, sampling=sampling, model=model)


def test_requests_leave_in_the_order_they_came_and_are_counted_by_model() -> None:
    room = WaitingRoom(WaitingConfig())
    for name, model in (("a", "m"), ("b", "other"), ("c", ""), ("d", "m")):
        room.enter(request(name, model))
    assert (room.num_requests(), room.num_requests("m")) == (4, 3)
    assert room.num_tokens("other") == 6, "the request without a model would take any"
    assert room.leave("b")
    assert not room.leave("b")
    assert room.leave_all() == ["a", "c", "d"]
    assert room.num_tokens() == 0


def test_there_is_room_for_so_many_requests_and_tokens() -> None:
    room = WaitingRoom(WaitingConfig(max_requests=2, max_tokens=10))
    room.enter(request("a", num_tokens=8))
    with pytest.raises(Overloaded):
        room.enter(request("b", num_tokens=3))
    room.enter(request("c", num_tokens=1))
    with pytest.raises(Overloaded) as refused:
        room.enter(request("d", num_tokens=1))
    assert refused.value.retry_after_s


def test_waiting_ends_with_the_deadline_or_after_so_long() -> None:
    room = WaitingRoom(WaitingConfig(max_wait_s=60.0))
    assert room.give_up_s(10.0, None) == 70.0
    assert room.give_up_s(10.0, 30.0) == 30.0
    assert "60 s" in room.too_late().message
