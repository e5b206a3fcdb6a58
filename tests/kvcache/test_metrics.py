from __future__ import annotations

import pytest

from penstock.kvcache import fragmentation


def test_fragmentation_is_the_unfilled_share_of_slots() -> None:
    assert fragmentation([(16, 1), (17, 2)], block_size=16) == pytest.approx(15 / 48)


def test_nothing_allocated_is_not_fragmented() -> None:
    assert fragmentation([], block_size=16) == 0.0
    assert fragmentation([(0, 0)], block_size=16) == 0.0
