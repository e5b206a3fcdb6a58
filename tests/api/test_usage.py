"""/v1/usage and /admin/settings/reload through the application, with a real ledger, real keys and prices."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.api.app import create_app
from penstock.core.config import ServeConfig
from penstock.core.gateway_config import GatewayConfig, LedgerConfig, ServerConfig, StoreConfig
from penstock.core.identity import Scope
from penstock.gateway.store.database import Database, sqlite_url
from penstock.gateway.tenants.authenticator import Tenants
from penstock.gateway.tenants.directory import Actor
from penstock.gateway.tenants.records import NewKey
from penstock.serve.gateway_state import GatewayState, open_gateway_state
from tests.gateway.fake_engine import FakeEngine, script_text

SETTINGS = """
[prices.models.bytes]
input = 1
output = 2

[limits.key]
dollars_per_day = 0.001
"""


@dataclass
class Office:
    """A server's application with its state, and a client for each kind of key."""

    transport: httpx.ASGITransport
    state: GatewayState
    engine: FakeEngine
    settings_file: Path
    secrets: dict[str, str]
    key_ids: dict[str, str]

    def client(self, name: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.secrets[name]}"}
        return httpx.AsyncClient(transport=self.transport, base_url="http://test", headers=headers)

    def sdk(self, name: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            api_key=self.secrets[name],
            base_url="http://test/v1",
            max_retries=0,
            http_client=httpx.AsyncClient(transport=self.transport),
        )

    async def ask(self, name: str, prompt: str = "hi", **headers: str) -> httpx.Response:
        async with self.client(name) as client:
            body = {"prompt": prompt, "max_tokens": 100}
            return await client.post("/v1/completions", json=body, headers=headers)

    async def usage(self, name: str, **params: Any) -> Any:
        async with self.client(name) as client:
            response = await client.get("/v1/usage", params=params)
        return response.json() if response.status_code == 200 else response


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    settings_file = tmp_path / "settings.toml"
    settings_file.write_text(SETTINGS)
    config = ServeConfig(
        gateway=GatewayConfig(settings=str(settings_file)),
        store=StoreConfig(data_dir=str(tmp_path)),
        ledger=LedgerConfig(usage_ledger=True),
    )
    database = Database(sqlite_url(tmp_path))
    tenants = Tenants(database)
    actor = Actor("test")
    other = await tenants.directory.create_workspace(actor, "Other")
    secrets, key_ids = {}, {}
    for name, workspace, scopes in (
        ("asker", "default", (Scope.INFERENCE, Scope.USAGE)),
        ("other", other.id, (Scope.INFERENCE, Scope.USAGE)),
        ("inference", "default", (Scope.INFERENCE,)),
        ("admin", "default", (Scope.ADMIN,)),
    ):
        issued = await tenants.directory.create_key(
            actor, NewKey(name=name, workspace_id=workspace, scopes=scopes)
        )
        secrets[name], key_ids[name] = issued.secret, issued.key.id
    engine = FakeEngine(script_text("abc"))
    async with open_gateway_state(config, database, is_open=False) as state:
        limiter = state.build_limiter(config.gateway)
        await limiter.start()
        gateway = state.build_gateway(engine, config.gateway, limiter)
        app = create_app(gateway, ServerConfig(), tenants=tenants, more_routes=state.routes(database))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        yield Office(transport, state, engine, settings_file, secrets, key_ids)
        await limiter.close()
        await tenants.close()
    database.close()


class TestUsage:
    async def test_a_key_sees_its_own_workspace(self, office: Office) -> None:
        await office.ask("asker")
        await office.ask("other")
        (entry,) = (await office.usage("asker", group_by="workspace,key,model,endpoint"))["data"]
        assert entry["workspace"] == "default"
        assert entry["key"] == office.key_ids["asker"]
        assert (entry["model"], entry["endpoint"]) == ("bytes", "completions")
        assert entry["requests"] == {
            "total": 1,
            "completed": 1,
            "cancelled": 0,
            "failed": 0,
            "interrupted": 0,
            "cached": 0,
        }
        assert (entry["prompt_tokens"], entry["completion_tokens"]) == (2, 4)
        assert entry["cost_usd"] == "0.00001"  # 2 × $1 + 4 × $2 per million
        assert (await office.usage("asker", workspace="ws_of_somebody_else"))["data"] == []

    async def test_an_administrator_sees_everyone(self, office: Office) -> None:
        await office.ask("asker")
        await office.ask("other")
        page = await office.usage("admin", group_by="workspace")
        assert len(page["data"]) == 2
        other = next(entry["workspace"] for entry in page["data"] if entry["workspace"] != "default")
        (entry,) = (await office.usage("admin", workspace=other, group_by=""))["data"]
        assert entry["requests"]["total"] == 1

    async def test_a_key_without_the_scope_sees_nothing(self, office: Office) -> None:
        response = await office.usage("inference")
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "permission_denied"

    async def test_pages(self, office: Office) -> None:
        for name in ("asker", "other", "inference"):
            await office.ask(name)
        found, page = [], None
        while True:
            params = {"group_by": "day,key", "limit": 1} | ({"page": page} if page else {})
            answer = await office.usage("admin", **params)
            assert len(answer["data"]) == 1
            found += [entry["key"] for entry in answer["data"]]
            page = answer["next_page"]
            assert answer["has_more"] == (page is not None)
            if page is None:
                break
        assert found == sorted(office.key_ids[name] for name in ("asker", "other", "inference"))

    async def test_time_ranges(self, office: Office) -> None:
        await office.ask("asker")
        now = time.time()
        today = datetime.fromtimestamp(now, UTC).date().isoformat()
        for params, count in (
            ({"start": today}, 1),
            ({"end": today}, 0),
            ({"start": int(now) + 3600}, 0),
            ({"start": int(now) - 3600, "end": int(now) + 3600}, 1),
            ({"start": datetime.fromtimestamp(now - 60, UTC).isoformat()}, 1),
        ):
            (entry,) = (await office.usage("asker", group_by="", **params))["data"]
            assert entry["requests"]["total"] == count, params
        (entry,) = (await office.usage("asker", group_by="day"))["data"]
        assert entry["day"] == today

    @pytest.mark.parametrize(
        ("params", "param"),
        [
            ({"group_by": "modle"}, "group_by"),
            ({"start": "yesterday"}, "start"),
            ({"end": "9" * 30}, "end"),
            ({"limit": "0"}, "limit"),
            ({"page": "!!"}, "page"),
            ({"page": "WzFd", "group_by": "key"}, "page"),
            ({"page": "Wzk5OTk5OTk5OTk5OTk5OTk5OTk5OV0="}, "page"),  # [99999999999999999999]
            ({"page": "Wzk5OTk5OTk5OTk5OTk5XQ=="}, "page"),
            ({"model": "a\0"}, "model"),
            ({"strat": "2026-01-01"}, "strat"),
        ],
    )
    async def test_bad_questions(self, office: Office, params: dict[str, str], param: str) -> None:
        response = await office.usage("asker", **params)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


