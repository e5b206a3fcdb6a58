"""/admin/cluster and /admin/releases: what they show, whom they let in, and what they refuse."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.api.admin.fleet import ClusterEndpoints
from penstock.api.app import create_app
from penstock.core.cluster_view import (
    ClusterView,
    HostOrder,
    PoolView,
    ReleaseOrder,
    ReleaseView,
    ReplicaOrder,
)
from penstock.core.errors import Conflict, InvalidRequest, NotFound
from penstock.core.gateway_config import ServerConfig
from penstock.core.identity import Scope
from penstock.gateway.metrics.gateway import PoolMetrics
from penstock.gateway.metrics.table import metric
from tests.api.tenant_server import TenantServer
from tests.cluster.views import RELEASE, VIEW


class FakeControl:
    def __init__(self) -> None:
        self.orders: list[ReleaseOrder] = []
        self.replica_orders: list[ReplicaOrder] = []

    @property
    def pools(self) -> tuple[PoolView, ...]:
        return VIEW.pools

    async def cluster(self) -> ClusterView:
        return VIEW

    async def start_release(self, order: ReleaseOrder) -> ReleaseView:
        if order.weights == "missing":
            raise InvalidRequest("There is no such model.", param="weights")
        self.orders.append(order)
        return RELEASE

    async def promote_release(self, model: str | None) -> ReleaseView:
        if model == "idle":
            raise Conflict("The release is over.")
        return RELEASE

    async def roll_back_release(self, model: str | None) -> ReleaseView:
        return RELEASE

    async def operate(self, order: HostOrder) -> ClusterView:
        if order.target == "nowhere":
            raise NotFound("There is no host 'nowhere' in this fleet.")
        return VIEW

    async def order_replica(self, order: ReplicaOrder) -> ClusterView:
        if order.replica_id == "missing":
            raise NotFound("There is no replica 'missing'.")
        self.replica_orders.append(order)
        return VIEW


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[TenantServer]:
    server = TenantServer(tmp_path, static_key="root")
    server.control = FakeControl()  # type: ignore[attr-defined]
    endpoints = ClusterEndpoints(server.control, server.database)  # type: ignore[attr-defined]
    server.app = create_app(
        server.gateway, ServerConfig(), tenants=server.tenants, more_routes=endpoints.routes()
    )
    yield server
    await server.close()


async def test_the_cluster_as_json(server: TenantServer) -> None:
    async with server.client("root") as admin:
        body = (await admin.get("/admin/cluster")).json()
    assert body["object"] == "cluster"
    assert [replica["id"] for replica in body["replicas"]] == ["replica-1", "replica-2"]
    assert body["releases"][0]["gates"][0]["sentence"] == "3 of 200 requests"


async def test_only_administrators_see_it(server: TenantServer) -> None:
    key = await server.make_key(Scope.INFERENCE, Scope.USAGE, Scope.METRICS)
    async with server.client(key.secret) as client:
        for method, path in (
            ("GET", "/admin/cluster"),
            ("POST", "/admin/cluster"),
            ("GET", "/admin/releases"),
            ("POST", "/admin/releases"),
            ("POST", "/admin/releases/promote"),
            ("POST", "/admin/releases/rollback"),
        ):
            assert (await client.request(method, path)).status_code == 403


async def test_orders_reach_the_control_plane_and_the_audit_log(server: TenantServer) -> None:
    async with server.client("root") as admin:
        order = {"settings": {"max_num_seqs": 64}, "policy": {"min_stage_s": 1}}
        made = await admin.post("/admin/releases", json=order)
        assert made.status_code == 200
        assert made.json()["object"] == "release"
        assert (await admin.post("/admin/releases/promote", json={"model": "m"})).status_code == 200
        assert (await admin.post("/admin/releases/rollback")).status_code == 200
        drained = await admin.post("/admin/cluster", json={"action": "drain", "target": "north"})
        assert drained.json()["object"] == "cluster"
        listed = (await admin.get("/admin/releases")).json()
        entries = (await admin.get("/admin/audit")).json()["data"]
    assert server.control.orders[0].settings == {"max_num_seqs": 64}  # type: ignore[attr-defined]
    assert [release["id"] for release in listed["data"]] == ["rel_1"]
    actions = [entry["action"] for entry in entries if entry["target"] == "rel_1"]
    assert actions == ["release.rollback", "release.promote", "release.start"]
    assert [entry["action"] for entry in entries if entry["target"] == "north"] == ["cluster.drain"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/admin/releases", {"wieghts": "x"}, 400),
        ("/admin/releases", {"weights": "missing"}, 400),
        ("/admin/releases/promote", {"model": "idle"}, 409),
        ("/admin/cluster", {"action": "explode", "target": "north"}, 400),
        ("/admin/cluster", {"action": "cordon", "target": "nowhere"}, 404),
    ],
)
async def test_what_is_wrong_is_said(
    server: TenantServer, path: str, body: dict[str, str], status: int
) -> None:
    async with server.client("root") as admin:
        assert (await admin.post(path, json=body)).status_code == status


def test_metrics_show_what_the_autoscaler_sees() -> None:
    families = [metric(name, value) for name, value in PoolMetrics(FakeControl()).figures().items()]
    values = {
        (sample.name, sample.labels.get("state", "")): sample.value
        for family in families
        for sample in family.samples
    }
    assert values["penstock_replicas", "ready"] == 2
    assert values["penstock_replicas_wanted", ""] == 3
    assert values["penstock_pool_drain_seconds", ""] == 3.0
    assert values["penstock_pool_load", ""] == 1.5  # the queue takes longer than it may, the rest is within


async def test_orders_about_replicas_are_checked_and_audited(server: TenantServer) -> None:
    async with server.client("root") as client:
        drained = await client.post("/admin/replicas", json={"action": "drain", "replica_id": "replica-1"})
        assert drained.status_code == 200
        assert drained.json()["object"] == "cluster"
        for body, status in (
            ({"action": "drain"}, 400),
            ({"action": "convert", "role": "decode"}, 400),
            ({"action": "kill", "replica_id": "replica-1"}, 400),
            ({"action": "start", "modle": "x"}, 400),
            ({"action": "drain", "replica_id": "missing"}, 404),
        ):
            assert (await client.post("/admin/replicas", json=body)).status_code == status, body
        log = (await client.get("/admin/audit")).json()["data"]
    assert [(entry["action"], entry["target"]) for entry in log] == [("replica.drain", "replica-1")]
    orders = server.control.replica_orders  # type: ignore[attr-defined]
    assert [order.replica_id for order in orders] == ["replica-1"]
