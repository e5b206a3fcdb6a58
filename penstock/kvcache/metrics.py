"""What is counted about the use of blocks by those who hold them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SlotUse:
    """Token slots in the tables of running requests. A block that several of them share counts for each, and a spare
    half of a block for none: anyone can have it."""

    num_slots: int = 0
    num_filled: int = 0  # those that hold a token, or are meant for one that is known

    @property
    def fragmentation(self) -> float:
        """The share of slots that hold nothing."""
        return 1.0 - self.num_filled / self.num_slots if self.num_slots else 0.0