class TestBudget:
    async def test_what_is_spent_counts_against_the_budget(self, office: Office) -> None:
        office.engine.script = script_text("a" * 99)  # $0.000202 each, so the fifth goes over $0.001
        statuses = [(await office.ask("asker", prompt=f"p{number}")).status_code for number in range(8)]
        assert statuses[0] == 200
        assert statuses[-1] == 429
        refused = await office.ask("asker")
        assert refused.json()["error"]["code"] == "insufficient_quota"
        assert (await office.ask("other")).status_code == 200

    async def test_more_budget_by_reloading(self, office: Office) -> None:
        office.engine.script = script_text("a" * 99)
        while (await office.ask("asker")).status_code == 200:
            pass
        office.settings_file.write_text(SETTINGS.replace("0.001", "1000"))
        async with office.client("admin") as client:
            reply = await client.post("/admin/settings/reload")
        assert reply.json()["changes"] == ["limits.key.dollars_per_day: 0.001 → 1000.0"]
        assert (await office.ask("asker")).status_code == 200


class TestReload:
    async def test_a_bad_file_is_refused_and_the_old_prices_stay(self, office: Office) -> None:
        office.settings_file.write_text(SETTINGS.replace("input = 1", "inputs = 1"))
        async with office.client("admin") as client:
            response = await client.post("/admin/settings/reload")
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert "settings.toml, line 3: there is no setting 'prices.models.bytes.inputs'." in message
        assert "Did you mean 'input'?" in message
        await office.ask("asker")
        (entry,) = (await office.usage("asker", group_by=""))["data"]
        assert entry["cost_usd"] == "0.00001"

    async def test_only_for_administrators(self, office: Office) -> None:
        async with office.client("asker") as client:
            assert (await client.post("/admin/settings/reload")).status_code == 403

    async def test_new_prices_hold_from_then_on(self, office: Office) -> None:
        office.settings_file.write_text(SETTINGS.replace("output = 2", "output = 0"))
        async with office.client("admin") as client:
            assert (await client.post("/admin/settings/reload")).status_code == 200
            metrics = (await client.get("/metrics")).text
        assert 'penstock_settings_reloads_total{result="applied"} 1.0' in metrics
        await office.ask("asker")
        (entry,) = (await office.usage("asker", group_by=""))["data"]
        assert entry["cost_usd"] == "0.000002"


class TestEarlierAnswers:
    async def test_the_cache_header_says_hit_or_miss(self, office: Office) -> None:
        first = await office.ask("asker", **{"x-penstock-cache": "300"})
        second = await office.ask("asker", **{"x-penstock-cache": "300"})
        assert [answer.headers["x-penstock-cache"] for answer in (first, second)] == ["miss", "hit"]
        assert first.json()["choices"] == second.json()["choices"]
        assert "x-penstock-cache" not in (await office.ask("asker")).headers
        assert (await office.ask("other", **{"x-penstock-cache": "300"})).headers[
            "x-penstock-cache"
        ] == "miss"
        (entry,) = (await office.usage("asker", group_by=""))["data"]
        assert (entry["requests"]["total"], entry["requests"]["cached"]) == (3, 1)
        assert entry["cost_usd"] == "0.00002"

    @pytest.mark.parametrize("value", ["-1", "nan", "inf", "long", ""])
    async def test_a_cache_header_must_be_seconds(self, office: Office, value: str) -> None:
        response = await office.ask("asker", **{"x-penstock-cache": value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "x-penstock-cache"

    async def test_idempotency_keys_with_the_sdk(self, office: Office) -> None:
        client = office.sdk("asker")
        headers = {"Idempotency-Key": "order-1"}

        async def ask(prompt: str) -> openai.types.Completion:
            return await client.completions.create(model="bytes", prompt=prompt, extra_headers=headers)

        first, second = await ask("hi"), await ask("hi")
        assert first.id == second.id
        assert len(office.engine.added) == 1
        with pytest.raises(openai.ConflictError):
            await ask("something else")

    async def test_a_streamed_repeat_is_the_same_events(self, office: Office) -> None:
        client = office.sdk("asker")
        texts = []
        for _ in range(2):
            stream = await client.chat.completions.create(
                model="bytes",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                extra_headers={"x-penstock-cache": "60"},
            )
            texts.append([chunk.choices[0].delta.content async for chunk in stream])
        assert texts[0] == texts[1]
        assert len(office.engine.added) == 1
