"""The statistics of several engines as one engine's. Knows no connection."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.messages import EngineStats

# Of the latest step: the slowest replica's. What else there is gets added up, fragmentation aside.
_LATEST = frozenset({"step_s", "plan_s"})
# How things stand, as against what was counted since the start: a replica that goes takes its part with it.
_GAUGES = frozenset(
    {
        "num_running",
        "num_waiting",
        "num_waiting_tokens",
        "num_kv_blocks",
        "num_kv_blocks_used",
        "num_pinned_blocks",
        "num_host_blocks",
        "num_host_blocks_used",
        "step_tokens",
        "kv_fragmentation",
        *_LATEST,
    }
)
_SUMMED = tuple(
    name for name in EngineStats.__struct_fields__ if name not in _LATEST and name != "kv_fragmentation"
)
_COUNTERS = tuple(name for name in EngineStats.__struct_fields__ if name not in _GAUGES)


def added_up(stats: Sequence[EngineStats]) -> EngineStats:
    if len(stats) == 1:
        return stats[0]
    figures = {name: sum(getattr(each, name) for each in stats) for name in _SUMMED}
    figures |= {name: max((getattr(each, name) for each in stats), default=0.0) for name in _LATEST}
    used = figures["num_kv_blocks_used"]
    if used:
        wasted = sum(each.kv_fragmentation * each.num_kv_blocks_used for each in stats)
        figures["kv_fragmentation"] = wasted / used
    return EngineStats(**figures)


def counters_of(stats: EngineStats) -> EngineStats:
    """What stays of a replica that has gone, so that no counter ever falls."""
    return EngineStats(**{name: getattr(stats, name) for name in _COUNTERS})
