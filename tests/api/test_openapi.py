"""Our own OpenAPI document covers every route, and nothing that fits it, or does not, makes the server fail."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from starlette.routing import Route

from penstock.api.app import create_app
from penstock.api.http.routes import PATH, Operation, openapi_document
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.gateway.batches.runner import StoredWork
from penstock.gateway.blobs.blobs import FileFolder
from penstock.gateway.gateway import Gateway
from penstock.gateway.store.database import Database
from penstock.gateway.tenants.authenticator import Tenants
from tests.gateway.fake_engine import FakeEngine, script_text
from tests.servers import listening_in_thread


def make_app(database: Database, folder: Path) -> Any:
    return create_app(
        Gateway(FakeEngine(script_text("fine")), GatewayConfig()),
        ServerConfig(max_body_bytes=1 << 20),
        tenants=Tenants(database, static_key=None, oidc=None, is_open=True),
        work=StoredWork(database, FileFolder(folder / "files")),
    )


with (
    tempfile.TemporaryDirectory() as _folder
):  # nothing is written: the application is only asked for its routes
    _app = make_app(Database("sqlite://"), Path(_folder))
ROUTES = _app.routes
DOCUMENT = openapi_document(ROUTES)
schema = schemathesis.openapi.from_dict(DOCUMENT)
schema.config.phases.coverage.enabled = False


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("openapi")
    database = Database("sqlite://")
    with listening_in_thread(make_app(database, folder)) as port:
        yield f"http://127.0.0.1:{port}"
    database.close()


@pytest.mark.slow
@schema.parametrize()
@settings(
    max_examples=settings.default.max_examples // 30,  # of each of a hundred operations
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
def test_nothing_makes_the_server_fail(case: schemathesis.Case, url: str) -> None:
    response = case.call(base_url=url)
    case.validate_response(response, checks=[not_a_server_error])


def test_every_route_is_described() -> None:
    plain = [route.path for route in ROUTES if isinstance(route, Route) and not isinstance(route, Operation)]
    assert plain == [PATH]


def test_the_document_is_served(url: str) -> None:
    assert httpx.get(f"{url}{PATH}").json()["paths"].keys() == DOCUMENT["paths"].keys()


def test_what_it_says_about_chat() -> None:
    chat = DOCUMENT["paths"]["/v1/chat/completions"]["post"]
    reference = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    shape = DOCUMENT["components"]["schemas"][reference.rpartition("/")[2]]
    assert {"messages", "tools", "response_format", "service_tier"} <= shape["properties"].keys()
    assert shape["required"] == ["messages"]
    assert "text/event-stream" in chat["responses"]["200"]["content"]
    model = DOCUMENT["paths"]["/v1/models/{name}"]["get"]
    assert model["parameters"][0]["name"] == "name"
