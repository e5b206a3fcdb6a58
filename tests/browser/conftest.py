"""Pages in a real Chromium, driven by Playwright. `make test-browser` runs them; `make test` leaves them out."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.core.gateway_config import ServerConfig
from tests.api.bounded_server import BoundedServed, bounded_server
from tests.browser.demo import DemoEngine

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PICTURES = Path(__file__).parents[2] / "docs/console"
MAX_PICTURE_BYTES = 150_000
WIDE = {"width": 1360, "height": 820}
PHONE = {"width": 390, "height": 780}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--browser", action="store_true", help="Run the tests that need Chromium.")
    parser.addoption("--write-pictures", action="store_true", help="Write screenshots to docs/console.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--browser", False):
        return
    left_out = [item for item in items if item.get_closest_marker("browser")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A running browser."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright, which make test-browser installs"
    )
    path = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if path is None:
        pytest.skip("needs Chromium: apt install chromium")
    with playwright.sync_playwright() as driver:
        # Containers give no namespaces to the browser's own sandbox.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


OpenPage = Callable[..., Any]


@pytest.fixture
def open_page(chromium: Any) -> Iterator[OpenPage]:
    """Opens an address in a browser without a past. A script that fails, or that the policy stops, fails the test."""
    complaints: list[str] = []
    contexts = []

    def complain(message: Any) -> None:
        # The browser reports every answer that is no success; tests ask for some.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            complaints.append(message.text)

    def open_address(address: str, **options: Any) -> Any:
        context = chromium.new_context(**({"viewport": WIDE} | options))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", complain)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        return page

    yield open_address
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def take_picture(request: pytest.FixtureRequest) -> Callable[[Any, str], None]:
    """Takes a screenshot, and keeps it in docs/console with `--write-pictures`."""

    def take(page: Any, name: str) -> None:
        page.wait_for_timeout(250)  # colours fade in
        picture = page.screenshot(type="png")
        assert len(picture) < MAX_PICTURE_BYTES, f"{name} has {len(picture)} bytes"
        if request.config.getoption("--write-pictures"):
            PICTURES.mkdir(parents=True, exist_ok=True)
            (PICTURES / f"{name}.png").write_bytes(picture)

    return take


Serve = Callable[..., tuple[str, BoundedServed]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server with the demo engine, and returns its address and the server."""
    with ExitStack() as stack:

        def start(api_key: str | None = None, **options: Any) -> tuple[str, BoundedServed]:
            config = ServerConfig(api_key=api_key)
            served = stack.enter_context(bounded_server(DemoEngine(), config, **options))
            return f"http://127.0.0.1:{served.port}", served

        yield start
