"""The simulator's page in Chromium, with real simulations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from starlette.routing import Route

from penstock.api.console import HistoryEndpoints, SimulationEndpoints
from penstock.gateway.gateway import Gateway
from penstock.gateway.history.history import History
from penstock.gateway.history.requests import RecentRequests
from penstock.gateway.simulations import SimulationChoices, Simulations
from penstock.planner.hardware import HARDWARE, WEIGHT_FORMATS
from penstock.planner.shapes import KNOWN_MODELS
from tests.browser.conftest import OpenPage, Serve

pytestmark = [pytest.mark.browser, pytest.mark.e2e]
CHOICES = SimulationChoices(
    models=tuple(KNOWN_MODELS), hardware=tuple(HARDWARE), formats=tuple(WEIGHT_FORMATS)
)


def routes(gateway: Gateway) -> list[Route]:
    return [
        *HistoryEndpoints(History(gateway.metrics, gateway.engine), RecentRequests()).routes(),
        *SimulationEndpoints(Simulations(CHOICES)).routes(),
    ]


def test_fleets_are_compared(
    open_page: OpenPage, serve: Serve, take_picture: Callable[[Any, str], None]
) -> None:
    url, _ = serve(more_routes=routes)
    page = open_page(f"{url}/console#/simulator")
    page.get_by_label("Requests per second").fill("60")
    page.get_by_label("Requests", exact=True).fill("300")
    page.get_by_label("Shared prefix").fill("500")
    page.click("text=Run")
    page.wait_for_selector(".simulation-results table", timeout=120_000)
    assert page.locator(".simulation-results tbody tr").count() == 3
    assert page.locator("svg.chart rect").count() == 18
    take_picture(page, "simulator")


def test_wrong_orders_are_sentences(open_page: OpenPage, serve: Serve) -> None:
    url, _ = serve(more_routes=routes)
    page = open_page(f"{url}/console#/simulator")
    page.get_by_label("Replicas to compare").fill("many")
    page.click("text=Run")
    page.wait_for_selector("text=must be whole numbers")
    page.get_by_label("Replicas to compare").fill("1")
    page.get_by_label("Prompt length").fill("long")
    page.click("text=Run")
    page.wait_for_selector("text=traffic.input long is neither", timeout=60_000)
