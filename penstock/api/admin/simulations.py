"""The simulator for the console: GET and POST /admin/simulations. The middleware has checked the scope `admin`."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from penstock.api.http.answers import Departure, private_json
from penstock.api.http.routes import Operation
from penstock.gateway.simulations import SimulationChoices, SimulationObject, SimulationOrder, Simulations


class SimulationEndpoints:
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
