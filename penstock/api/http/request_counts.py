"""Counts HTTP requests by route and status, for `/metrics`.

A path counts as the route that it matches, and paths that match none count together: the number of counters does not
depend on what clients ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from penstock.gateway.metrics.table import metric_by

OTHER = "other"


class RequestCounts(Collector):
    def __init__(self) -> None:
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

    def _template(self, scope: Scope) -> str:
        for route in self._templates:
            if route.matches(scope)[0] is not Match.NONE:
                return route.path_format
        return OTHER

    def collect(self) -> Iterator[Metric]:
        yield metric_by(
            "http_requests", {(path, str(status)): count for (path, status), count in self._counts.items()}
        )
