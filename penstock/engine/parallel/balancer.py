"""Decides, on the first rank, when which layer's experts move. Starts no exchange: it returns messages for all ranks.

The tokens of experts are counted on the device in every step and read after every `interval` steps. Then one layer
at a time gets a better placement, one in each step, so that a step is late by the move of one layer at most.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import msgspec

from penstock.core.messages import EngineStats
from penstock.engine.collaborator import Collaborator
from penstock.engine.parallel.experts import ExpertBalance
from penstock.engine.parallel.messages import ExpertsPlaced
from penstock.engine.parallel.placement import imbalance, placed

logger = logging.getLogger(__name__)

SMALLEST_GAIN = 0.02  # of the busiest rank's load, relative to the mean: less is not worth a move


class ExpertBalancer(Collaborator):
    def __init__(self, balance: ExpertBalance, interval: int) -> None:
        """Move experts after every `interval` steps."""
        self._balance = balance
        self._interval = interval
        self._num_steps = 0
        self._loads: list[list[int]] = []  # of each layer, as last read
        self._waiting: deque[int] = deque()  # layers that may get a better placement
        self._imbalance = self._imbalance_placed = 0.0
        self._num_moved = 0

    @property
    def counts_next(self) -> bool:
        """Say whether the next call of `next_move` reads the counts, for which all ranks may be needed."""
        return self._num_steps == self._interval

    def next_move(self) -> ExpertsPlaced | None:
        """Return the move that comes before the next step. Called once before every step."""
        if self.counts_next:
            self._num_steps = 0
            self._measure()
        self._num_steps += 1
        move = None
        if self._waiting:
            move = self._improved(self._waiting.popleft())
            if not self._waiting:
                self._note_placed(move)
        return move

    def add_stats(self, stats: EngineStats) -> EngineStats:
        return msgspec.structs.replace(
            stats,
            expert_imbalance=self._imbalance,
            expert_imbalance_placed=self._imbalance_placed,
            num_experts_moved=self._num_moved,
        )

    def _measure(self) -> None:
        self._loads = self._balance.take_loads()
        self._waiting = deque(range(len(self._loads)))
        self._imbalance = self._mean_imbalance([layer.placement for layer in self._balance.layers])

    def _improved(self, index: int) -> ExpertsPlaced | None:
        layer, loads = self._balance.layers[index], self._loads[index]
        num_ranks = self._balance.group.size
        found = placed(loads, layer.placement, num_ranks)
        gain = imbalance(loads, layer.placement, num_ranks) - imbalance(loads, found, num_ranks)
        if gain < SMALLEST_GAIN:
            return None
        self._num_moved += sum(old != new for old, new in zip(layer.placement, found, strict=True))
        return ExpertsPlaced(index, found)

    def _note_placed(self, last: ExpertsPlaced | None) -> None:
        """Note what the counted tokens would have done to the new placements. `last` is not carried out yet."""
        placements = [layer.placement for layer in self._balance.layers]
        if last is not None:
            placements[last.layer] = last.experts
        self._imbalance_placed = self._mean_imbalance(placements)
        logger.info(
            "the busiest rank had %.2f times the mean of tokens for its experts; with the experts placed anew, "
            "%.2f times",
            self._imbalance,
            self._imbalance_placed,
        )

    def _mean_imbalance(self, placements: Sequence[tuple[int, ...]]) -> float:
        num_ranks = self._balance.group.size
        found = [
            imbalance(loads, placement, num_ranks)
            for loads, placement in zip(self._loads, placements, strict=True)
        ]
        return sum(found) / len(found)
