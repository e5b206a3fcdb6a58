from __future__ import annotations

import pytest

from penstock.scheduler.running import SlotUse


def test_fragmentation_is_the_unfilled_share_of_slots() -> None:
    assert SlotUse(num_slots=48, num_filled=33).fragmentation == pytest.approx(15 / 48)


def test_nothing_allocated_is_not_fragmented() -> None:
    assert SlotUse().fragmentation == 0.0
