"""Counts how often drafted tokens were accepted, by their position in a draft. Knows no scheduler."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

Kind: TypeAlias = tuple[str, int]  # a drafter, and one of its grades

_DECAY = 0.9  # of counts of one request, per draft
_PRIOR_WEIGHT = 3.0  # the engine's estimate counts as this many tries
_LONGEST_PAUSE = 16  # tokens


class Tally:
    """Counts, by position in a draft, how often a token was tried (all tokens before it were accepted), and how often
    it was accepted. Old counts decay."""

    __slots__ = ("_accepted", "_decay", "_prior_weight", "_tried")

    def __init__(self, decay: float, prior_weight: float) -> None:
        self._decay = decay
        self._prior_weight = prior_weight
        self._tried: list[float] = []
        self._accepted: list[float] = []

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        num_tried = min(num_accepted + 1, num_drafted)
        missing = num_tried - len(self._tried)
        if missing > 0:
            self._tried += [0.0] * missing
            self._accepted += [0.0] * missing
        for position in range(num_tried):
            self._tried[position] = self._decay * self._tried[position] + 1.0
            self._accepted[position] = self._decay * self._accepted[position] + (position < num_accepted)

    def chance(self, position: int, prior: float) -> float:
        """Estimate the chance that a token is accepted, given that all tokens before it are."""
        if position >= len(self._tried):
            return prior
        weight = self._prior_weight
        return (self._accepted[position] + weight * prior) / (self._tried[position] + weight)


class NodeTally:
    """Counts how often each node of a tree of drafts was verified, and how often it was accepted: by its rank, since
    the most likely nodes come first. Old counts decay."""

    __slots__ = ("_accepted", "_decay", "_first_chance", "_prior_weight", "_tried")

    def __init__(self, decay: float, prior_weight: float, first_chance: float) -> None:
        self._decay, self._prior_weight, self._first_chance = decay, prior_weight, first_chance
        self._tried: list[float] = []
        self._accepted: list[float] = []

    def observe(self, num_nodes: int, accepted: Collection[int]) -> None:
        missing = num_nodes - len(self._tried)
        self._tried += [0.0] * missing
        self._accepted += [0.0] * missing
        for rank in range(len(self._tried)):
            # Nodes that are left out are forgotten, so that they are verified again after a while.
            self._tried[rank] = self._decay * self._tried[rank] + (rank < num_nodes)
            self._accepted[rank] = self._decay * self._accepted[rank] + (rank in accepted)

    def chances(self, count: int) -> list[float]:
        """Estimate the chance that each of the first nodes is accepted. A node that was never verified is as likely
        as the node before it. Nodes that were accepted more often than those before them share their mean with these:
        the scheduler takes all of them or none."""
        chance, weight, runs = self._first_chance, self._prior_weight, list[tuple[float, int]]()
        for rank in range(count):
            if rank < len(self._tried):
                chance = (self._accepted[rank] + weight * chance) / (self._tried[rank] + weight)
            mean, size = chance, 1
            while runs and runs[-1][0] < mean:
                before, length = runs.pop()
                mean, size = (before * length + mean * size) / (length + size), length + size
            runs.append((mean, size))
        return [mean for mean, size in runs for _ in range(size)]


class Drafting:
    """The acceptance statistics of one request's drafts. Updated by Speculation."""

    __slots__ = ("_pause", "paused_until", "tallies")

    def __init__(self) -> None:
        self.tallies: dict[Kind, Tally] = {}
        self.paused_until = 0  # number of known tokens at which drafting resumes
        self._pause = 0

    def observe(self, kind: Kind, num_drafted: int, num_accepted: int) -> None:
        tally = self.tallies.get(kind)
        if tally is None:
            tally = self.tallies[kind] = Tally(_DECAY, _PRIOR_WEIGHT)
        tally.observe(num_drafted, num_accepted)
        if num_accepted:
            self._pause = 0

    def pause(self, num_known: int) -> None:
        """Stop drafting for this request for a while, longer each time."""
        self._pause = min(_LONGEST_PAUSE, 2 * self._pause or 1)
        self.paused_until = num_known + self._pause
