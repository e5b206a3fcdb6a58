"""Endpoints for the console: /admin/console, /admin/history and /admin/requests for the recent past, and
/admin/simulations.

The middleware has checked that the caller has the scope `admin`.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock import __version__
from penstock.api.http.answers import Departure, private_json
from penstock.api.http.parsing import choice_of, integer_of
from penstock.api.http.routes import Operation
from penstock.core.errors import InvalidRequest
from penstock.gateway.history.history import SPANS, History, HistoryView
from penstock.gateway.history.requests import RecentRequests, RequestView
from penstock.gateway.simulations import SimulationChoices, SimulationObject, SimulationOrder, Simulations

HISTORY_PARAMETERS = ("span", "model", "tier")
REQUEST_PARAMETERS = ("limit", "status", "model")
STATUSES = ("any", "running", "completed", "cancelled", "failed")
MAX_REQUESTS = 500


class ConsoleObject(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about this server that the console's pages show."""

    version: str
    shows_prompts: bool  # whether the operator lets the console show prompts
    object: Literal["console"] = "console"


class RequestList(msgspec.Struct, frozen=True):
    """The last requests, the newest first."""

    data: list[RequestView]
    object: Literal["list"] = "list"


class HistoryEndpoints:
    def __init__(self, history: History, recent: RecentRequests) -> None:
        self._history = history
        self._recent = recent

    def routes(self) -> list[Operation]:
        return [
            Operation("GET /admin/console", self.show_console, ConsoleObject),
            Operation("GET /admin/history", self.show_history, HistoryView, query=HISTORY_PARAMETERS),
            Operation("GET /admin/requests", self.list_requests, RequestList, query=REQUEST_PARAMETERS),
        ]

    async def show_console(self, request: Request) -> Response:
        return private_json(ConsoleObject(version=__version__, shows_prompts=self._recent.keeps_prompts))

    async def show_history(self, request: Request) -> Response:
        check_parameters(request, HISTORY_PARAMETERS)
        span = choice_of(request, "span", default="live", choices=tuple(SPANS))
        model, tier = (request.query_params.get(name) for name in ("model", "tier"))
        return private_json(await self._history.view(span, model, tier))

    async def list_requests(self, request: Request) -> Response:
        check_parameters(request, REQUEST_PARAMETERS)
        limit = integer_of(request, "limit", default=100, low=1, high=MAX_REQUESTS)
        status = choice_of(request, "status", default="any", choices=STATUSES)
        model = request.query_params.get("model")
        found = await self._recent.latest(limit, status=None if status == "any" else status, model=model)
        return private_json(RequestList(found))


def check_parameters(request: Request, known: tuple[str, ...]) -> None:
    """Raises InvalidRequest for a parameter that does not exist: a misspelt filter must not show everything."""
    unknown = sorted(request.query_params.keys() - set(known))
    if unknown:
        raise InvalidRequest(
            f"{unknown[0][:40]!r} is no parameter of this path.",
            param=unknown[0][:40],
            hint=f"There are: {', '.join(known)}.",
        )


class SimulationEndpoints:
    """The simulator: GET and POST /admin/simulations."""

    def __init__(self, simulations: Simulations) -> None:
        self._simulations = simulations

    def routes(self) -> list[Operation]:
        return [
            Operation("GET /admin/simulations", self.show_choices, SimulationChoices),
            Operation("POST /admin/simulations", self.run, SimulationObject, reads=SimulationOrder),
        ]

    async def show_choices(self, request: Request) -> Response:
        return private_json(self._simulations.choices)

    async def run(self, request: Request, order: SimulationOrder) -> Response:
        departure = Departure(request)  # a reader that goes ends the simulation
        try:
            return private_json(await self._simulations.run(order))
        except asyncio.CancelledError:
            departure.check()
            raise
        finally:
            departure.stop()
