"""What operators may see of the fleet behind a gateway, and order. `cluster/control_link` implements the protocol; a
server without a fleet has no such object."""

from __future__ import annotations

from typing import Protocol

from penstock.core.cluster_view import ClusterView, PoolView, ReleaseOrder, ReleaseView


class FleetControl(Protocol):
    @property
    def pools(self) -> tuple[PoolView, ...]:
        """The pools as the control process last reported them."""
        ...

    async def cluster(self) -> ClusterView: ...

    async def start_release(self, order: ReleaseOrder) -> ReleaseView: ...

    async def promote_release(self, model: str | None) -> ReleaseView: ...

    async def roll_back_release(self, model: str | None) -> ReleaseView: ...
