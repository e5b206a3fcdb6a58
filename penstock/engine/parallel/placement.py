"""Places the experts of a layer on ranks by measured loads, with several copies of the busiest experts. Pure
arithmetic: knows no tensor and no process.

A rank has the same number of slots as every other rank, and each slot holds one expert. The tokens of an expert are
divided evenly between its copies, so a second copy on the same rank would be of no use, and no placement has one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.models.sharding import first_slots

Placement = tuple[int, ...]  # the expert of each slot, rank by rank

_MOST_SWAPS_PER_SLOT = 10
_SMALLEST_GAIN = 1e-9  # of a swap, relative to the difference that it narrows


@dataclass(frozen=True, slots=True)
class Copy:
    """Slot `to_slot` gets the expert that slot `from_slot` has."""

    to_slot: int
    from_slot: int


def first_placement(num_experts: int, num_slots: int) -> Placement:
    """Return the placement before anything is measured."""
    return tuple(first_slots(num_experts, range(num_slots)))


def on_ranks(placement: Placement, num_ranks: int) -> list[Placement]:
    """Return the experts of each rank."""
    size = len(placement) // num_ranks
    return [placement[rank * size : (rank + 1) * size] for rank in range(num_ranks)]


def imbalance(loads: Sequence[int], placement: Placement, num_ranks: int) -> float:
    """Return the load of the busiest rank, relative to the mean of all ranks; 1 is even. `loads` are by expert."""
    if not any(loads):
        return 1.0
    weights = _weights(loads, [placement.count(expert) for expert in range(len(loads))])
    busiest = max(sum(weights[expert] for expert in part) for part in on_ranks(placement, num_ranks))
    return busiest * num_ranks / sum(loads)


def placed(loads: Sequence[int], current: Placement, num_ranks: int) -> Placement:
    """Return a placement in as many slots whose busiest rank has as little load as possible, or `current` if no
    better one is found. Experts that stay on a rank keep their slots."""
    num_copies = _num_copies(loads, len(current), num_ranks)
    weights = _weights(loads, num_copies)
    ranks = _packed(weights, num_copies, len(current) // num_ranks, num_ranks)
    _even_out(ranks, weights)
    found = _arranged(ranks, on_ranks(current, num_ranks))
    is_better = imbalance(loads, found, num_ranks) < imbalance(loads, current, num_ranks)
    return found if is_better else current


def copies_between(current: Placement, wanted: Placement, num_ranks: int) -> list[Copy]:
    """Return the copies that make one placement out of another, all of which read before any of them writes. A copy
    on the same rank is preferred; otherwise ranks with the expert send it in turns."""
    size = len(current) // num_ranks
    num_sent = [0] * num_ranks
    made = []
    for slot, expert in enumerate(wanted):
        if current[slot] == expert:
            continue
        holders = [held for held, each in enumerate(current) if each == expert]
        source = min(holders, key=lambda held: (held // size != slot // size, num_sent[held // size]))
        num_sent[source // size] += 1
        made.append(Copy(slot, source))
    return made


def _weights(loads: Sequence[int], num_copies: Sequence[int]) -> list[float]:
    """Return the load of one copy of each expert."""
    return [load / copies for load, copies in zip(loads, num_copies, strict=True)]


def _num_copies(loads: Sequence[int], num_slots: int, num_ranks: int) -> list[int]:
    """Return how many copies each expert has: one, and one more for whichever has the busiest copies, in turns."""
    num_copies = [1] * len(loads)
    busiest: list[tuple[float, int]] = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(busiest)
    for _ in range(num_slots - len(loads)):
        while num_copies[busiest[0][1]] == num_ranks:  # every rank has the expert
            heapq.heappop(busiest)
        expert = busiest[0][1]
        num_copies[expert] += 1
        heapq.heapreplace(busiest, (-loads[expert] / num_copies[expert], expert))
    return num_copies


def _packed(
    weights: Sequence[float], num_copies: Sequence[int], size: int, num_ranks: int
) -> list[list[int]]:
    """Put copies on ranks of `size` slots each: the heaviest copy first, on the rank with the least load."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for expert in sorted(range(len(weights)), key=lambda expert: -weights[expert]):
        for _ in range(num_copies[expert]):
            with_room = [rank for rank in range(num_ranks) if len(ranks[rank]) < size]
            fitting = [rank for rank in with_room if expert not in ranks[rank]]
            if fitting:
                chosen, added = min(fitting, key=totals.__getitem__), expert
            else:
                chosen, added = _make_room(ranks, totals, weights, expert, with_room[0])
            ranks[chosen].append(added)
            totals[chosen] += weights[added]
    return ranks


def _make_room(
    ranks: list[list[int]], totals: list[float], weights: Sequence[float], expert: int, with_room: int
) -> tuple[int, int]:
    """Put the expert on a full rank that does not have it. An expert of that rank goes to the rank with room, which
    has fewer experts and so lacks one of them. Returns that rank and the expert that it gets."""
    full = min((rank for rank in range(len(ranks)) if expert not in ranks[rank]), key=totals.__getitem__)
    moved = min((each for each in ranks[full] if each not in ranks[with_room]), key=weights.__getitem__)
    ranks[full][ranks[full].index(moved)] = expert
    totals[full] += weights[expert] - weights[moved]
    return with_room, moved


def _even_out(ranks: list[list[int]], weights: Sequence[float]) -> None:
    """Swap experts between the busiest and the least busy rank while that narrows their difference. In the end it is
    no larger than the load of one copy."""
    for _ in range(_MOST_SWAPS_PER_SLOT * sum(map(len, ranks))):
        totals = [sum(weights[expert] for expert in part) for part in ranks]
        busiest = max(range(len(ranks)), key=totals.__getitem__)
        calmest = min(range(len(ranks)), key=totals.__getitem__)
        gap = totals[busiest] - totals[calmest]
        swaps = [
            (abs(gap / 2 - (weights[given] - weights[taken])), given, taken)
            for given in ranks[busiest]
            for taken in ranks[calmest]
            if given not in ranks[calmest] and taken not in ranks[busiest]
        ]
        if not swaps:
            return
        left, given, taken = min(swaps)
        if left >= gap / 2 * (1 - _SMALLEST_GAIN):
            return
        ranks[busiest][ranks[busiest].index(given)] = taken
        ranks[calmest][ranks[calmest].index(taken)] = given


def _arranged(groups: list[list[int]], current: list[Placement]) -> Placement:
    """Give each group of experts to the rank that has most of them already, and each expert of the rank its slot."""
    overlaps = sorted(
        (-len(set(group) & set(held)), number, rank)
        for number, group in enumerate(groups)
        for rank, held in enumerate(current)
    )
    group_of: dict[int, list[int]] = {}
    taken = set()
    for _, number, rank in overlaps:
        if number not in taken and rank not in group_of:
            group_of[rank] = groups[number]
            taken.add(number)
    arranged: list[int] = []
    for rank, held in enumerate(current):
        arriving = iter([expert for expert in group_of[rank] if expert not in held])
        arranged += [expert if expert in group_of[rank] else next(arriving) for expert in held]
    return tuple(arranged)
