"""Counts HTTP requests by route and status, and refusals by status and reason, for `/metrics` and the console.

A path counts as the route that it matches, and paths that match none count together: the number of counters does not
depend on what clients ask for. A refusal is an answer with a status of 4xx, 503 or 529. A request that was admitted
and then failed counts elsewhere, and so does a client that left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from penstock.api.http.context import refusal_of
from penstock.api.http.errors import ANTHROPIC_OVERLOADED, CLIENT_CLOSED_REQUEST
from penstock.gateway.metrics.table import metric_by

OTHER = "other"
_OVERLOADED = frozenset({503, ANTHROPIC_OVERLOADED})


class RequestCounts(Collector):
    def __init__(self, refusals: Counter[tuple[str, str]] | None = None) -> None:
        self._refusals = Counter() if refusals is None else refusals
        self._counts: Counter[tuple[str, int]] = Counter()
        self._fixed: frozenset[str] = frozenset()
        self._templates: tuple[Route, ...] = ()

    def set_routes(self, routes: Iterable[BaseRoute]) -> None:
        http = [route for route in routes if isinstance(route, Route)]
        self._fixed = frozenset(route.path for route in http if "{" not in route.path)
        self._templates = tuple(route for route in http if "{" in route.path)

    def count(self, scope: Scope, status: int) -> None:
        path: str = scope["path"]
        self._counts[path if path in self._fixed else self._template(scope), status] += 1
        if status >= 400 and (status < CLIENT_CLOSED_REQUEST or status in _OVERLOADED):
            self._refusals[str(status), refusal_of(scope) or OTHER] += 1

    def _template(self, scope: Scope) -> str:
        for route in self._templates:
            if route.matches(scope)[0] is not Match.NONE:
                return route.path_format
        return OTHER

    def collect(self) -> Iterator[Metric]:
        yield metric_by(
            "http_requests", {(path, str(status)): count for (path, status), count in self._counts.items()}
        )
