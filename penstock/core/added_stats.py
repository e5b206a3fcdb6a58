"""Adds up the statistics of several engines, or of several schedulers of one engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

from penstock.core.messages import DrafterStats, EngineStats

# Figures of the latest step: the slowest engine's count. All other figures but fragmentation are added up, and
# drafters by name and position.
LATEST = frozenset({"step_s", "plan_s", "expert_imbalance", "expert_imbalance_placed"})
_SUMMED = tuple(
    name
    for name in EngineStats.__struct_fields__
    if name not in LATEST and name not in ("kv_fragmentation", "drafters")
)


def added_up(stats: Sequence[EngineStats]) -> EngineStats:
    if len(stats) == 1:
        return stats[0]
    figures = {name: sum(getattr(each, name) for each in stats) for name in _SUMMED}
    figures |= {name: max((getattr(each, name) for each in stats), default=0.0) for name in LATEST}
    used = figures["num_kv_blocks_used"]
    if used:
        wasted = sum(each.kv_fragmentation * each.num_kv_blocks_used for each in stats)
        figures["kv_fragmentation"] = wasted / used
    return EngineStats(**figures, drafters=_drafters([each.drafters for each in stats]))


def _drafters(stats: Sequence[tuple[DrafterStats, ...]]) -> tuple[DrafterStats, ...]:
    """Add up the counts of each drafter by position. Engines may have drafts of different lengths."""
    found: dict[str, DrafterStats] = {}
    for each in chain.from_iterable(stats):
        known = found.get(each.drafter, DrafterStats(each.drafter, (), ()))
        drafted = tuple(map(sum, zip_longest(known.drafted, each.drafted, fillvalue=0)))
        accepted = tuple(map(sum, zip_longest(known.accepted, each.accepted, fillvalue=0)))
        found[each.drafter] = DrafterStats(each.drafter, drafted, accepted)
    return tuple(found.values())
