"""/v1/usage: what was used and what it cost. A key sees its own workspace; an administrator sees everyone.

The middleware has checked that the caller has the scope `usage` or `admin`.
"""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.api.http.context import principal_of
from penstock.api.http.parsing import integer_of
from penstock.core.errors import InvalidRequest, NotFound, PermissionDenied
from penstock.core.identity import Scope
from penstock.gateway.ledger.ledger import UsageLedger
from penstock.gateway.ledger.report import (
    default_start,
    parse_groups,
    parse_moment,
    parse_page,
    usage_page,
)
from penstock.gateway.ledger.usage_store import UsageQuery

PARAMETERS = frozenset({"group_by", "start", "end", "workspace", "key", "model", "endpoint", "limit", "page"})


class UsageEndpoints:
    def __init__(self, ledger: UsageLedger | None) -> None:
        self._ledger = ledger

    def routes(self) -> list[Route]:
        return [Route("/v1/usage", self.show_usage, methods=["GET"])]

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
        return Response(msgspec.json.encode(usage_page(query, totals)), media_type="application/json")


def _query(request: Request) -> UsageQuery:
    params = request.query_params
    unknown = sorted(params.keys() - PARAMETERS)
    if unknown:
        raise InvalidRequest(
            f"{unknown[0][:40]!r} is no parameter of usage.",
            param=unknown[0][:40],
            hint=f"There are: {', '.join(sorted(PARAMETERS))}.",
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
