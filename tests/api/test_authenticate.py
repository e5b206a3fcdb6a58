"""Who gets in, with which header, to which paths; and in what shape the others are told."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anthropic
import openai
import pytest
import pytest_asyncio
import websockets.asyncio.client
import websockets.exceptions
from starlette.types import Receive, Send
from starlette.types import Scope as Connection
from starlette.websockets import WebSocket

from penstock.api.admin.fleet import UsageEndpoints
from penstock.api.admin.settings import SettingsEndpoints
from penstock.api.app import create_app
from penstock.api.console import HistoryEndpoints, SimulationEndpoints
from penstock.api.http.authenticate import OPEN_PATHS, Authenticate, scope_of
from penstock.api.http.context import principal_of
from penstock.core.gateway_config import ServerConfig
from penstock.core.identity import Scope
from penstock.gateway.batches.runner import StoredWork
from penstock.gateway.blobs.blobs import FileFolder
from penstock.gateway.history.history import History
from penstock.gateway.history.requests import RecentRequests
from penstock.gateway.settings.live import LiveSettings, SharedSettings
from penstock.gateway.settings.store import SettingsStore
from penstock.gateway.simulations import SimulationChoices, Simulations
from penstock.gateway.tenants.authenticator import Authenticator
from penstock.gateway.tenants.records import new_secret
from tests.api.conftest import Serve
from tests.api.tenant_server import ACTOR, TenantServer
from tests.gateway.fake_engine import FakeEngine, script_text
from tests.servers import listening_in_thread


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[TenantServer]:
    server = TenantServer(tmp_path, FakeEngine(script_text("fine")))
    yield server
    await server.close()


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
MESSAGE = {"model": "bytes", "max_tokens": 8, **CHAT}


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "X-Api-Key"])
async def test_a_key_is_taken_from_either_header(server: TenantServer, header: str) -> None:
    issued = await server.make_key()
    value = f"Bearer {issued.secret}" if header == "authorization" else issued.secret
    async with server.client() as client:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers={header: value})
        assert answer.status_code == 200
    (request,) = server.engine.added
    assert request.tenant == "default"


async def test_the_request_runs_in_the_workspace_of_its_key(server: TenantServer) -> None:
    workspace = await server.tenants.directory.create_workspace(ACTOR, "W")
    issued = await server.make_key(workspace_id=workspace.id)
    async with server.client(issued.secret) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert [request.tenant for request in server.engine.added] == [workspace.id]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Basic dXNlcjpwYXNz"},
        {"authorization": f"Bearer {new_secret().secret}"},
        {"x-api-key": ""},
        {"x-api-key": "wrong"},
        {"x-api-key": "\xff\xfe"},
        {"cookie": "key=wrong"},
    ],
)
async def test_without_a_good_key_nothing_is_done(server: TenantServer, headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    async with server.client() as client:
        for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/admin/keys")):
            answer = await client.request(method, path, headers=raw, json=CHAT)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "Authorization: Bearer KEY" in answer.json()["error"]["message"]
    assert server.engine.added == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("names", [("authorization", "x-api-key"), ("x-api-key", "api-key")])
async def test_two_different_keys_are_refused(
    server: TenantServer, names: tuple[str, str], path: str
) -> None:
    keys = [(await server.make_key()).secret for _ in range(2)]
    async with server.client() as client:
        for pair, status in ((keys, 401), (keys[::-1], 401), ([keys[0]] * 2, 200), (["", keys[0]], 200)):
            values = [
                f"Bearer {key}" if name == "authorization" else key
                for name, key in zip(names, pair, strict=True)
            ]
            answer = await client.post(path, json=MESSAGE, headers=dict(zip(names, values, strict=True)))
            assert answer.status_code == status, pair
            if status == 401:
                assert "two different keys" in answer.json()["error"]["message"]
                assert not any(key in answer.text for key in keys)
        basic = {"authorization": "Basic dXNlcjpwYXNz", "x-api-key": keys[0]}  # of a proxy in between
        assert (await client.post(path, json=MESSAGE, headers=basic)).status_code == 200


async def test_an_open_server_takes_any_two_words_for_keys(tmp_path: Path) -> None:
    server = TenantServer(tmp_path, FakeEngine(script_text("fine")), is_open=True)
    headers = {"authorization": "Bearer none", "x-api-key": "unused"}
    async with server.client() as client:
        assert (await client.post("/v1/messages", json=MESSAGE, headers=headers)).status_code == 200
    await server.close()


async def test_a_key_in_the_url_is_not_accepted(server: TenantServer) -> None:
    issued = await server.make_key()
    async with server.client() as client:
        for name in ("api_key", "key", "token", "access_token", "authorization", "x-api-key"):
            answer = await client.post("/v1/chat/completions", params={name: issued.secret}, json=CHAT)
            assert answer.status_code == 401
            assert issued.secret not in answer.text


async def test_an_anthropic_route_refuses_in_anthropics_shape(server: TenantServer) -> None:
    metrics_only = await server.make_key(Scope.METRICS)
    async with server.client() as client:
        missing = await client.post("/v1/messages", json=MESSAGE)
        wrong = await client.post("/v1/messages", json=MESSAGE, headers={"x-api-key": metrics_only.secret})
    assert (missing.status_code, missing.json()["type"]) == (401, "error")
    assert missing.json()["error"]["type"] == "authentication_error"
    assert missing.json()["request_id"] == missing.headers["request-id"]
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (403, "permission_error")


@pytest.mark.parametrize(
    ("path", "needed"),
    [
        ("/v1/chat/completions", Scope.INFERENCE),
        ("/v1/messages", Scope.INFERENCE),
        ("/tokenize", Scope.INFERENCE),
        ("/nowhere", Scope.INFERENCE),
        ("/v1/usagecounter", Scope.INFERENCE),
        ("/v1/usage", Scope.USAGE),
        ("/v1/usage/daily", Scope.USAGE),
        ("/metrics", Scope.METRICS),
        ("/admin", Scope.ADMIN),
        ("/admin/keys/key_1", Scope.ADMIN),
    ],
)
def test_each_path_needs_one_scope(path: str, needed: Scope) -> None:
    assert scope_of(path) is needed


@pytest.mark.parametrize("scope", list(Scope))
async def test_a_key_opens_what_its_scope_covers_and_no_more(server: TenantServer, scope: Scope) -> None:
    issued = await server.make_key(scope)
    paths = {Scope.INFERENCE: "/v1/models", Scope.METRICS: "/metrics", Scope.ADMIN: "/admin/keys"}
    async with server.client(issued.secret) as client:
        for needed, path in paths.items():
            answer = await client.get(path)
            if scope in (needed, Scope.ADMIN):
                assert answer.status_code == 200, path
            else:
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
                assert f"'{needed}'" in answer.json()["error"]["message"]


async def test_refusals_are_counted(server: TenantServer) -> None:
    issued = await server.make_key(Scope.METRICS)
    async with server.client() as stranger, server.client(issued.secret) as client:
        for _ in range(3):
            await stranger.get("/v1/models")
        await client.get("/v1/models")
        text = (await client.get("/metrics")).text
    assert 'penstock_authentication_refusals_total{code="invalid_api_key"} 3.0' in text
    assert 'penstock_authentication_refusals_total{code="permission_denied"} 1.0' in text
    assert "penstock_remembered_keys 1.0" in text


async def test_what_load_balancers_see_needs_no_key(server: TenantServer) -> None:
    async with server.client() as client:
        for path in ("/", "/health", "/ready", "/version", "/api/version"):
            assert (await client.get(path)).status_code == 200


async def test_a_model_that_the_key_may_not_use_is_refused(server: TenantServer) -> None:
    issued = await server.make_key(allowed_models=("another",))
    async with server.client(issued.secret) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
    assert server.engine.added == []


async def test_an_open_server_needs_no_key_but_refuses_a_bad_one(tmp_path: Path) -> None:
    server = TenantServer(tmp_path / "data", FakeEngine(script_text("fine")), is_open=True)
    async with server.client() as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert (await client.get("/v1/models", headers={"authorization": "Bearer none"})).status_code == 200
        stale = {"authorization": f"Bearer {new_secret().secret}"}
        assert (await client.get("/v1/models", headers=stale)).status_code == 401
    await server.close()
    assert not (tmp_path / "data").exists(), "an open server that keeps nothing writes no file"


async def test_secrets_are_neither_logged_nor_repeated(
    server: TenantServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secrets = [(await server.make_key()).secret, new_secret().secret, "plain-wrong-secret"]
    for secret in secrets:
        async with server.client(secret) as client:
            for path in ("/v1/models", "/admin/keys", "/metrics", "/v1/messages", "/nowhere"):
                answer = await client.get(path)
                assert secret not in answer.text
                assert secret not in str(answer.headers)
        async with server.client((await server.make_key(Scope.METRICS)).secret) as client:
            assert secret not in (await client.get("/metrics")).text
    assert not any(secret in caplog.text for secret in secrets)


def test_the_openai_sdk_sees_the_errors_it_knows(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("fine")), server=ServerConfig(api_key="right"))
    with pytest.raises(openai.AuthenticationError) as caught:
        served.sdk("wrong").models.list()
    assert caught.value.code == "invalid_api_key"
    assert served.sdk("right").models.list().data[0].id == "bytes"


def test_the_anthropic_sdk_sees_the_errors_it_knows(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("fine")), server=ServerConfig(api_key="right"))

    def ask(api_key: str) -> anthropic.types.Message:
        sdk = anthropic.Anthropic(base_url=served.url, api_key=api_key, max_retries=0)
        return sdk.messages.create(model="bytes", max_tokens=8, messages=[{"role": "user", "content": "hi"}])

    with pytest.raises(anthropic.AuthenticationError) as caught:
        ask("wrong")
    assert caught.value.request_id
    assert ask("right").content


class EchoSocket:
    """A WebSocket that says who is calling."""

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        socket = WebSocket(scope, receive, send)
        await socket.accept()
        await socket.send_text(principal_of(socket).key_id)
        await socket.close()


@pytest.fixture
def socket_url() -> Iterator[str]:
    app = Authenticate(EchoSocket(), Authenticator(static_key="right"))
    with listening_in_thread(app, ws="auto", lifespan="off") as port:
        yield f"ws://127.0.0.1:{port}/v1/stream"


def test_a_websocket_is_asked_for_its_key_before_it_opens(socket_url: str) -> None:
    async def call(headers: dict[str, str]) -> str:
        async with websockets.asyncio.client.connect(socket_url, additional_headers=headers) as socket:
            return str(await socket.recv())

    assert asyncio.run(call({"Authorization": "Bearer right"})) == "static"
    assert asyncio.run(call({"x-api-key": "right"})) == "static"
    for headers in ({}, {"x-api-key": "wrong"}):
        with pytest.raises(websockets.exceptions.InvalidStatus) as caught:
            asyncio.run(call(headers))
        assert caught.value.response.status_code == 401
        assert b"invalid_api_key" in caught.value.response.body


async def test_a_websocket_server_without_denial_answers_closes_instead() -> None:
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    app = Authenticate(EchoSocket(), Authenticator(static_key="right"))
    scope = {"type": "websocket", "path": "/v1/stream", "headers": []}
    await app(scope, receive, send)  # type: ignore[arg-type]
    assert [(message["type"], message["code"]) for message in sent] == [("websocket.close", 1008)]


NEEDED = {
    Scope.ADMIN: {
        *(f"/admin/{kind}" for kind in ("organizations", "workspaces", "keys", "audit")),
        *(f"/admin/{kind}/{{id}}" for kind in ("organizations", "workspaces", "keys")),
        *("/admin/adapters", "/admin/adapters/{name:path}"),
        *("/admin/settings", "/admin/settings/reload", "/admin/settings/revert"),
        *("/admin/settings/versions", "/admin/settings/versions/{version}"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/admin/console", "/admin/history", "/admin/requests", "/admin/simulations"),
    },
    Scope.METRICS: {"/metrics"},
    Scope.USAGE: {"/v1/usage"},
    None: {*OPEN_PATHS, "/console/{name}", "/console/sign-in"},
    Scope.INFERENCE: {
        *("/v1/messages", "/v1/messages/count_tokens", "/v1/models", "/v1/models/{name:path}"),
        *(
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/embeddings",
            *(
                "/v1/rerank",
                "/rerank",
                *("/v2/embed", "/v2/rerank"),
                "/v1/score",
                "/score",
                "/v1/classify",
                "/classify",
                "/pooling",
            ),
            "/v1/stream",
            "/tokenize",
            "/detokenize",
            "/tokenizer_info",
        ),
        *("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/{response_id}"),
        *("/v1/responses/{response_id}/cancel", "/v1/responses/{response_id}/input_items"),
        *("/v1/responses/compact", "/v1/moderations"),
        *("/v1/chat/completions/{completion_id}", "/v1/chat/completions/{completion_id}/messages"),
        *("/v1/conversations", "/v1/conversations/{conversation_id}"),
        *("/v1/conversations/{conversation_id}/items", "/v1/conversations/{conversation_id}/items/{item_id}"),
        *("/v1/uploads", "/v1/uploads/{upload_id}/parts", "/v1/uploads/{upload_id}/complete"),
        "/v1/uploads/{upload_id}/cancel",
        *("/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"),
        *("/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"),
        *("/v1/messages/batches", "/v1/messages/batches/{batch_id}"),
        *("/v1/messages/batches/{batch_id}/cancel", "/v1/messages/batches/{batch_id}/results"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
        *("/api/tags", "/api/ps", "/api/show", "/api/pull"),
        "/openapi.json",
    },
}


async def test_every_route_asks_for_its_scope(server: TenantServer, tmp_path: Path) -> None:
    """A new route must be listed above: whoever adds one decides who may use it."""
    more = [
        *UsageEndpoints(None).routes(),
        *SettingsEndpoints(
            SharedSettings(SettingsStore(server.database), LiveSettings(), None), server.database
        ).routes(),
        *HistoryEndpoints(History(server.gateway.metrics, server.engine), RecentRequests()).routes(),
        *SimulationEndpoints(Simulations(SimulationChoices(models=(), hardware=(), formats=()))).routes(),
    ]
    work = StoredWork(server.database, FileFolder(tmp_path / "files"))
    server.app = create_app(
        server.gateway, ServerConfig(), tenants=server.tenants, work=work, more_routes=more
    )
    routes = [(route.path, getattr(route, "methods", None)) for route in server.app.routes]  # type: ignore[attr-defined]
    assert {path for path, _ in routes} == set().union(*NEEDED.values())
    keys = {scope: (await server.make_key(scope)).secret for scope in Scope}
    for needed, paths in NEEDED.items():
        for path, methods in routes:
            if path not in paths or methods is None:  # WebSockets are tested below
                continue
            for method in methods:
                plain = re.sub(r"{.*?}", "x", path)
                await check_route(server, keys, method, plain, needed)
                if plain.startswith("/v1/"):  # as Azure's clients and Groq's write it
                    await check_route(server, keys, method, f"/openai{plain}", needed)


async def check_route(
    server: TenantServer, keys: dict[Scope, str], method: str, path: str, needed: Scope | None
) -> None:
    async with server.client() as stranger:
        status = (await stranger.request(method, path)).status_code
        assert (status == 401) is (needed is not None), (method, path, status)
    for scope, secret in keys.items():
        if needed in (None, scope) or scope is Scope.ADMIN:
            continue
        async with server.client(secret) as client:
            assert (await client.request(method, path)).status_code == 403, (method, path, scope)
