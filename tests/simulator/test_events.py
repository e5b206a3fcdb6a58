from __future__ import annotations

import pytest

from penstock.core.clock import VirtualClock
from penstock.simulator.driver import EventHeap, Rank


def test_events_happen_by_time_then_rank_then_order_of_arrival() -> None:
    clock = VirtualClock()
    heap = EventHeap(clock)
    happened: list[tuple[str, float]] = []

    def note(name: str, time_s: float, rank: Rank) -> None:
        heap.at(time_s, rank, lambda now: happened.append((name, clock.now())))

    note("plan", 1.0, Rank.PLAN)
    note("late commit", 2.0, Rank.COMMIT)
    note("first arrival", 1.0, Rank.ARRIVE)
    note("second arrival", 1.0, Rank.ARRIVE)
    note("commit", 1.0, Rank.COMMIT)
    heap.run()
    assert happened == [
        ("commit", 1.0),
        ("first arrival", 1.0),
        ("second arrival", 1.0),
        ("plan", 1.0),
        ("late commit", 2.0),
    ]


def test_time_does_not_run_backwards() -> None:
    heap = EventHeap(VirtualClock())
    heap.at(5.0, Rank.ARRIVE, lambda now: heap.at(4.0, Rank.PLAN, lambda now: None))
    with pytest.raises(ValueError, match="backwards"):
        heap.run()


def test_events_that_an_event_adds_at_its_own_instant_take_their_turn() -> None:
    heap = EventHeap(VirtualClock())
    happened: list[str] = []

    def note(name: str, rank: Rank, turn: int = 0) -> None:
        heap.at(1.0, rank, lambda now: happened.append(name), turn)

    def arrive(now: float) -> None:
        note("second plan", Rank.PLAN, turn=2)
        note("first plan", Rank.PLAN, turn=1)
        note("commit", Rank.COMMIT)

    heap.at(1.0, Rank.ARRIVE, arrive)
    note("third plan", Rank.PLAN, turn=3)
    note("control", Rank.CONTROL)
    note("plan before all", Rank.PLAN)
    heap.run()
    plans = ["plan before all", "first plan", "second plan", "third plan"]
    assert happened == ["commit", "control", *plans]
