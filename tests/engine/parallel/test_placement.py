"""Experts are placed so that ranks have about the same load, and copies between slots end in the placement."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.parallel.placement import (
    Placement,
    copies_between,
    first_placement,
    imbalance,
    on_ranks,
    placed,
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], Placement, int]:
    """Loads, the placement so far, and the number of ranks."""
    num_ranks = draw(st.integers(1, 6))
    num_experts = draw(st.integers(num_ranks, 24))
    size = draw(st.integers(-(-num_experts // num_ranks), num_experts))
    loads = draw(
        st.lists(
            st.one_of(st.integers(0, 10), st.integers(0, 10**6)), min_size=num_experts, max_size=num_experts
        )
    )
    current = first_placement(num_experts, num_ranks * size)
    for _ in range(draw(st.integers(0, 2))):  # placed for other loads before
        before = draw(st.lists(st.integers(0, 100), min_size=num_experts, max_size=num_experts))
        current = placed(before, current, num_ranks)
    return loads, current, num_ranks


def check_placement(placement: Placement, num_experts: int, num_ranks: int) -> None:
    assert set(placement) == set(range(num_experts)), "every expert is somewhere"
    for part in on_ranks(placement, num_ranks):
        assert len(set(part)) == len(part) == len(placement) // num_ranks, "once on a rank"


@given(cases())
def test_a_placement_is_valid_and_not_worse(case: tuple[list[int], Placement, int]) -> None:
    loads, current, num_ranks = case
    check_placement(current, len(loads), num_ranks)
    found = placed(loads, current, num_ranks)
    assert len(found) == len(current)
    check_placement(found, len(loads), num_ranks)
    assert imbalance(loads, found, num_ranks) <= imbalance(loads, current, num_ranks)
    assert placed(loads, found, num_ranks) == found, "nothing moves twice for the same loads"


@given(cases())
def test_the_busiest_rank_is_within_one_copy_of_the_mean(case: tuple[list[int], Placement, int]) -> None:
    loads, current, num_ranks = case
    if not any(loads):
        return
    found = placed(loads, first_placement(len(loads), len(current)), num_ranks)
    largest_copy = max(load / found.count(expert) for expert, load in enumerate(loads))
    mean = sum(loads) / num_ranks
    assert imbalance(loads, found, num_ranks) <= 1 + largest_copy / mean + 1e-9


@given(cases())
def test_copies_make_one_placement_out_of_another(case: tuple[list[int], Placement, int]) -> None:
    loads, current, num_ranks = case
    wanted = placed(loads, current, num_ranks)
    copies = copies_between(current, wanted, num_ranks)
    slots = list(current)
    for copy in copies:
        slots[copy.to_slot] = current[copy.from_slot]
        assert current[copy.to_slot] != wanted[copy.to_slot], "what stays is not copied"
    assert tuple(slots) == wanted
    for before, after in zip(on_ranks(current, num_ranks), on_ranks(wanted, num_ranks), strict=True):
        kept = set(before) & set(after)
        assert [before.index(expert) for expert in kept] == [after.index(expert) for expert in kept]


@pytest.mark.parametrize(
    ("loads", "num_slots", "num_ranks", "least"),
    [
        ([40, 30, 20, 10], 4, 2, 1.0),  # 40 and 10, 30 and 20
        ([97, 1, 1, 1], 4, 2, 1.96),  # nothing else is possible without copies
        ([97, 1, 1, 1], 6, 2, 1.0),  # the busy expert is on both ranks, and another one too
        ([50, 50, 0, 0, 0, 0], 6, 2, 1.0),
        ([8, 8, 8, 8], 4, 4, 1.0),
        ([300, 100, 100, 100], 6, 3, 1.0),  # a copy of the first on each rank
        ([0, 0, 0], 3, 3, 1.0),
    ],
)
def test_the_best_placement_is_found(loads: list[int], num_slots: int, num_ranks: int, least: float) -> None:
    found = placed(loads, first_placement(len(loads), num_slots), num_ranks)
    assert imbalance(loads, found, num_ranks) == pytest.approx(least)


def test_a_large_model_becomes_almost_even() -> None:
    """256 experts whose loads follow Zipf's law, on 32 ranks with 32 more slots: DeepSeek V3's numbers."""
    loads = [10**6 // (1 + 37 * expert % 256) for expert in range(256)]
    before = first_placement(256, 288)
    found = placed(loads, before, 32)
    assert imbalance(loads, before, 32) > 3
    assert imbalance(loads, found, 32) < 1.05
