"""The simulator for the console: GET and POST /admin/simulations. The middleware has checked the scope `admin`."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.api.http.answers import Departure, private_json
from penstock.api.http.parsing import BodyDecoder
from penstock.gateway.simulations import SimulationOrder, Simulations


class SimulationEndpoints:
    def __init__(self, simulations: Simulations) -> None:
        self._simulations = simulations
        self._decoder = BodyDecoder(SimulationOrder)

    def routes(self) -> list[Route]:
        return [
            Route("/admin/simulations", self.show_choices, methods=["GET"]),
            Route("/admin/simulations", self.run, methods=["POST"]),
        ]

    async def show_choices(self, request: Request) -> Response:
        return private_json(self._simulations.choices)

    async def run(self, request: Request) -> Response:
        order = await self._decoder.read(request)
        departure = Departure(request)  # a reader that goes ends the simulation
        try:
            return private_json(await self._simulations.run(order))
        except asyncio.CancelledError:
            departure.check()
            raise
        finally:
            departure.stop()
