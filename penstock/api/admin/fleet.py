"""Endpoints for operators: /admin/cluster, /admin/releases and /v1/usage.

The middleware has checked that the caller has the scope `admin`; for /v1/usage `usage` is enough. A key with that
scope sees the usage of its own workspace, and an administrator sees everyone's.
"""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.admin.settings import audit
from penstock.api.http.answers import json_response, private_json, shown_as
from penstock.api.http.context import principal_of
from penstock.api.http.parsing import integer_of
from penstock.api.http.routes import Operation
from penstock.core.cluster_view import (
    ClusterView,
    ExperimentControl,
    ExperimentOrder,
    ExperimentView,
    FleetControl,
    HostOrder,
    ReleaseOrder,
    ReleaseView,
    ReplicaOrder,
)
from penstock.core.errors import ConfigError, InvalidRequest, NotFound, PermissionDenied
from penstock.core.identity import Scope
from penstock.core.objective import PolicySet, policy_of
from penstock.gateway.external.models import ExternalModels
from penstock.gateway.ledger.ledger import UsageLedger
from penstock.gateway.ledger.usage_store import (
    UsagePage,
    UsageQuery,
    default_start,
    parse_groups,
    parse_moment,
    parse_page,
    usage_page,
)
from penstock.gateway.settings.live import LiveSettings
from penstock.gateway.store.database import Database


class TargetModel(msgspec.Struct, forbid_unknown_fields=True):
    model: str | None = None  # the served name; None: the only model


class ReleaseObject(ReleaseView, frozen=True, kw_only=True):
    object: str = "release"


class ReleaseList(msgspec.Struct, frozen=True):
    """One release for each model: the one in progress, or else the last one."""

    data: list[ReleaseObject]
    object: str = "list"


class ClusterEndpoints:
    def __init__(
        self, control: FleetControl, database: Database, external: ExternalModels | None = None
    ) -> None:
        """`external` servers are shown beside the replicas."""
        self._control = control
        self._external = external
        self._database = database

    def routes(self) -> list[Operation]:
        return [
            Operation("GET /admin/cluster", self.show, ClusterView),
            Operation("POST /admin/cluster", self.operate, ClusterView, reads=HostOrder),
            Operation("POST /admin/replicas", self.order_replica, ClusterView, reads=ReplicaOrder),
            Operation("GET /admin/releases", self.list_releases, ReleaseList),
            Operation("POST /admin/releases", self.start, ReleaseObject, reads=ReleaseOrder),
            Operation(
                "POST /admin/releases/promote",
                self.promote,
                ReleaseObject,
                reads=TargetModel,
                default=b"{}",
            ),
            Operation(
                "POST /admin/releases/rollback",
                self.roll_back,
                ReleaseObject,
                reads=TargetModel,
                default=b"{}",
            ),
        ]

    async def show(self, request: Request) -> Response:
        view = await self._control.cluster()
        if self._external is not None:
            replicas = (*view.replicas, *self._external.replica_views())
            view = msgspec.structs.replace(view, replicas=replicas)
        return private_json(view)

    async def operate(self, request: Request, order: HostOrder) -> Response:
        """Carry out an order about the hosts of a shared fleet."""
        view = await self._control.operate(order)
        await audit(self._database, request, f"cluster.{order.action}", order.target, order)
        return private_json(view)

    async def order_replica(self, request: Request, order: ReplicaOrder) -> Response:
        if order.action != "start" and order.replica_id is None:
            raise InvalidRequest(f"Name the replica to {order.action}.", param="replica_id")
        view = await self._control.order_replica(order)
        target = order.replica_id or order.model or "replica"
        await audit(self._database, request, f"replica.{order.action}", target[:64], order)
        return private_json(view)

    async def list_releases(self, request: Request) -> Response:
        view = await self._control.cluster()
        return private_json(ReleaseList([shown_as(ReleaseObject, release) for release in view.releases]))

    async def start(self, request: Request, order: ReleaseOrder) -> Response:
        return await self._done(request, "release.start", await self._control.start_release(order))

    async def promote(self, request: Request, which: TargetModel) -> Response:
        return await self._done(request, "release.promote", await self._control.promote_release(which.model))

    async def roll_back(self, request: Request, which: TargetModel) -> Response:
        return await self._done(
            request, "release.rollback", await self._control.roll_back_release(which.model)
        )

    async def _done(self, request: Request, action: str, release: ReleaseView) -> Response:
        shown = shown_as(ReleaseObject, release)
        await audit(self._database, request, action, release.id, shown)
        return private_json(shown)


USAGE_PARAMETERS = frozenset(
    {"group_by", "start", "end", "workspace", "key", "model", "endpoint", "limit", "page"}
)


