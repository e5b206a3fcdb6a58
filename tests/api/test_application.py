"""The short way to endpoints answers as the long way does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from penstock.api.http.application import Application, RequestIds
from penstock.api.http.errors import on_penstock_error
from penstock.core.errors import ConfigError, InvalidRequest, PenstockError


async def answer(request: Request) -> Response:
    return PlainTextResponse(f"{request.method} {request.url.path} {request.path_params}")


async def refuse(request: Request) -> Response:
    raise InvalidRequest("No.", param="prompt")


async def break_down(request: Request) -> Response:
    raise ZeroDivisionError("a secret")


async def misconfigured(request: Request) -> Response:
    raise ConfigError("The database /secret cannot be written.")


@contextmanager
def client() -> Iterator[TestClient]:
    endpoints = {"answer": answer, "refuse": refuse, "break": break_down}
    routes = [
        Route(f"/{kind}/{name}{end}", endpoint, methods=["POST"])
        for kind, end in (("fixed", ""), ("with", "/{id}"))
        for name, endpoint in endpoints.items()
    ]
    routes.append(Route("/fixed/answer", answer, methods=["GET"]))
    routes += [Route(path, misconfigured, methods=["GET", "POST"]) for path in ("/v1/set", "/admin/set")]
    app = Application(
        routes=routes,
        middleware=[Middleware(RequestIds)],
        exception_handlers={PenstockError: on_penstock_error},
    )
    with TestClient(app) as opened:
        yield opened


def test_fixed_paths_and_paths_with_parameters() -> None:
    with client() as http:
        assert http.post("/fixed/answer").text == "POST /fixed/answer {}"
        assert http.post("/with/answer/7").text == "POST /with/answer/7 {'id': '7'}"
        assert http.get("/fixed/answer").text == "GET /fixed/answer {}"


def test_proxies_keep_no_answers() -> None:
    """They may keep those to GETs, and know only Authorization of the headers with keys."""
    with client() as http:
        assert http.get("/fixed/answer", headers={"x-api-key": "k"}).headers["cache-control"] == "no-store"
        assert "cache-control" not in http.post("/fixed/answer").headers


def test_ids_begin_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rows of the ledger, whose key they are, come in the order of their keys."""
    milliseconds = iter((0x0123456789AB, 0x0123456789AC))
    monkeypatch.setattr("time.time_ns", lambda: next(milliseconds) * 1_000_000)
    with client() as http:
        first, second = (http.post("/fixed/answer").headers["x-request-id"] for _ in range(2))
    assert (len(first), first[:12], second[:12]) == (32, "0123456789ab", "0123456789ac")
    assert first[12:] != second[12:]


def test_a_pattern_is_no_path() -> None:
    with client() as http:
        assert http.post("/with/answer/{id}").text == "POST /with/answer/{id} {'id': '{id}'}"


@pytest.mark.parametrize("path", ["/fixed/refuse", "/with/refuse/7"])
def test_refusals_look_the_same(path: str) -> None:
    with client() as http:
        refused = http.post(path)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"
    assert refused.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/fixed/break", "/with/break/7"])
def test_bugs_look_the_same_and_tell_nothing(path: str) -> None:
    with client() as http:
        broken = http.post(path)
    assert broken.status_code == 500
    assert broken.json()["error"]["type"]
    assert "secret" not in broken.text


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_wrong_settings_are_told_to_operators_alone(method: str, caplog: pytest.LogCaptureFixture) -> None:
    with client() as http:
        told, hidden = http.request(method, "/admin/set"), http.request(method, "/v1/set")
    assert "/secret" in told.text
    assert hidden.status_code == 500
    assert "secret" not in hidden.text
    assert "/secret" in caplog.text


def test_what_is_not_there_and_what_takes_no_post() -> None:
    with client() as http:
        assert http.post("/fixed/nothing").status_code == 404
        assert http.put("/fixed/answer").status_code == 405
