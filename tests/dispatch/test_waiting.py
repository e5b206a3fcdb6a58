from __future__ import annotations

from random import Random

import pytest

from penstock.core.errors import Overloaded
from penstock.core.request import Request, SamplingParams
from penstock.dispatch import DispatchConfig, Dispatcher, Fail, FleetStatus, ReplicaStatus, Send
from penstock.dispatch.requests import WaitingConfig, WaitingRoom
from penstock.router import Replica, ReplicaState


def request(request_id: str, model: str = "m", num_tokens: int = 3, tenant: str = "") -> Request:
    return Request(
        id=request_id,
        prompt_token_ids=(0,) * num_tokens,
        sampling=SamplingParams(max_tokens=1),
        model=model,
        tenant=tenant,
    )


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


@pytest.mark.parametrize("config", [WaitingConfig(max_requests=8), WaitingConfig(max_tokens=8)])
def test_a_tenant_leaves_room_for_others(config: WaitingConfig) -> None:
    room = WaitingRoom(config)
    for index in range(6):
        room.enter(request(f"greedy{index}", num_tokens=1, tenant="greedy"))
    with pytest.raises(Overloaded, match="of this workspace"):
        room.enter(request("one too many", num_tokens=1, tenant="greedy"))
    room.enter(request("late", num_tokens=1, tenant="late"))
    assert room.leave("greedy0")
    assert room.leave("greedy1")
    room.enter(request("again", num_tokens=1, tenant="greedy"))
    room.leave_all()
    room.enter(request("greedy0", num_tokens=1, tenant="greedy"))


def test_waiting_ends_with_the_deadline_or_after_so_long() -> None:
    room = WaitingRoom(WaitingConfig(max_wait_s=60.0))
    assert room.give_up_s(10.0, None) == 70.0
    assert room.give_up_s(10.0, 30.0) == 30.0
    assert "60 s" in room.too_late().message


def test_a_request_that_both_replicas_lost_goes_on_when_they_are_back() -> None:
    """As a gateway sees it that is cut off for a moment, and notices one silent replica after the other."""

    def fleet(**states: ReplicaState) -> FleetStatus:
        replicas = [
            ReplicaStatus(replica=Replica(id=name, models=frozenset({"m"}), state=state), model="m")
            for name, state in states.items()
        ]
        return FleetStatus(replicas=tuple(replicas), models={"m": 16})

    ready, silent = ReplicaState.READY, ReplicaState.UNHEALTHY
    dispatcher = Dispatcher(DispatchConfig(), Random(0), 0.0)
    dispatcher.update(fleet(a=ready, b=ready), 0.0)
    asked = Request(id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=9), model="m")
    (first,) = [each for each in dispatcher.add(asked, 0.0) if isinstance(each, Send)]
    other = "b" if first.replica_id == "a" else "a"
    actions = dispatcher.update(fleet(**{first.replica_id: silent, other: ready}), 5.0)
    assert [each.replica_id for each in actions if isinstance(each, Send)] == [other]
    dispatcher.update(fleet(a=silent, b=silent), 6.0)
    dispatcher.tick(7.0)
    actions = [*dispatcher.update(fleet(a=ready, b=ready), 20.0), *dispatcher.tick(20.0)]
    assert len([each for each in actions if isinstance(each, Send)]) == 1
    assert not [each for each in actions if isinstance(each, Fail)]