class UsageEndpoints:
    def __init__(self, ledger: UsageLedger | None) -> None:
        self._ledger = ledger

    def routes(self) -> list[Operation]:
        return [Operation("GET /v1/usage", self.show_usage, UsagePage, query=tuple(sorted(USAGE_PARAMETERS)))]

    async def show_usage(self, request: Request) -> Response:
        principal = principal_of(request)
        if not principal.may(Scope.USAGE):
            raise PermissionDenied("This key may not read usage.", hint="It needs the scope 'usage'.")
        if self._ledger is None:
            raise NotFound("This server keeps no usage ledger.", hint="Start it with --usage-ledger.")
        query = _query(request)
        is_admin = principal.may(Scope.ADMIN)
        own = query.workspace_id is None or query.workspace_id == principal.workspace_id
        if is_admin or own:
            workspace_id = query.workspace_id if is_admin else principal.workspace_id
            ask = msgspec.structs.replace(query, workspace_id=workspace_id, limit=query.limit + 1)
            totals = await self._ledger.totals(ask)
        else:
            totals = []  # another's workspace looks like one that does not exist
        return json_response(usage_page(query, totals))


def _query(request: Request) -> UsageQuery:
    params = request.query_params
    unknown = sorted(params.keys() - USAGE_PARAMETERS)
    if unknown:
        raise InvalidRequest(
            f"{unknown[0][:40]!r} is no parameter of usage.",
            param=unknown[0][:40],
            hint=f"There are: {', '.join(sorted(USAGE_PARAMETERS))}.",
        )
    for name, value in params.items():
        if "\0" in value:
            raise InvalidRequest(f"{name} holds a character that no name has.", param=name)
    groups = parse_groups(params.get("group_by", "day"))
    return UsageQuery(
        group_by=groups,
        start=parse_moment(params["start"], "start") if "start" in params else default_start(time.time()),
        end=parse_moment(params["end"], "end") if "end" in params else None,
        workspace_id=params.get("workspace"),
        key_id=params.get("key"),
        model=params.get("model"),
        endpoint=params.get("endpoint"),
        after=parse_page(params["page"], groups) if "page" in params else None,
        limit=integer_of(request, "limit", default=100, low=1, high=1000),
    )


_Share = Annotated[float, Meta(gt=0, lt=1)]


class NewExperiment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two policy sets by name; `default` stands for the settings that the server was started with."""

    a: str
    b: str
    model: str | None = None  # by the name that it is served under; None: the only one
    share: _Share = 0.5  # of requests, for b
    window_s: float | None = None
    min_windows: int | None = None
    max_duration_s: float | None = None
    confidence: float | None = None


class ExperimentObject(ExperimentView, frozen=True, kw_only=True):
    object: str = "experiment"


class ExperimentList(msgspec.Struct, frozen=True):
    """One experiment for each model: the one in progress, or else the last one."""

    data: list[ExperimentObject]
    object: str = "list"


class ExperimentEndpoints:
    def __init__(self, control: ExperimentControl, settings: LiveSettings, database: Database) -> None:
        self._control = control
        self._settings = settings
        self._database = database

    def routes(self) -> list[Operation]:
        return [
            Operation("GET /admin/experiments", self.list_experiments, ExperimentList),
            Operation("POST /admin/experiments", self.start, ExperimentObject, reads=NewExperiment),
            Operation(
                "POST /admin/experiments/stop",
                self.stop,
                ExperimentObject,
                reads=TargetModel,
                default=b"{}",
            ),
        ]

    async def list_experiments(self, request: Request) -> Response:
        views = await self._control.experiments()
        return private_json(ExperimentList([shown_as(ExperimentObject, view) for view in views]))

    async def start(self, request: Request, new: NewExperiment) -> Response:
        order = ExperimentOrder(
            model=new.model,
            a=new.a,
            b=new.b,
            policy_a=self._policy(new.a, "a"),
            policy_b=self._policy(new.b, "b"),
            objective=self._settings.current.objective,
            config={
                name: value
                for name in ("share", "window_s", "min_windows", "max_duration_s", "confidence")
                if (value := getattr(new, name)) is not None
            },
        )
        return await self._done(request, "experiment.start", await self._control.start_experiment(order))

    async def stop(self, request: Request, which: TargetModel) -> Response:
        return await self._done(request, "experiment.stop", await self._control.stop_experiment(which.model))

    def _policy(self, name: str, param: str) -> PolicySet:
        try:
            return policy_of(self._settings.current.policies, name)
        except ConfigError as error:
            raise InvalidRequest(error.message, param=param, hint=error.hint) from error

    async def _done(self, request: Request, action: str, view: ExperimentView) -> Response:
        shown = shown_as(ExperimentObject, view)
        await audit(self._database, request, action, view.id, shown)
        return private_json(shown)
