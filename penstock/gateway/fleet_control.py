"""What operators may see of the fleet behind a gateway, and order. `cluster/control_link` answers it; a server that
has no fleet has none."""

from __future__ import annotations

from typing import Protocol

from penstock.core.cluster_view import ClusterView, PoolView, ReleaseOrder, ReleaseView


class FleetControl(Protocol):
    @property
    def pools(self) -> tuple[PoolView, ...]:
        """As of a moment ago."""
        ...

    async def cluster(self) -> ClusterView: ...

    async def start_release(self, order: ReleaseOrder) -> ReleaseView: ...

    async def promote_release(self, model: str | None) -> ReleaseView: ...

    async def roll_back_release(self, model: str | None) -> ReleaseView: ...
