"""Brings the replicas of pools to a number, for releases and experiments."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.cluster.replica import ReplicaManager, ReplicaSpec
from penstock.cluster.scaling import PoolScaler
from penstock.router import ReplicaState


async def start_missing(
    manager: ReplicaManager, pools: Sequence[PoolScaler], specs: Sequence[ReplicaSpec], counts: Sequence[int]
) -> None:
    """Bring each pool to this number of replicas of its spec; draining replicas are taken back first."""
    launches = []
    for pool, spec, count in zip(pools, specs, counts, strict=True):
        for member in pool.members():
            if member.replica.revision == spec.revision and member.replica.state is ReplicaState.DRAINING:
                manager.resume(member.id)
        num_missing = count - len(pool.serving(spec.revision))
        launches += [asyncio.create_task(manager.launch(spec)) for _ in range(num_missing)]
    try:
        await asyncio.gather(*launches)
    finally:  # one that fails, or an operator's order, ends the others
        for launch in launches:
            launch.cancel()
        await asyncio.gather(*launches, return_exceptions=True)


async def remove_beyond(pools: Sequence[PoolScaler], revision: str, counts: Sequence[int]) -> None:
    """Drain and stop the replicas of a revision beyond these numbers."""
    for pool, count in zip(pools, counts, strict=True):
        members = pool.members() if not count else pool.serving(revision)
        of_revision = [member.id for member in members if member.replica.revision == revision]
        await pool.remove(of_revision[count:])
