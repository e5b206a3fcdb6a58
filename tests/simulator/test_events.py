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
