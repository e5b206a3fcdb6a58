"""/v1/models with several names, adapters while the server runs, and who may do what, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.core.identity import Scope
from penstock.core.request import Adapter
from penstock.gateway.models.catalogue import AdapterRegistry, RegisteredAdapter
from penstock.gateway.models.settings import AutoSettings, ModelAccess, ModelSettings
from tests.api.tenant_server import TenantServer
from tests.gateway.fake_engine import FakeEngine, engine_ready, model_card, script_text
from tests.gateway.models.test_catalogue import gateway_with, write_adapter

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
ANTHROPIC = {"anthropic-version": "2023-06-01"}
SETTINGS = ModelSettings(aliases={"gpt-4o": "large"}, auto=AutoSettings(small="small", large="large"))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[TenantServer]:
    """Two models, `small` and `large`, with an adapter, an alias and `auto`."""
    (tmp_path / "db").mkdir()
    _, engine = gateway_with("small", "large")
    engine.script = script_text("yes")
    server = TenantServer(tmp_path / "db", engine)
    server.gateway.catalogue.apply(SETTINGS)
    server.gateway.catalogue.adapters = AdapterRegistry([RegisteredAdapter(Adapter("sql", "/sql", "d"))])
    yield server
    await server.close()


async def ids(client: httpx.AsyncClient, **headers: str) -> list[str]:
    page = (await client.get("/v1/models", headers=headers)).raise_for_status().json()
    return [entry["id"] for entry in page["data"]]


async def test_every_name_is_listed_in_both_shapes(server: TenantServer) -> None:
    secret = (await server.make_key()).secret
    async with server.client(secret) as client:
        assert await ids(client) == ["small", "large", "sql", "gpt-4o", "auto"]
        assert await ids(client, **ANTHROPIC) == ["small", "large", "sql", "gpt-4o", "auto"]
        adapter = (await client.get("/v1/models/sql")).json()
        assert (adapter["id"], adapter["root"], adapter["parent"]) == ("sql", "sql", "small")
        alias = (await client.get("/v1/models/gpt-4o")).json()
        assert (alias["id"], alias["root"], alias["parent"]) == ("gpt-4o", "large", None)
        shown = (await client.get("/v1/models/gpt-4o", headers=ANTHROPIC)).json()
        assert (shown["id"], shown["display_name"], shown["type"]) == ("gpt-4o", "large", "model")


async def test_a_key_sees_and_uses_what_it_may(server: TenantServer) -> None:
    key = await server.make_key(allowed_models=("sql", "gpt-4o"))
    async with server.client(key.secret) as client:
        assert await ids(client) == ["sql", "gpt-4o"]
        assert (await client.get("/v1/models/small")).status_code == 404
        for model, status, answered_by in (
            ("gpt-4o", 200, "large"),
            ("sql", 200, "sql"),
            ("large", 403, None),
            ("small", 403, None),
            ("auto", 403, None),
        ):
            answer = await client.post("/v1/chat/completions", json={**CHAT, "model": model})
            assert (answer.status_code, answer.json().get("model")) == (status, answered_by), model
        counted = await client.post("/tokenize", json={"model": "small", "prompt": "x"})
        assert counted.status_code == 403


async def test_a_workspace_bounds_all_of_its_keys(server: TenantServer) -> None:
    key = await server.make_key()
    access = {key.key.workspace_id: ModelAccess(allowed=("large",), region="eu")}
    server.gateway.catalogue.apply(ModelSettings(workspaces=access))
    async with server.client(key.secret) as client:
        assert await ids(client) == ["large"]
        assert (
            await client.post("/v1/completions", json={"model": "small", "prompt": "x"})
        ).status_code == 403
        await client.post("/v1/completions", json={"model": "large", "prompt": "x"})
        await client.post(
            "/v1/completions", json={"model": "large", "prompt": "x"}, headers={"x-penstock-region": "us"}
        )
        assert [request.region for request in server.engine.added] == ["eu", "us"]
        odd = {"x-penstock-region": "x" * 65}
        refused = await client.post("/v1/completions", json={"model": "large", "prompt": "x"}, headers=odd)
        assert refused.status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "model": "auto"}),
        ("/v1/messages", {**CHAT, "model": "auto"}),
        ("/v1/responses", {"model": "auto", "input": "hi", "max_output_tokens": 8}),
        ("/v1/completions", {"model": "auto", "prompt": "hi", "max_tokens": 8}),
    ],
)
async def test_the_answer_says_which_model_gave_it(
    server: TenantServer, path: str, body: dict[str, Any]
) -> None:
    """The fake engine's tokens all have the log-probability -0.25."""
    auto = AutoSettings(small="small", large="large", min_mean_logprob=-0.1)
    server.gateway.catalogue.apply(ModelSettings(auto=auto))
    secret = (await server.make_key()).secret
    async with server.client(secret) as client:
        answer = (await client.post(path, json=body)).raise_for_status().json()
    assert answer["model"] == "large"
    assert [request.model for request in server.engine.added] == ["small", "large"]
    usage = answer["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 8
    assert "logprobs" not in str(answer.get("choices", "")) or answer["choices"][0]["logprobs"] is None


class TestAdapters:
    async def test_added_used_listed_and_removed(self, server: TenantServer, tmp_path: Path) -> None:
        folder = write_adapter(tmp_path / "legal")
        admin, user = [(await server.make_key(scope)).secret for scope in (Scope.ADMIN, Scope.INFERENCE)]
        async with server.client(admin) as client:
            body = {"lora_name": "legal", "lora_path": folder, "base_model_name": "large"}
            made = (await client.post("/admin/adapters", json=body)).raise_for_status().json()
            assert (made["id"], made["base_model"]) == ("legal", "large")
        async with server.client(user) as client:
            assert "legal" in await ids(client)
            answer = await client.post("/v1/chat/completions", json={**CHAT, "model": "legal"})
            assert answer.json()["model"] == "legal"
            asked = server.engine.added[-1]
            assert asked.adapter is not None
            assert (asked.model, asked.adapter.path, asked.adapter.digest) == (
                "large",
                folder,
                made["digest"],
            )
            for method, path in (("POST", "/admin/adapters"), ("POST", "/v1/load_lora_adapter")):
                assert (await client.request(method, path, json=body)).status_code == 403
        async with server.client(admin) as client:
            listed = (await client.get("/admin/adapters")).json()["data"]
            assert [adapter["id"] for adapter in listed] == ["legal", "sql"]
            assert (await client.delete("/admin/adapters/legal")).json()["deleted"] is True
            assert (await client.delete("/admin/adapters/legal")).status_code == 404
            assert (await client.delete("/admin/adapters/sql")).status_code == 409

    async def test_under_the_names_of_vllm(self, server: TenantServer, tmp_path: Path) -> None:
        folder = write_adapter(tmp_path / "legal")
        admin = (await server.make_key(Scope.ADMIN)).secret
        async with server.client(admin) as client:
            body = {"lora_name": "legal", "lora_path": folder}
            made = await client.post("/v1/load_lora_adapter", json=body)
            assert (made.status_code, "legal" in made.text) == (200, True)
            gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "legal"})
            assert gone.status_code == 200

    @pytest.mark.parametrize(
        ("changes", "status"),
        [
            ({"lora_path": "/nowhere"}, 400),
            ({"lora_path": "\0"}, 400),
            ({"lora_path": "~no-such-user/legal"}, 400),
            ({"lora_name": "small"}, 409),
            ({"lora_name": "sql"}, 409),
            ({"base_model_name": "other"}, 404),
        ],
    )
    async def test_what_is_refused(
        self, server: TenantServer, tmp_path: Path, changes: dict[str, str], status: int
    ) -> None:
        admin = (await server.make_key(Scope.ADMIN)).secret
        body = {"lora_name": "legal", "lora_path": write_adapter(tmp_path / "legal"), **changes}
        async with server.client(admin) as client:
            assert (await client.post("/admin/adapters", json=body)).status_code == status

    async def test_an_engine_that_takes_none(self, tmp_path: Path) -> None:
        (tmp_path / "db").mkdir()
        server = TenantServer(tmp_path / "db", FakeEngine(ready=engine_ready(model_card())))
        admin = (await server.make_key(Scope.ADMIN)).secret
        body = {"lora_name": "legal", "lora_path": write_adapter(tmp_path / "legal")}
        async with server.client(admin) as client:
            assert (await client.post("/admin/adapters", json=body)).status_code == 400
        await server.close()
